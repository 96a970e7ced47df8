"""What ends a group: deaths, timeouts, interrupts and ranks that are out of step.

Every test has processes of its own, because it breaks them.
"""

import datetime
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, CollectiveError, TransportError, TransportTimeout, WireError
from objcomm.call import Call
from objcomm.transport.creation import store_of
from objcomm.world import resolve
from tests.group.helpers import (
    assert_group_works,
    exit_at_once,
    outcome_of,
    tell_all,
    when_main_thread_waits,
)
from tests.group.operations import OPERATIONS
from tests.ranks import ranks
from tests.workers import here

# A test that is about something else must not wait for long.
SHORT_S = 3.0


@ranks(2, expect_dead={1})
@pytest.mark.parametrize("name", ["broadcast", "gather", "all_gather", "all_reduce", "barrier"])
def test_a_peer_that_exits_is_named(name: str) -> None:
    objcomm.barrier()
    if here().rank == 1:
        exit_at_once()
    options = {"src": 1} if name == "broadcast" else {}
    with pytest.raises(TransportError) as caught:
        OPERATIONS[name](1, **options)
    assert caught.value.peers == (1,)
    assert "rank 1" in str(caught.value)
    with pytest.raises(TransportError):
        OPERATIONS[name](1, **options)


@ranks(2, expect_dead={0})
def test_a_peer_that_is_killed_while_others_wait_for_it_is_named() -> None:
    pids = objcomm.all_gather(os.getpid())
    if here().rank == 1:
        when_main_thread_waits(lambda: os.kill(pids[0], signal.SIGKILL))
        with pytest.raises(TransportError) as caught:
            objcomm.all_gather("x")
        assert caught.value.peers == (0,)
    else:
        threading.Event().wait()


@ranks(3, expect_dead={1})
def test_every_survivor_of_a_death_raises_and_says_why_it_stays_broken() -> None:
    objcomm.barrier()
    if here().rank == 1:
        exit_at_once()
    with pytest.raises(TransportError):
        objcomm.all_gather("x", timeout=SHORT_S)
    for _ in range(2):
        with pytest.raises((BrokenGroupError, TransportError)):
            objcomm.all_gather("y", timeout=SHORT_S)


@ranks(2, disposable=True)
@pytest.mark.parametrize("name", ["broadcast", "gather", "all_gather", "barrier", "all_reduce"])
def test_a_timeout_names_who_did_not_arrive(name: str) -> None:
    objcomm.barrier()
    if here().rank == 0:
        options: dict[str, Any] = {"src": 1} if name == "broadcast" else {}
        with pytest.raises(TransportTimeout) as caught:
            OPERATIONS[name](1, timeout=0.5, **options)
        assert caught.value.missing == (1,)
        assert caught.value.seconds == 0.5
        assert "rank 1" in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(BrokenGroupError):
            objcomm.barrier(timeout=SHORT_S)
    tell_all("the end", "")


@ranks(2, disposable=True)
def test_a_timeout_is_never_taken_for_a_death() -> None:
    for turn in range(20):
        group = dist.new_group([0, 1])
        objcomm.barrier(group=group)
        if here().rank == 0:
            # Gloo counts in whole milliseconds, and may wake before or after the limit.
            with pytest.raises(TransportTimeout) as caught:
                objcomm.all_gather(1, group=group, timeout=0.05 + 0.0003 * turn)
            assert caught.value.missing == (1,)
        tell_all(f"turn {turn}", "")


@ranks(3, disposable=True)
def test_only_the_missing_rank_is_named() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with pytest.raises(TransportTimeout) as caught:
            objcomm.gather(1, timeout=1.0)
        assert caught.value.missing == (2,)
    elif here().rank == 1:
        outcome_of(lambda: objcomm.gather(1, timeout=1.0))
    tell_all("the end", "")


@ranks(2, disposable=True)
def test_a_longer_timeout_outlasts_the_groups_own() -> None:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if here().rank == 1:
        threading.Event().wait(1.5)
    assert objcomm.all_gather("x", group=group, timeout=15) == ["x", "x"]
    assert_group_works(group)


@ranks(2, disposable=True)
def test_the_users_group_survives_a_timeout_of_ours() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with pytest.raises(TransportTimeout):
            objcomm.all_gather(1, timeout=0.5)
    told = [None, None]
    dist.all_gather_object(told, here().rank)
    assert told == [0, 1]


