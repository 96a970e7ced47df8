"""Events that end a group: deaths, interrupts and refused messages."""

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, CollectiveError, TransportError, WireError
from objcomm._calls.call import Call
from objcomm._calls.group import resolve
from objcomm._failures.noticeboard import Board
from objcomm._failures.verdict import Verdict
from objcomm._world import bare, store_of
from tests.faults.victim import shut, sockets
from tests.group.helpers import (
    AWAIT_RANK_1,
    assert_group_works,
    error_in,
    groups_that_await_rank_1,
    hear,
    is_said,
    outcome_of,
    say,
    subgroup,
    tell_all,
    when_main_thread_waits,
)
from tests.group.operations import OPERATIONS
from tests.group.watched import hastily
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until, within
from tests.workers import here


@ranks(3, disposable=True)
def test_a_rank_that_lost_its_connections_does_not_repeat_a_cleared_verdict() -> None:
    before = sockets()
    objcomm.barrier()
    mesh = resolve(None)._whole.mesh  # noqa: SLF001  # its nonce is not public
    assert mesh is not None
    look, retract = Board.look, Board.retract

    def when_read(board: Board, key: str) -> None:
        """Clear the verdict only once rank 1 has read it, or rank 1 might find none."""
        wait_until(lambda: is_said("rank 1 has read"), "rank 1")
        retract(board, key)

    def when_cleared(board: Board, key: str) -> Verdict | None:
        if is_said("rank 1 has read"):
            return look(board, key)
        verdict = wait_until(lambda: look(board, key), "the others' verdict")
        say("rank 1 has read")
        wait_until(lambda: look(board, key) is None, "the others to clear it")
        return verdict

    patched = ("look", when_cleared) if here().rank == 1 else ("retract", when_read)
    with mock.patch.object(Board, *patched):
        if here().rank == 1:
            shut(sockets() - before, getattr(bare(store_of(dist.group.WORLD)), "port", 0))
        error = error_in(TransportError, lambda: objcomm.all_gather("a"))
        tell_all("all have raised", "")
    # No rank names itself: rank 1 has lost the others.
    assert error.peers == ((0, 2) if here().rank == 1 else (1,))
    assert mesh.board_thread.call(lambda board: board.look(mesh.nonce)) is None


@pytest.mark.timed
@ranks(2, disposable=True)
def test_ctrl_c_ends_a_waiting_rank_within_a_second() -> None:
    objcomm.barrier()
    if here().rank == 0:
        when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
        with hastily(), within(1.0), pytest.raises(KeyboardInterrupt):
            objcomm.all_gather("x")
    tell_all("interrupted", "")


@ranks(2, disposable=True)
def test_ctrl_c_ends_a_wait_in_any_operation_and_the_group() -> None:
    groups = groups_that_await_rank_1()
    if here().rank == 0:
        for name, group in groups.items():
            when_main_thread_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                OPERATIONS[name](1, group=group, **AWAIT_RANK_1[name])
    tell_all("interrupted", "")

    def make_next_call(name: str) -> None:
        if here().rank == 1 and name == "all_gather":
            # The interrupted rank's message belongs to this very call, so it may still arrive.
            objcomm.all_gather("x", group=groups[name])
        objcomm.all_gather("next", group=groups[name])

    # No rank mistakes a leftover message of the interrupted call for one of the next call.
    for name in groups:
        error_in(TransportError, partial(make_next_call, name))
    tell_all("the end", "")


@ranks(3, disposable=True)
def test_ctrl_c_in_a_first_use_raises_on_ranks_already_there() -> None:
    group = dist.new_group()
    if here().rank == 1:

        def interrupt() -> None:
            whole = resolve(group)._whole  # noqa: SLF001  # the nonce is not public
            wait_until(lambda: whole.mesh is not None and whole.mesh.nonce, "rank 0's answer")
            os.kill(os.getpid(), signal.SIGINT)

        when_main_thread_waits(interrupt)
        with pytest.raises(KeyboardInterrupt):
            objcomm.all_gather("x", group=group)
    elif here().rank == 0:
        with pytest.raises(TransportError, match="KeyboardInterrupt") as caught:
            objcomm.all_gather("x", group=group, timeout=PATIENCE_S)
        assert type(caught.value) is TransportError  # not TransportTimeout
        assert caught.value.peers == (1,)
    tell_all("both have raised", "")
    assert objcomm.all_gather(here().rank, group=group) == [0, 1, 2]


