"""Polling calls raise once nothing can arrive any more, as waiting calls do."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, CollectiveError, TransportError, TransportTimeout
from objcomm._failures import losses, watchdog
from tests.group.helpers import (
    assert_group_works,
    error_in,
    hear,
    is_said,
    say,
    subgroup,
    tell_all,
)
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here


def no_limit_passed(call: Callable[[], Any]) -> Any:
    """Return the result of a call with a short timeout, or None if it times out."""
    try:
        return call()
    except TransportTimeout:
        return None


#: Calls to repeat, for one rank or any; each returns None while nothing has arrived.
POLLS: dict[str, Callable[..., Any]] = {
    "iprobe": objcomm.iprobe,
    "recv": lambda *to, **group: no_limit_passed(lambda: objcomm.recv(*to, timeout=0.02, **group)),
    "probe": lambda *to, **group: no_limit_passed(
        lambda: objcomm.probe(*to, timeout=0.02, **group)
    ),
}


def poll(kind: str, src: int | None = None, group: Any = None) -> Any:
    """Poll until a message or an error arrives; fail if neither does."""
    until = time.monotonic() + PATIENCE_S
    while (found := POLLS[kind](src, group=group)) is None:
        assert time.monotonic() < until, "neither a message nor an error has come"
        time.sleep(0.01)
    return found


def destroy_the_world() -> None:
    """Destroy this rank's process group, and wait until the store holds the reason."""
    dist.destroy_process_group()
    wait_until(
        lambda: all(each.name != "objcomm-board" for each in threading.enumerate()),
        "the end of the thread that tells it",
    )


@contextlib.contextmanager
def looking_when_said(topic: str) -> Iterator[None]:
    """Look for lost senders only after ``topic`` is said: a sender may give its reason late."""
    look = losses.look_for_senders

    def look_if_said(*given: Any) -> None:
        if is_said(topic):
            look(*given)

    with mock.patch.object(watchdog, "look_for_senders", look_if_said):
        yield


def be_killed() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


# Each of the others resembles one of these.
ENDS = [("iprobe", "killed", 1), ("recv", "killed", None), ("probe", "destroyed", 1)]


@ranks(2, expect_dead=[1])
@pytest.mark.parametrize(("kind", "end", "src"), ENDS)
def test_who_polls_for_a_first_message_hears_of_its_senders_end(
    kind: str, end: str, src: int | None
) -> None:
    # A new group: on existing connections, the kernel would report the end of a killed rank.
    group: Any = dist.new_group() if end == "killed" else None
    objcomm.barrier()
    if here().rank == 1:
        hear("rank 0 polls")
        if end == "destroyed":
            destroy_the_world()
        say("rank 1 has left")
        if end == "destroyed":
            hear("rank 0 has heard")
        be_killed()
    with looking_when_said("rank 1 has left"):
        assert POLLS[kind](src, group=group) is None
        say("rank 0 polls")
        error = error_in(TransportError, lambda: poll(kind, src, group))
    assert not isinstance(error, TransportTimeout)
    assert error.peers == (1,)
    assert ("destroyed its process group" if end == "destroyed" else "has ended") in str(error)
    with pytest.raises(BrokenGroupError):
        objcomm.recv(1, group=group)
    say("rank 0 has heard")


@ranks(3, expect_dead=[1, 2])
def test_polling_for_any_rank_finds_messages_of_the_remaining_ranks() -> None:
    objcomm.barrier()
    if here().rank == 1:
        hear("rank 0 polls")
        destroy_the_world()
        say("rank 1 has left")
        hear("rank 0 has heard")
        be_killed()
    if here().rank == 2:
        hear("rank 0 has heard of rank 1")
        objcomm.send("from rank 2", 0)
        hear("rank 0 has heard")
        be_killed()
    assert objcomm.iprobe() is None
    say("rank 0 polls")
    hear("rank 1 has left")
    error = error_in(TransportError, lambda: poll("iprobe", 1))
    assert error.peers == (1,)
    say("rank 0 has heard of rank 1")
    found = poll("iprobe")
    assert found.src == 2
    assert objcomm.recv() == "from rank 2"
    say("rank 0 has heard")


@ranks(3)
@pytest.mark.parametrize("kind", POLLS)
def test_polling_in_a_block_raises_when_another_rank_fails(kind: str) -> None:
    """Ranks 0 and 2 poll each other, so no connection to rank 1 reports the failure.

    They use a separate group because they may connect while the block fails, and one of them may
    then receive the failure twice.
    """
    own, other = here().rank, 2 - here().rank
    heard: list[CollectiveError] = []  # from polls; the block raises one for any error

    def fail_or_poll(group: Any) -> None:
        if own == 1:
            hear("rank 0 polls")
            hear("rank 2 polls")
            raise LookupError("of rank 1")
        assert POLLS[kind](other, group=group) is None
        say(f"rank {own} polls")
        heard.append(error_in(CollectiveError, lambda: poll(kind, other, group)))
        raise heard[0]

    with subgroup(0, 1, 2) as group:
        with (
            pytest.raises(CollectiveError, match="of rank 1"),
            objcomm.fail_together(group=group),
        ):
            fail_or_poll(group)
        assert len(heard) == (own != 1)
        tell_all("all have left the block", "")
    assert_group_works()


@ranks(3, expect_dead=[1])
@pytest.mark.parametrize("kind", POLLS)
def test_who_polls_in_a_block_hears_that_a_third_rank_has_died_in_it(kind: str) -> None:
    own, other = here().rank, 2 - here().rank
    objcomm.sendrecv(own, (own + 1) % 3, (own - 1) % 3)

    def die_or_poll() -> None:
        with objcomm.fail_together():
            if own == 1:
                hear("rank 0 polls")
                hear("rank 2 polls")
                be_killed()
            assert POLLS[kind](other) is None
            say(f"rank {own} polls")
            poll(kind, other)

    assert "rank 1 ended: its process" in str(error_in(CollectiveError, die_or_poll))
    survivors: Any = dist.new_group([0, 2], use_local_synchronization=True)
    assert_group_works(survivors)
