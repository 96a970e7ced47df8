"""The public names: all exist, are documented, and are the same everywhere."""

import inspect
import operator
import pickle
import pickletools
import pkgutil
import re
import traceback
import typing
from pathlib import Path

import pytest

import objcomm
from objcomm._collectives.reduction.operators import _NAMED, NamedOperator
from objcomm._config import NAMES_ELSEWHERE, OPERATORS_ELSEWHERE
from tests.group.operations import OPERATIONS
from tests.public_names import FUNCTIONS, PUBLIC, TOPICS

_ROOT = Path(__file__).parents[1]
REFERENCE = "\n".join(
    page.read_text(encoding="utf-8") for page in sorted((_ROOT / "docs" / "reference").glob("*.md"))
)
WANTED = {
    "broadcast", "gather", "all_gather", "scatter", "reduce", "all_reduce", "barrier",
    "all_to_all", "reduce_scatter", "scan", "exscan",
    "rank", "world_size", "is_initialized", "is_main", "to_tensor", "from_tensor",
    "ddp_broadcast", "gather_scalar", "reduce_and_broadcast",
    "metrics.all_gather_scalar", "metrics.average_metrics", "metrics.gather_from_all_ranks",
    "agree", "any_rank", "all_ranks", "shared_seed",
    "send", "recv", "isend", "irecv", "sendrecv", "probe", "iprobe", "Envelope",
    "ssend", "issend", "mprobe", "improbe", "Message",
    "Work", "as_completed", "wait_all",
    "lane", "stats", "reset_stats", "OperationStats", "register", "configure",
    "codecs.register_codec", "Op",
    "split", "dup", "new_group", "node_group", "leaders", "survivors",
    "run_on_main", "run_once_per_node", "main_process_only", "once_per_node",
    "main_first", "node_first", "compute_and_broadcast", "broadcast_file",
    "rank_prefixed_message",
}  # fmt: skip


def test_all_is_sorted_complete_and_true() -> None:
    assert list(objcomm.__all__) == sorted(objcomm.__all__)
    for name, topic in TOPICS.items():
        if name == "errors":
            continue
        assert list(topic.__all__) == sorted(topic.__all__) == sorted(set(topic.__all__))
    assert set(PUBLIC) >= WANTED
    assert {name.rpartition(".")[2] for name in PUBLIC if "." in name}.isdisjoint(objcomm.__all__)


def test_dir_shows_what_the_reference_lists() -> None:
    """So tab completion shows no rooms."""
    shown = {name for name in dir(objcomm) if not name.startswith("__")}
    assert shown == set(objcomm.__all__)
    private = {found.name for found in pkgutil.iter_modules(objcomm.__path__)} - shown
    assert {name for name in private if name[0] != "_"} == {"compat", "demo", "run"}


def test_an_unknown_name_is_reported_as_missing() -> None:
    with pytest.raises(AttributeError, match="module 'objcomm' has no attribute 'send_to_all'"):
        objcomm.send_to_all  # type: ignore[attr-defined]  # noqa: B018  # wrong on purpose
    assert not hasattr(objcomm, "_private")


def test_a_missing_name_points_to_the_module_that_has_it() -> None:
    with pytest.raises(AttributeError, match=r"it is objcomm\.metrics\.all_gather_scalar$"):
        getattr(objcomm, "all_gather_scalar")  # noqa: B009  # type checkers know that it is missing


@pytest.mark.parametrize(("elsewhere", "here"), NAMES_ELSEWHERE.items())
def test_a_name_of_another_library_is_answered_with_the_one_here(elsewhere: str, here: str) -> None:
    assert here in PUBLIC
    with pytest.raises(AttributeError, match=rf"it is called objcomm\.{re.escape(here)} here$"):
        getattr(objcomm, elsewhere)


@pytest.mark.parametrize(("elsewhere", "here"), OPERATORS_ELSEWHERE.items())
def test_an_operator_of_another_library_is_answered_with_the_one_here(
    elsewhere: str, here: str
) -> None:
    assert here in _NAMED
    for given in (elsewhere, elsewhere.upper()):
        with pytest.raises(objcomm.UsageError, match=f"; it is called '{here}' here$"):
            objcomm.all_reduce(1, given)  # type: ignore[call-overload]  # wrong on purpose


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    member = PUBLIC[name]
    doc = inspect.getdoc(member)
    assert doc
    if inspect.isfunction(member):
        assert member.__module__.startswith("objcomm")
        for parameter in set(inspect.signature(member).parameters) - {"options"}:
            assert f"{parameter}:" in doc, f"{name} does not say what {parameter} is"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference_once(name: str) -> None:
    entry = rf"^::: objcomm\.{re.escape(name)}$"
    assert len(re.findall(entry, REFERENCE, re.MULTILINE)) == 1


