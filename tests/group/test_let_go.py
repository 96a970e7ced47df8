"""Objects that are freed immediately instead of by the garbage collector."""

import gc
import signal
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch.distributed as dist

import objcomm
from objcomm import CollectiveError
from objcomm._p2p.mailbox import Arrived
from tests.group.helpers import assert_group_works, hear, say
from tests.open_files import open_files
from tests.ranks import OVER_GLOO, ranks
from tests.waits import wait_until
from tests.workers import here


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Unsendable:
    """Raises an error that only it refers to."""

    def __reduce__(self) -> NoReturn:
        raise ValueError("by design")


@ranks(2)
def test_what_could_not_be_sent_is_let_go() -> None:
    with no_collector():
        mine = Unsendable()
        kept = weakref.ref(mine)
        with suppress(CollectiveError):  # pytest.raises would hold the error, and so this frame
            objcomm.all_gather(mine)
        del mine
        assert kept() is None
    assert_group_works()


class Plain:
    """An object that supports weak references."""


@ranks(2)
def test_what_an_asynchronous_call_has_sent_is_let_go_before_its_work_has_ended() -> None:
    """Not later, when the lane's thread gets to it."""
    objcomm.barrier()  # a first call waits for all ranks, even an asynchronous one
    if here().rank == 0:
        hear("somebody looks")
        objcomm.gather(Plain(), confirm=True)
    else:
        with no_collector():
            mine, seen = Plain(), list[object]()
            kept = weakref.ref(mine)
            work = objcomm.gather(mine, confirm=True, async_op=True)
            del mine
            future = work._future  # noqa: SLF001  # nothing else shows the exact moment
            future.add_done_callback(lambda _: seen.append(kept()))
            say("somebody looks")
            assert work.wait() is None
            wait_until(lambda: seen, "the moment")
            assert seen == [None]
    assert_group_works()


@ranks(2)
def test_a_work_that_failed_at_once_is_let_go() -> None:
    with no_collector():
        work = objcomm.isend(Unsendable(), here().rank)
        kept = weakref.ref(work)
        with suppress(CollectiveError):
            work.wait()
        del work
        assert kept() is None
    assert_group_works()


@ranks(2)
def test_a_message_that_was_taken_in_is_let_go() -> None:
    def messages() -> int:
        return sum(type(each) is Arrived for each in gc.get_objects())

    other, before = 1 - here().rank, messages()
    work = objcomm.irecv(other)  # so that it is waiting when the message arrives
    objcomm.barrier()
    objcomm.send("small", other)
    assert work.wait() == "small"
    del work
    wait_until(lambda: messages() <= before, "the message to be let go")


@ranks(2, disposable=True)
def test_connections_of_a_destroyed_group_are_closed_without_the_collector() -> None:
    def use_and_destroy(turns: int) -> None:
        for _ in range(turns):
            group: Any = dist.new_group([0, 1])
            assert objcomm.all_gather(here().rank, group=group) == [0, 1]
            dist.destroy_process_group(group)

    use_and_destroy(2)
    with no_collector():
        before = open_files()
        use_and_destroy(6)
        # Gloo closes in a separate thread, so the last group's sockets may still be open.
        wait_until(lambda: open_files() <= before + 3, f"no more than {before} descriptors")


@ranks(2)
def test_signals_go_where_they_went_before_a_call() -> None:
    near, far = socket.socketpair()
    far.setblocking(False)  # noqa: FBT003  # socket's own signature
    with near, far:
        before = signal.set_wakeup_fd(far.fileno())
        try:
            objcomm.barrier()
        finally:
            assert signal.set_wakeup_fd(before) == far.fileno()


@ranks(2, environment=OVER_GLOO)  # whose waits need it
def test_where_signals_went_may_be_closed_by_its_owner() -> None:
    """A library may close the file descriptor it set; that must not affect a call."""
    assert_group_works()  # a new connection might reuse its number
    near, far = socket.socketpair()
    far.setblocking(False)  # noqa: FBT003  # socket's own signature
    with near:
        before = signal.set_wakeup_fd(far.fileno())
        far.close()
        try:
            assert_group_works()
        finally:
            assert signal.set_wakeup_fd(before) == -1