@ranks(2, disposable=True)
def test_a_wait_continues_after_a_signal_handler_that_returns() -> None:
    objcomm.barrier()
    handled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))

    def interrupt_then_let_go() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        say("go")

    if here().rank == 0:
        when_main_thread_waits(interrupt_then_let_go)
    else:
        hear("go")
    assert objcomm.all_gather("x") == ["x", "x"]
    assert handled == ([signal.SIGTERM] if here().rank == 0 else [])
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("name", ["broadcast", "all_gather"])
def test_a_message_beyond_the_receivers_limit_is_refused_before_it_is_allocated(name: str) -> None:
    with subgroup(0, 1) as group:
        objcomm.barrier(group=group)
        mine = bytes(2_000_000) if here().rank == 0 else b""
        call = partial(OPERATIONS[name], mine, group=group)
        if here().rank == 1:
            with objcomm.configure(max_nbytes=1_000_000):
                error = error_in(WireError, call)
            assert "more than the limit of 1000000" in str(error)
            assert "rank 0" in str(error)
        else:
            # Without the refusal the sender would wait for rank 1 to read its payload.
            failure = error_in(CollectiveError, call).failures[1]
            assert failure.type_name.endswith("WireError")
            assert "more than the limit" in failure.message
        assert_group_works(group)


@ranks(2)
@pytest.mark.parametrize(
    ("call", "interrupted"),
    [(objcomm.barrier, 0), (partial(objcomm.broadcast, "x", confirm=True), 1)],
    ids=["barrier", "confirmed broadcast"],
)
def test_an_interrupt_between_two_steps_of_a_call_is_reported_to_a_rank_that_waits(
    call: Callable[..., object], interrupted: int
) -> None:
    is_interrupted = here().rank == interrupted
    with subgroup(0, 1) as group:
        objcomm.barrier(group=group)
        with pytest.MonkeyPatch.context() as patch:
            if is_interrupted:
                patch.setattr(Call, "announcement", _interrupted)
            with pytest.raises(KeyboardInterrupt if is_interrupted else TransportError) as caught:
                call(group=group)
        assert is_interrupted or "left after KeyboardInterrupt" in str(caught.value)
        error_in(BrokenGroupError, lambda: objcomm.barrier(group=group))
    assert_group_works()


def _interrupted(*_: object) -> Any:
    raise KeyboardInterrupt


@ranks(2, disposable=True)
def test_a_verdict_that_cannot_be_read_ends_all_waits() -> None:
    objcomm.barrier()
    mesh = resolve(None)._whole.mesh  # noqa: SLF001  # its nonce is not public
    assert mesh is not None
    if here().rank == 0:
        store_of(dist.group.WORLD).set(f"objcomm/verdict/{mesh.nonce}", "of another program")
    tell_all("it is written", "")
    with (
        objcomm.configure(max_nbytes=1_000 if here().rank == 1 else 1 << 30),
        pytest.raises(TransportError, match="the store holds a verdict that can't be read"),
    ):
        objcomm.broadcast(bytes(4_000_000))
    with pytest.raises(BrokenGroupError):
        objcomm.barrier()
    assert_group_works(dist.new_group())


@ranks(2)
def test_a_message_within_max_nbytes_is_unaffected() -> None:
    with objcomm.configure(max_nbytes=1_000_000):
        assert objcomm.all_gather(bytes(900_000)) == [bytes(900_000)] * 2
    assert_group_works()


@ranks(2, disposable=True)
def test_a_group_that_a_rank_has_left_blames_no_error() -> None:
    if here().rank == 1:
        objcomm.send("last", 0)
        dist.destroy_process_group()
        return
    assert objcomm.recv(1) == "last"
    wait_until(lambda: outcome_of(lambda: objcomm.iprobe(1)) != "returned", "the end of rank 1")
    error = error_in(BrokenGroupError, lambda: objcomm.iprobe(1))
    assert "rank 1 ended: it destroyed its process group" in str(error)
    assert "earlier error" not in str(error)