@ranks(2, disposable=True)
@pytest.mark.parametrize("name", ["broadcast", "gather", "all_gather", "barrier", "all_reduce"])
def test_ctrl_c_ends_a_waiting_rank_at_once(name: str) -> None:
    objcomm.barrier()
    if here().rank == 0:
        pressed: list[float] = []

        def press() -> None:
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        when_main_thread_waits(press)
        options = {"src": 1} if name == "broadcast" else {}
        with pytest.raises(KeyboardInterrupt):
            OPERATIONS[name](1, **options)
        # Promised within 1 s; a loaded machine gets more.
        assert time.monotonic() - pressed[0] < 5
    tell_all("interrupted", "")

    def go_on() -> None:
        if here().rank == 1 and name == "all_gather":
            # What the interrupted rank had sent may still arrive: it is of this very call.
            objcomm.all_gather("x", timeout=SHORT_S)
        objcomm.all_gather("next", timeout=SHORT_S)

    # The interrupted call's messages may lie anywhere: nobody takes them for the next call's.
    with pytest.raises(TransportError):
        go_on()
    tell_all("the end", "")


@ranks(2, disposable=True)
def test_a_signal_handler_that_returns_lets_the_wait_go_on() -> None:
    objcomm.barrier()
    handled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))

    def interrupt_then_let_go() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        here().store("go").set("go", "")

    if here().rank == 0:
        when_main_thread_waits(interrupt_then_let_go)
        assert objcomm.all_gather("x") == ["x", "x"]
        assert handled == [signal.SIGTERM]
    else:
        here().store("go").get("go")
        assert objcomm.all_gather("x") == ["x", "x"]
    assert_group_works()


@ranks(2, disposable=True)
@pytest.mark.parametrize("name", ["broadcast", "all_gather"])
def test_a_message_beyond_the_receivers_limit_is_refused_before_it_is_allocated(name: str) -> None:
    objcomm.barrier()
    large = bytes(2_000_000) if here().rank == 0 else b""
    if here().rank == 1:
        with (
            objcomm.configure(max_nbytes=1_000_000),
            pytest.raises(WireError, match="more than the limit of 1000000") as caught,
        ):
            OPERATIONS[name](large, timeout=SHORT_S)
        assert "rank 0" in str(caught.value)
    else:
        # Without the refusal the sender would wait for its payload to be taken.
        with pytest.raises(CollectiveError) as caught_here:
            OPERATIONS[name](large)
        assert caught_here.value.failures[1].type_name.endswith("WireError")
        assert "more than the limit" in caught_here.value.failures[1].message
    assert_group_works()


@ranks(2, disposable=True)
def test_an_interrupt_before_ranks_confirm_reaches_those_that_wait_for_it() -> None:
    objcomm.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if here().rank == 1:
            patch.setattr(Call, "announcement", _interrupted)
        with pytest.raises(KeyboardInterrupt if here().rank == 1 else TransportError) as caught:
            objcomm.broadcast("x", confirm=True)
    assert here().rank == 1 or "left after KeyboardInterrupt" in str(caught.value)
    assert_group_works(dist.new_group())


def _interrupted(*_: object) -> Any:
    raise KeyboardInterrupt


@ranks(2, disposable=True)
def test_a_verdict_that_nobody_can_read_ends_all_waits() -> None:
    objcomm.barrier()
    mesh = resolve(None)._whole.mesh  # noqa: SLF001  # nothing public writes to its place
    assert mesh is not None
    if here().rank == 0:
        store_of(dist.group.WORLD).set(f"objcomm/verdict/{mesh.nonce}", "of another program")
    tell_all("it is written", "")
    with (
        objcomm.configure(max_nbytes=1_000 if here().rank == 1 else 1 << 30),
        pytest.raises(TransportError, match="the store holds a verdict that can't be read"),
    ):
        objcomm.broadcast(bytes(1_000_000))
    with pytest.raises(BrokenGroupError):
        objcomm.barrier()
    assert_group_works(dist.new_group())


@ranks(2)
def test_a_limit_that_is_kept_changes_nothing() -> None:
    with objcomm.configure(max_nbytes=1_000_000):
        assert objcomm.all_gather(bytes(900_000)) == [bytes(900_000)] * 2
    assert_group_works()
