"""Calls from destructors that the garbage collector runs in the middle of other calls."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest

import objcomm
from objcomm import UsageError
from tests.group.helpers import assert_group_works
from tests.group.operations import OPERATIONS
from tests.ranks import ranks

Call = Callable[[], object]


class Cycle:
    """A reference cycle, which only the collector frees."""

    def __init__(self, at_end: Call) -> None:
        self._itself = self
        self._at_end = at_end

    def __del__(self) -> None:
        self._at_end()


@contextlib.contextmanager
def collected_at_every_step(at_end: Call) -> Iterator[list[BaseException]]:
    """Run a destructor wherever one can run; yield the errors that destructors raise."""
    raised: list[BaseException] = []
    is_busy = False

    def called() -> None:
        nonlocal is_busy
        if is_busy:
            return
        is_busy = True
        try:
            at_end()
        except BaseException as error:  # noqa: BLE001  # checked at the end
            raised.append(error)
        finally:
            is_busy = False
            Cycle(called)  # for the next collection

    before = gc.get_threshold()
    Cycle(called)
    gc.set_threshold(1)
    try:
        yield raised
    finally:
        gc.set_threshold(*before)
        is_busy = True


def _decoded() -> None:
    assert objcomm.from_tensor(objcomm.to_tensor("x")) == "x"


def _configured() -> None:
    with objcomm.configure(max_depth=100), objcomm.lane("of a destructor"):
        objcomm.stats()


def _sent() -> None:
    rank = objcomm.rank()
    with contextlib.suppress(UsageError):
        work = objcomm.isend("x", rank, tag=5)
        work.wait()
        objcomm.recv(rank, tag=5)


AT_END: dict[str, Call] = {
    "stats": objcomm.stats,
    "decoded": _decoded,
    "configured": _configured,
    "sent": _sent,
    "dump": objcomm.recorder.dump,
}


@ranks(1, 2, disposable=True)
@pytest.mark.parametrize("name", AT_END)
def test_a_destructor_may_call_wherever_the_collector_runs(name: str) -> None:
    """Also within ``ContextVar.set`` (Python 3.11), where ``reset`` used to raise LookupError."""
    assert_group_works()
    with collected_at_every_step(AT_END[name]) as raised:
        for _ in range(4 if name == "dump" else 12):  # each dump takes a millisecond
            for call in OPERATIONS.values():
                call(1)
            assert objcomm.all_gather((1,), accept=["pickle"]) == [(1,)] * objcomm.world_size()
    assert not raised, raised[0]
    assert_group_works()