def test_the_type_of_every_public_function_is_checked() -> None:
    sample = (_ROOT / "tests" / "typing" / "public_api.py").read_text(encoding="utf-8")
    shown = set(re.findall(r"objcomm\.([a-z_.]+)", sample))
    wanted = {*FUNCTIONS, "main_first", "node_first", "lane"}
    assert shown >= wanted, sorted(wanted - shown)


def test_the_type_of_op_has_the_names_that_there_are() -> None:
    assert set(typing.get_args(NamedOperator)) == set(_NAMED)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_goes_by_the_package_and_not_by_its_room(name: str) -> None:
    member = PUBLIC[name]
    module, _, last = f"objcomm.{name}".rpartition(".")
    assert (member.__module__, member.__qualname__) == (module, last)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(member, protocol)
        texts = [given for _, given, _ in pickletools.genops(pickled) if isinstance(given, str)]
        assert " ".join(texts) == f"{module} {last}"
        assert pickle.loads(pickled) is member  # noqa: S301  # our own
    assert objcomm.from_tensor(objcomm.to_tensor(member)) is member


def test_an_error_is_printed_by_its_public_name() -> None:
    assert repr(objcomm.CollectiveError) == "<class 'objcomm.CollectiveError'>"
    lines = traceback.format_exception_only(objcomm.UsageError("no"))
    assert lines == ["objcomm.UsageError: no\n"]


def test_pickles_that_name_the_module_of_errors_still_load() -> None:
    pickled = pickle.dumps(objcomm.UsageError("no"), 0).replace(b"objcomm\n", b"objcomm.errors\n")
    assert b"objcomm.errors\nUsageError" in pickled
    assert type(pickle.loads(pickled)) is objcomm.UsageError  # noqa: S301  # our own


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(PUBLIC[name])])
def test_the_annotations_of_a_public_class_can_be_resolved(name: str) -> None:
    """Python resolves names in strings in the module that a class claims to be in."""
    typing.get_type_hints(PUBLIC[name])


def test_help_begins_with_ten_calls_and_one_example() -> None:
    before, example, _ = (objcomm.__doc__ or "").partition(">>> import objcomm\n")
    assert example
    calls = re.findall(r"``(\w+)\([\w, ]*\)``", before)
    assert len(calls) == len(set(calls)) == 10
    for name in calls:
        assert callable(getattr(objcomm, name))
    assert "room" not in before  # how the code is organized comes later


def test_the_first_docstring_names_every_room() -> None:
    named = set(re.findall(r"``(\w+)``", objcomm.__doc__ or ""))
    rooms = {found.name for found in pkgutil.iter_modules(objcomm.__path__)}
    assert named == rooms - {"__main__"}


SUBGROUPS = ["split", "dup", "new_group", "node_group", "leaders"]
CONTROL = [
    "run_on_main", "run_once_per_node", "main_process_only", "once_per_node", "main_first",
    "node_first",
]  # fmt: skip
DECODING = {"device", "accept", "allow"}
OPTIONS = {"group", "timeout", "codec", *DECODING}
#: The functions that take all options, and the options that others lack.
WITH_ALL = [
    "broadcast", "gather", "all_gather", "scatter", "reduce", "all_reduce", "reduce_and_broadcast",
    "sendrecv", "compute_and_broadcast",
]  # fmt: skip
LACKING = [
    *((name, set[str]()) for name in WITH_ALL),
    *((name, DECODING) for name in ("send", "isend")),
    *((name, {"codec"}) for name in ("recv", "irecv")),
    *((name, {"codec", "group"}) for name in ("Message.recv", "Message.irecv")),
    *((name, {"codec", *DECODING}) for name in ("probe", "mprobe", "barrier", "gather_scalar")),
    *((name, {"codec", *DECODING}) for name in ("metrics.all_gather_scalar", *SUBGROUPS, *CONTROL)),
    *((name, {"codec", "timeout", *DECODING}) for name in ("iprobe", "improbe")),
]


@pytest.mark.parametrize(("name", "lacking"), LACKING)
def test_options_are_keyword_only(name: str, lacking: set[str]) -> None:
    parameters = inspect.signature(operator.attrgetter(name)(objcomm)).parameters
    keywords = {p.name for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords >= OPTIONS - lacking
    for root in {"src", "dst"} & set(parameters):
        assert f"group_{root}" in keywords
        assert parameters[root].default is None


IN_FLIGHT = {
    name
    for name, function in FUNCTIONS.items()
    if "async_op" in inspect.signature(function).parameters
}


def test_operations_that_can_be_asynchronous_are_in_the_tests_of_all_operations() -> None:
    # The two point-to-point functions need a partner, and are covered by `sendrecv`.
    assert set(OPERATIONS) | {"send", "recv"} == {name.rpartition(".")[2] for name in IN_FLIGHT}


@pytest.mark.parametrize("name", sorted(IN_FLIGHT))
def test_async_op_is_a_keyword_that_is_false_by_default(name: str) -> None:
    parameter = inspect.signature(FUNCTIONS[name]).parameters["async_op"]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert parameter.default is False
