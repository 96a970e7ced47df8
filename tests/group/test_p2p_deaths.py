"""Point-to-point messages when a rank dies or leaves: which calls fail, and what arrives."""

import atexit
import gc
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, TransportError
from objcomm._calls.watched import Watched
from objcomm._transport import threads
from objcomm._transport.streams import StreamLink
from tests.group.helpers import error_in, hear, is_alive, say, tell_all, when_main_thread_waits
from tests.group.pairs import LARGE, assert_all_works, assert_pair_works, die, swap
from tests.ranks import OVER_GLOO, ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here


def process_of_rank_1() -> int:
    """The process id of rank 1; every rank must call this."""
    return int(tell_all("pid", str(os.getpid()))[1])


def await_death(pid: int) -> None:
    """Wait until a process has ended; it may still be a zombie."""
    wait_until(lambda: not is_alive(pid), f"the end of process {pid}")


WAITS: dict[str, Callable[[], Any]] = {
    "recv": lambda: objcomm.recv(1),
    "recv from any": objcomm.recv,
    "probe": lambda: objcomm.probe(1),
    "mprobe": lambda: objcomm.mprobe(1),
    "send of something large": lambda: objcomm.send(LARGE, 1),
    "send of something between": lambda: objcomm.send(bytes(1_600_000), 1),
    "ssend": lambda: objcomm.ssend("never", 1),
    "isend": lambda: objcomm.isend(LARGE, 1).wait(),
    "irecv": lambda: objcomm.irecv(1, tag=None).wait(),
    "irecv from any": lambda: objcomm.irecv().wait(),
    "sendrecv": lambda: objcomm.sendrecv(LARGE, 1, 1),
}

# A wait, whether the ranks have met, and whether rank 1 is dead before it. Each case costs three
# new processes, so only ranks that have met try every kind of wait.
QUICK = [
    *[(wait, True, False) for wait in ("recv", "recv from any", "mprobe", "ssend")],
    *[(wait, True, False) for wait in ("isend", "sendrecv")],
    ("send of something large", True, True),
    ("recv", False, False),
    ("probe", False, True),
]
LONG = [  # each of these resembles one of the quick ones
    *[(wait, True, False) for wait in WAITS if (wait, True, False) not in QUICK],
    *[(wait, True, True) for wait in ("recv", "sendrecv")],
    *[(wait, False, False) for wait in ("recv from any", "send of something large")],
    ("isend", False, True),
]


