"""Inputs that fuzzing found, and a short fuzzing run: see ``tests.fuzz``."""

import gc
import random
import time
from pathlib import Path

import pytest

import objcomm
from objcomm import WireError
from objcomm._codecs import msgpack as plain
from objcomm._codecs import restricted, tensors
from objcomm._codecs.types import CONSTRUCTORS
from tests import fuzz
from tests.fuzz import drawn
from tests.fuzz.mutate import seeds, variant
from tests.fuzz.targets import TARGETS, attempt
from tests.ranks import solo
from tests.unit.address_space import peak_address_space_nbytes

_CORPUS = Path(fuzz.__file__).parent / "corpus"
_KEPT = sorted(path.relative_to(_CORPUS).as_posix() for path in _CORPUS.glob("*/*"))
_GROWTH_MAX_NBYTES = 256 << 20


@pytest.mark.filterwarnings("ignore")  # torch and numpy warn about odd sizes and dtypes
@pytest.mark.parametrize("kept", _KEPT)
def test_kept_bytes_give_a_value_or_an_objcomm_error(kept: str) -> None:
    gc.disable()  # with all that is imported here, a collection takes a second
    try:
        began = time.thread_time()
        accepted = attempt(kept.partition("/")[0], (_CORPUS / kept).read_bytes())
        took = time.thread_time() - began
    finally:
        gc.enable()
    assert took < 1  # processor seconds of this thread, so other programs and threads do not count
    assert accepted or not Path(kept).name.startswith("right")


@solo()
def test_no_kept_bytes_take_hundreds_of_megabytes() -> None:
    """In a fresh process, because a peak never shrinks."""
    before = peak_address_space_nbytes()
    for kept in _KEPT:
        attempt(kept.partition("/")[0], (_CORPUS / kept).read_bytes())
        assert peak_address_space_nbytes() - before < _GROWTH_MAX_NBYTES, kept


@pytest.mark.filterwarnings("ignore")  # likewise
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_messages_give_a_value_or_an_objcomm_error(name: str) -> None:
    chance, right = random.Random(name), seeds(name)
    for _ in range(2000):
        attempt(name, variant(chance, name, chance.choice(right)))


@pytest.mark.parametrize("name", [path.name for path in (_CORPUS / "failure").glob("*-*")])
def test_a_report_of_failures_is_read_completely_or_refused(name: str) -> None:
    raw = (_CORPUS / "failure" / name).read_bytes()
    if name.startswith(("right", "mutated")):
        attempt("failure", raw)
    else:
        with pytest.raises(WireError, match="can't be read"):
            TARGETS["failure"](raw)


def test_a_head_that_a_bundle_cuts_off_is_refused() -> None:
    for name in ("message/table-longer-than-what-arrived", "bundle/head-cut-off"):
        with pytest.raises(objcomm.WireError, match="cut off"):
            TARGETS[name.partition("/")[0]]((_CORPUS / name).read_bytes())


def test_everything_that_can_be_built_is_generated() -> None:
    arguments = [(*each.arguments, each.rest) for each in CONSTRUCTORS.values()]
    described = {each.description for several in arguments for each in several if each}
    assert described == set(drawn.ARGUMENTS)
    assert set(drawn.PARTS) == {*CONSTRUCTORS, *plain._RAISE}  # noqa: SLF001  # the rest of the table
    dtypes = {str(each) for each in tensors.DTYPES.values()}
    tools = restricted._TOOLS.keys() - dtypes  # noqa: SLF001  # likewise
    assert {*drawn.TOOLS.values(), *drawn.ADMITTED} >= tools


@pytest.mark.filterwarnings("ignore")  # about odd sizes
@pytest.mark.parametrize("name", drawn.PARTS)
def test_some_of_what_is_generated_can_be_built(name: str) -> None:
    chance = random.Random(name)
    several = [drawn.made(chance, name, 4) for _ in range(100)]
    assert any(attempt("plain", drawn.packed(each)) for each in several)
    if name in drawn.TOOLS:
        pickles = [drawn.Pickled(chance, each).stream for each in several]
        assert any(attempt("restricted_pickle", each) for each in pickles)
