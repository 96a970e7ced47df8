"""Calls in the middle of another call on the same thread: from signal handlers and destructors."""

import contextlib
import functools
import gc
import itertools
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import pytest

import objcomm
from objcomm import UsageError
from objcomm._calls.call import Call
from objcomm._calls.group import resolve
from tests.group.any_call import called
from tests.group.helpers import assert_group_works
from tests.group.operations import MESSAGES, OPERATIONS
from tests.public_names import FUNCTIONS
from tests.ranks import ranks

Action = Callable[[], object]

_TICK_S = 0.002
#: These create or destroy the world.
_NO_CALLS = {"init", "launch", "shutdown"}
#: These cause no traffic and always succeed.
LOCAL = {
    *("exporters.activity_to_prometheus", "exporters.stats_to_prometheus", "from_tensor"),
    *("is_initialized", "is_main", "monitor", "rank", "rank_prefixed_message", "recorder.dump"),
    *("stats", "to_tensor", "world_size"),
}
#: Point-to-point calls: the message that they wait for may never come.
_P2P = {
    *("improbe", "iprobe", "irecv", "isend", "issend", "mprobe", "probe", "recv", "send"),
    *("sendrecv", "ssend"),
}
#: These only use their arguments or return a decorator.
_ELSE = {
    *("as_completed", "check", "codecs.register_codec", "exporters.stats_to_tensorboard"),
    *("is_main", "loader", "main_process_only", "once_per_node", "register", "reset_stats"),
    *("models.wrap", "new_group", "stream", "survivors", "wait_all"),
}
COLLECTIVE = sorted(set(FUNCTIONS) - _NO_CALLS - LOCAL - _P2P - _ELSE)


class Handler:
    """Make the next public call each time it is called.

    Attributes:
        sent: messages sent to the next rank.
        errors: those of calls that neither succeeded nor were refused.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.errors: list[str] = []
        self._is_busy = False
        self._names = itertools.cycle([*sorted({*LOCAL, *_P2P, *COLLECTIVE}), "lane"])

    def __call__(self, *_: object) -> None:
        if self._is_busy:
            return
        self._is_busy = True
        try:
            self._call(next(self._names))
        except Exception as error:  # noqa: BLE001  # not in the call that was interrupted
            self.errors.append("".join(traceback.format_exception(error)))
        finally:
            self._is_busy = False

    def _call(self, name: str) -> None:
        if name in LOCAL:
            called(name)
            return
        is_alone = objcomm.world_size() == 1
        if name in COLLECTIVE and not is_alone and not is_in_call():
            return  # the other ranks do not make this call
        with contextlib.suppress(UsageError):
            if name in _P2P:
                self._message(name)
            elif name == "lane":
                with objcomm.lane("of the handler"):
                    objcomm.iprobe()
            else:
                called(name)
            assert is_alone or name not in COLLECTIVE, name

    def _message(self, name: str) -> None:
        rank, size = objcomm.rank(), objcomm.world_size()
        if name in {"isend", "send"} and size > 1:
            getattr(objcomm, name)(self.sent, (rank + 1) % size, tag=77)
            self.sent += 1
        elif name in {"irecv", "issend"}:
            received = objcomm.irecv(rank, tag=78)
            try:
                objcomm.isend(name, rank, tag=78).wait()
            except UsageError:
                assert received.cancel()
                raise
            assert received.wait() == name
        elif name == "iprobe":
            objcomm.iprobe(tag=79)
        else:
            objcomm.isend(name, rank, tag=78).wait()
            found = objcomm.mprobe(rank, tag=78) if "probe" in name else None
            assert (objcomm.recv(rank, tag=78) if found is None else found.recv()) == name


def is_in_call() -> bool:
    """Whether this thread is in a collective call on the world, which has its number."""
    mesh = resolve(None)._whole.mesh  # noqa: SLF001  # nobody else knows
    return mesh is not None and "" in mesh.lanes and bool(mesh.lanes[""].caller)


@contextlib.contextmanager
def ringing(handler: Callable[..., None]) -> Iterator[None]:
    """A block in which a handler is called every 2 ms."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def at_some_lines(
    handler: Callable[[], None], every: int, within: tuple[str, ...] = ("objcomm.",)
) -> Iterator[None]:
    """A block in which a handler is called before some lines of some modules, on this thread."""
    count = itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(within):
            return None
        if event == "line" and next(count) % every == 0:
            sys.settrace(None)
            try:
                handler()
            finally:
                sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def calls() -> dict[str, Action]:
    """The call that is interrupted."""
    large = "x" * 300_000
    found: dict[str, Action] = {
        name: functools.partial(call, 1.0 if "scalar" in name else "x" * 100)
        for name, call in OPERATIONS.items()
    }
    found |= {name: functools.partial(call, large[:70_000]) for name, call in MESSAGES.items()}
    found["large all_gather"] = lambda: objcomm.all_gather(large)
    found["confirmed"] = lambda: objcomm.all_gather(1, confirm=True)
    found["asynchronous"] = lambda: objcomm.all_gather(1, async_op=True).wait()
    return found