@ranks(3, expect_dead=[1])
@pytest.mark.parametrize(
    ("wait", "have_met", "is_dead_before"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
)
def test_a_death_ends_calls_that_wait_for_that_rank(
    wait: str, *, have_met: bool, is_dead_before: bool
) -> None:
    objcomm.barrier()
    if have_met:
        assert_pair_works()
    pid = process_of_rank_1()
    if here().rank == 1:
        if is_dead_before:
            die()
        hear("rank 0 waits")
        os._exit(3)
    if here().rank == 0:
        if is_dead_before:
            await_death(pid)
        else:
            when_main_thread_waits(lambda: say("rank 0 waits"))
        assert error_in(TransportError, WAITS[wait]).peers == (1,)
        for call in (WAITS["recv"], WAITS["mprobe"], lambda: objcomm.send(1, 1)):
            error_in(BrokenGroupError, call)
        objcomm.send("the others can still talk", 2)
        assert objcomm.recv() == "yes"
    else:
        assert objcomm.recv(0) == "the others can still talk"
        objcomm.send("yes", 0)


@ranks(2, expect_dead=[1], environment=OVER_GLOO)
@pytest.mark.parametrize("src", [1, None])
def test_a_death_between_head_and_payload(src: int | None) -> None:
    pid = process_of_rank_1()
    if here().rank == 1:
        work = objcomm.isend(LARGE, 0)
        assert not work.done()
        hear("probed")
        die()
    found = objcomm.probe(src)
    assert found.nbytes > len(LARGE)
    say("probed")
    await_death(pid)
    assert error_in(TransportError, lambda: objcomm.recv(src)).peers == (1,)


@ranks(2, expect_dead=[1])
@pytest.mark.parametrize("src", [1, None])
def test_a_death_before_the_memory_of_a_message_is_handed_over(src: int | None) -> None:
    """Once the memory is handed over, the message arrives even if its sender dies."""
    assert_pair_works()
    if here().rank == 1:
        with mock.patch.object(StreamLink, "send_share", side_effect=lambda *_: die()):
            objcomm.send(LARGE, 0)
    assert error_in(TransportError, lambda: objcomm.recv(src)).peers == (1,)


@ranks(2, expect_dead=[1])
def test_a_death_during_the_payload() -> None:
    """Rank 1 dies while it sends, or right after where the system accepts the whole payload."""
    if here().rank == 1:
        objcomm.isend(bytes(256 << 20), 0)
        objcomm.recv(0)
        die()
    objcomm.probe(1)
    objcomm.send("now", 1)

    def receive() -> None:
        while True:
            objcomm.recv(1)

    assert error_in(TransportError, receive).peers == (1,)


@ranks(3, expect_dead=[1])
def test_messages_sent_before_a_death_are_received() -> None:
    assert_pair_works()
    pid = process_of_rank_1()
    if here().rank == 1:
        for number in range(5):
            objcomm.send(number, 0)
        os._exit(0)
    if here().rank == 0:
        await_death(pid)
        wait_until(lambda: objcomm.iprobe(1), "the first message")
        assert [objcomm.recv(1) for _ in range(3)] == [0, 1, 2]
        assert [objcomm.recv() for _ in range(2)] == [3, 4]
        assert error_in(TransportError, objcomm.recv).peers == (1,)
        say("all received")
        assert objcomm.recv() == "from rank 2"
    else:
        hear("all received")
        objcomm.send("from rank 2", 0)


@ranks(3, expect_dead=[1, 2])
@pytest.mark.parametrize("is_destroyed", [False, True], ids=["abandoned", "destroyed"])
def test_a_receive_from_any_rank_ignores_a_rank_whose_program_ended(*, is_destroyed: bool) -> None:
    pid = process_of_rank_1()
    if here().rank == 0:
        assert sorted(objcomm.recv() for _ in range(2)) == [1, 2]
        await_death(pid)
        when_main_thread_waits(lambda: say("rank 0 waits"))
        assert objcomm.recv() == "late"
        error = error_in(TransportError, objcomm.recv)
        assert "ended" in str(error) or "destroyed" in str(error)
        error_in(TransportError, lambda: objcomm.recv(1))
        return
    objcomm.send(here().rank, 0)
    if here().rank == 2:
        hear("rank 0 waits")
        objcomm.send("late", 0)
    if is_destroyed:
        dist.destroy_process_group()
        gc.collect()
    atexit._run_exitfuncs()  # noqa: SLF001  # as at a program's end; there is no public name for it
    os._exit(0)


@ranks(2, environment=OVER_GLOO)
def test_a_send_succeeds_if_its_receiver_leaves_after_receiving() -> None:
    """The sender stays busy until the receiver has taken everything and left."""
    group: Any = dist.new_group([0, 1])
    assert swap("met", group=group) == "met"
    leave_call = Watched.__exit__

    def leave_late(self: Watched, *raised: Any) -> None:
        wait_until(lambda: self.mesh.is_closed, "the end of the connection")
        leave_call(self, *raised)

    if here().rank == 1:
        assert objcomm.recv(0, group=group) == LARGE[:1000]
    else:
        with (
            mock.patch.object(Watched, "__exit__", leave_late),
            mock.patch.object(threads, "_LAST_TURN_SECONDS", PATIENCE_S),
        ):
            objcomm.send(LARGE[:1000], 1, group=group)
        error_in(TransportError, lambda: objcomm.send("more", 1, group=group))
    dist.destroy_process_group(group)
    assert_all_works()
