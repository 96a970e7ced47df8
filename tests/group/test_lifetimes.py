"""Nothing sent, received or destroyed is kept, and most of it does not wait for the collector."""

import gc
import signal
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError
from objcomm._p2p.mailbox import Arrived
from tests.group.helpers import Held, assert_group_works, fill_history, hear, say
from tests.group.operations import OBJECT_OPERATIONS, OPERATIONS
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


@ranks(1, 3)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", OBJECT_OPERATIONS)
def test_neither_a_sent_nor_a_received_object_is_kept(name: str, *, is_async: bool) -> None:
    with no_collector():
        mine, kept = Held(), list[weakref.ref[Any]]()
        got: Any = OPERATIONS[name](mine, async_op=is_async)
        if is_async:
            kept.append(weakref.ref(got))
            got = got.wait()
        several = got if isinstance(got, list) else [got]
        kept += [weakref.ref(obj) for obj in (mine, *several) if obj is not None]
        # Make other calls, because the messages of the last one might be kept.
        if is_async:
            objcomm.barrier(async_op=True).wait()
        objcomm.barrier()
        del mine, got, several
        assert [ref() for ref in kept] == [None] * len(kept)


@ranks(2)
def test_memory_does_not_grow_with_the_number_of_calls() -> None:
    def call_often() -> int:
        for turn in range(25):
            objcomm.all_gather((turn, bytes(100_000)))
            objcomm.all_reduce(torch.ones(20_000))
            objcomm.gather("small")
            works = [
                objcomm.all_gather((turn, bytes(100_000)), async_op=True),
                objcomm.all_reduce(torch.ones(20_000), async_op=True),
            ]
            objcomm.wait_all(works)
        del works
        gc.collect()
        return len(gc.get_objects())

    fill_history()
    counts = [call_often() for _ in range(5)]
    # A leak shows in each round; a thread that starts or ends affects only one of them.
    assert min(after - before for before, after in pairwise(counts)) < 15, counts


@ranks(2, disposable=True)
def test_the_collector_need_not_free_the_sockets_and_threads_of_a_destroyed_group() -> None:
    def use_and_destroy(turns: int) -> None:
        for _ in range(turns):
            group: Any = dist.new_group([0, 1])
            assert objcomm.all_gather(objcomm.rank(), group=group) == [0, 1]
            with objcomm.lane("side"):
                objcomm.barrier(group=group)
            dist.destroy_process_group(group)

    def kept() -> tuple[int, int]:
        return open_files(), len(list(Path("/proc/self/task").iterdir()))

    def is_as_before() -> bool:
        """Gloo closes in a separate thread, so the last group's may still be there."""
        now = kept()
        return now[0] <= sockets + 3 and now[1] <= threads + 2

    use_and_destroy(2)
    with no_collector():
        sockets, threads = kept()
        use_and_destroy(8)
        wait_until(is_as_before, "the sockets and threads of destroyed groups to go")


class Unsendable:
    """Raises an error that only it refers to."""

    def __reduce__(self) -> NoReturn:
        raise ValueError("by design")


@ranks(2)
def test_an_object_that_could_not_be_sent_is_freed() -> None:
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
def test_what_an_asynchronous_call_sent_is_freed_before_its_work_ends() -> None:
    """Not later, when the lane's thread gets to it."""
    objcomm.barrier()  # a first call waits for all ranks, even an asynchronous one
    if here().rank == 0:
        hear("rank 1 looks")
        objcomm.gather(Plain(), confirm=True)
    else:
        with no_collector():
            mine, seen = Plain(), list[object]()
            kept = weakref.ref(mine)
            work = objcomm.gather(mine, confirm=True, async_op=True)
            del mine
            future = work._future  # noqa: SLF001  # nothing else shows the exact moment
            future.add_done_callback(lambda _: seen.append(kept()))
            say("rank 1 looks")
            assert work.wait() is None
            wait_until(lambda: seen, "the moment")
            assert seen == [None]
    assert_group_works()


@ranks(2)
def test_a_work_that_failed_immediately_is_freed() -> None:
    with no_collector():
        work = objcomm.isend(Unsendable(), here().rank)
        kept = weakref.ref(work)
        with suppress(CollectiveError):
            work.wait()
        del work
        assert kept() is None
    assert_group_works()


@ranks(2)
def test_a_message_that_was_received_is_freed() -> None:
    def messages() -> int:
        return sum(type(each) is Arrived for each in gc.get_objects())

    other, before = 1 - here().rank, messages()
    work = objcomm.irecv(other)  # so that it is waiting when the message arrives
    objcomm.barrier()
    objcomm.send("small", other)
    assert work.wait() == "small"
    del work
    wait_until(lambda: messages() <= before, "the message to be freed")


@ranks(2)
def test_a_call_leaves_the_wakeup_descriptor_of_signals_as_it_was() -> None:
    near, far = socket.socketpair()
    far.setblocking(False)  # noqa: FBT003  # socket's own signature
    with near, far:
        before = signal.set_wakeup_fd(far.fileno())
        try:
            objcomm.barrier()
        finally:
            assert signal.set_wakeup_fd(before) == far.fileno()


@ranks(2, environment=OVER_GLOO)  # whose waits need it
def test_the_wakeup_descriptor_of_signals_may_be_closed_by_its_owner() -> None:
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