def assert_all_is_well(handler: Handler) -> None:
    """Check that nothing is left over and that the messages of the handlers have arrived."""
    assert not handler.errors, handler.errors[0]
    rank, size = objcomm.rank(), objcomm.world_size()
    counts = objcomm.all_gather(handler.sent)
    got = [objcomm.recv((rank - 1) % size, tag=77) for _ in range(counts[(rank - 1) % size])]
    assert got == list(range(len(got)))
    assert_group_works()
    objcomm.sendrecv(1, (rank + 1) % size, (rank - 1) % size)


def interrupt_all(handler: Handler, turns: int, ring: Callable[..., Any]) -> None:
    assert_group_works()
    size, rank = objcomm.world_size(), objcomm.rank()
    objcomm.sendrecv(1, (rank + 1) % size, (rank - 1) % size)
    for call in calls().values():
        with ring(handler):
            for _ in range(turns):
                call()
    assert_all_is_well(handler)


@ranks(1, 2, long=[3], disposable=True)
@pytest.mark.parametrize("turns", [50, pytest.param(100, marks=pytest.mark.long)])
def test_a_handler_may_call_anything_and_never_waits_for_the_call_it_interrupted(
    turns: int,
) -> None:
    interrupt_all(Handler(), turns, ringing)


@ranks(1, 2, disposable=True)
@pytest.mark.parametrize(
    ("every", "turns"),
    [(37, 3), *(pytest.param(each, 5, marks=pytest.mark.long) for each in (7, 13))],
)
def test_a_handler_may_run_before_any_line(every: int, turns: int) -> None:
    interrupt_all(Handler(), turns, functools.partial(at_some_lines, every=every))


@ranks(1)
def test_a_handler_may_wait_for_a_thread_that_ends_the_interrupted_work() -> None:
    """At any line of the wait, those of futures included."""
    for line in itertools.count(1):
        received = objcomm.irecv(0, tag=1)
        called: list[object] = []

        def handler(called: list[object] = called) -> None:
            if not called:
                objcomm.isend("first", 0, tag=1)
                second = objcomm.irecv(0, tag=2)
                objcomm.isend("second", 0, tag=2)
                called.append(second.wait())

        within = ("objcomm._calls.work", "objcomm._transport", "concurrent.futures", "threading")
        with at_some_lines(handler, line, within), contextlib.suppress(TimeoutError):
            received.wait(0.001)
        if not called:  # the wait has fewer lines
            assert received.cancel()
            break
        assert (called, received.wait()) == (["second"], "first")
    assert line > 10


@ranks(1, 2, disposable=True)
def test_ctrl_c_before_a_calls_block_is_entered_does_not_refuse_the_next_call() -> None:
    assert_group_works()
    with (
        mock.patch.object(Call, "__enter__", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        objcomm.all_gather(1)
    assert_group_works()


class Cycle:
    """A reference cycle, which only the collector frees."""

    def __init__(self, at_end: Action) -> None:
        self._itself = self
        self._at_end = at_end

    def __del__(self) -> None:
        self._at_end()


@contextlib.contextmanager
def collected_at_every_step(at_end: Action) -> Iterator[list[BaseException]]:
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


AT_END: dict[str, Action] = {
    "stats": objcomm.stats,
    "decoded": _decoded,
    "configured": _configured,
    "sent": _sent,
    "dump": objcomm.recorder.dump,
}


@ranks(1, 2, disposable=True)
@pytest.mark.parametrize("name", AT_END)
def test_a_destructor_may_make_calls_wherever_the_collector_runs(name: str) -> None:
    """Also within ``ContextVar.set`` (Python 3.11), where ``reset`` used to raise LookupError."""
    assert_group_works()
    with collected_at_every_step(AT_END[name]) as raised:
        for _ in range(4 if name == "dump" else 12):  # each dump takes a millisecond
            for call in OPERATIONS.values():
                call(1)
            assert objcomm.all_gather((1,), accept=["pickle"]) == [(1,)] * objcomm.world_size()
    assert not raised, raised[0]
    assert_group_works()
