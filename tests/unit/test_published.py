"""What users see of public functions: their own lines in tracebacks, and names that pickle."""

import operator
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import objcomm
from objcomm import _config
from objcomm._calls import call
from objcomm.compat import axolotl, flashy, speechbrain
from objcomm.compat import torch as compat_torch

PACKAGE = str(Path(objcomm.__file__).parent)
CALL_FILE = str(Path(call.__file__))
LOCK = threading.Lock()


def fail(*_: object) -> Any:
    raise ZeroDivisionError("mine")


@objcomm.main_process_only
def fail_on_main() -> None:
    fail()


def fail_in(block: Any) -> None:
    with block:
        fail()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


CALLS: dict[str, Callable[[], object]] = {
    "a wrong argument": lambda: objcomm.broadcast(1, src=9),
    "an argument too many": lambda: objcomm.broadcast(1, to=1),  # type: ignore[call-overload]
    "an object that can't be sent": lambda: objcomm.to_tensor(LOCK),
    "by msgpack": lambda: objcomm.to_tensor(LOCK, codec="msgpack"),
    "the user's function": lambda: objcomm.compute_and_broadcast(fail),
    "a decorated function": fail_on_main,
    "a block": lambda: fail_in(objcomm.fail_together(timeout=-1)),
    "a block that is inherited": lambda: fail_in(objcomm.main_first(timeout=-1)),
    "options": lambda: objcomm.configure(max_depth=0),
    "a function of a topic": lambda: objcomm.metrics.average_metrics({"a": "b"}),
    "torch's": lambda: compat_torch.all_gather_object([], LOCK),
    "flashy's": lambda: flashy.broadcast_object(LOCK, src=3),
    "speechbrain's": lambda: speechbrain.ddp_broadcast(LOCK, src=3),
    "axolotl's": lambda: axolotl.compute_and_broadcast(fail),
}


@pytest.mark.parametrize(
    ("name", "word", "named"),
    [("send", "dest", "dst="), ("recv", "source", "src="), ("broadcast", "root", "src= or dst=")],
)
def test_a_keyword_of_another_library_gets_a_note(name: str, word: str, named: str) -> None:
    with pytest.raises(TypeError, match=word) as caught:
        getattr(objcomm, name)(**{word: 0})
    assert caught.value.__notes__ == [f"{word}= is called {named} in objcomm"]


def test_a_type_error_of_the_users_class_gets_no_note() -> None:
    def refuse(*_: object, root: int, **__: object) -> None:
        raise TypeError(root)

    with pytest.raises(TypeError) as caught:
        objcomm.loader([1], klass=refuse, root=1)
    assert caught.value.args == (1,)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("name", CALLS)
def test_errors_show_the_programs_own_lines(name: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of any class
        CALLS[name]()
    shown = "".join(traceback.format_exception(caught.value))
    assert f'File "{PACKAGE}' not in shown
    assert "objcomm._" not in shown
    assert _files(caught.value)[-1] == __file__
    assert ("in fail\n" in shown) == ("mine" in shown)


def test_a_message_taken_twice_shows_the_programs_own_lines() -> None:
    objcomm.send("once", 0)
    message = objcomm.mprobe(0)
    message.recv()
    for receive in (message.recv, message.irecv):
        with pytest.raises(objcomm.UsageError) as caught:
            receive()
        assert _files(caught.value) == [__file__]


def test_a_defect_of_objcomm_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "resolve", operator.attrgetter("missing"))
    with pytest.raises(TypeError) as caught:
        objcomm.broadcast(1)
    assert CALL_FILE in _files(caught.value)


def test_there_is_a_switch_to_see_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBJCOMM_FULL_TRACEBACKS", "1")
    _config.shows_full_tracebacks.cache_clear()
    try:
        with pytest.raises(objcomm.CollectiveError) as caught:
            objcomm.run_on_main(fail)
        assert all(CALL_FILE in _files(each) for each in _chain(caught.value))
        assert "[objcomm:" not in caught.value.failures[0].traceback
        assert CALL_FILE in caught.value.failures[0].traceback
    finally:
        monkeypatch.undo()
        _config.shows_full_tracebacks.cache_clear()


@pytest.mark.parametrize("function", [objcomm.broadcast, objcomm.models.wrap, objcomm.stats])
def test_functions_and_methods_pickle_by_their_public_names(function: Any) -> None:
    assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301  # our own
