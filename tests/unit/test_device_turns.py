"""Transfers between two ranks' devices begin in the same order on both; no device is needed."""

import functools
import itertools
import random
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from objcomm import TransportError
from objcomm._p2p.peer import DeviceTurn
from objcomm._transport.threads import Ticket, TicketQueue
from objcomm._wire.header import Operation
from tests.waits import wait_until

LIMIT_S = 300


class FakeOffers:
    """One rank's end of a connection that carries answers in order."""

    def __init__(self, rank: int) -> None:
        self.mesh = SimpleNamespace(rank=rank)
        self.peer = 1 - rank
        self.turns = TicketQueue()
        self.inbox: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self.looks = 0
        self.is_ended = False
        self._awaited: dict[tuple[int, int], Callable[[bool], object]] = {}
        self._lock = threading.Lock()

    def put(self, number: int, on_end: Callable[[bool], object], kind: Operation) -> None:
        with self._lock:
            self._awaited[kind, number] = on_end

    def withdraw(self, number: int, kind: Operation) -> bool:
        with self._lock:
            return self._awaited.pop((kind, number), None) is not None

    def answer(self, kind: int, number: int) -> None:
        with self._lock:
            on_end = self._awaited.pop((kind, number), None)
        assert on_end is not None, f"no rank waits for {Operation(kind).name} {number}"
        on_end(True)  # noqa: FBT003  # as the real one calls it

    def receive(self) -> None:
        while (received := self.inbox.get()) is not None:
            self.answer(*received)

    def check(self) -> None:
        self.looks += 1
        if self.is_ended:
            raise TransportError("send", (self.peer,), "it died")


def turn_on(here: Any, there: FakeOffers | None, number: int, *, is_sender: bool) -> DeviceTurn:
    def say(kind: Operation) -> None:
        if there is not None:
            there.inbox.put((kind, number))

    turn = DeviceTurn(here, number, say, is_sender=is_sender)
    turn.begin()
    return turn


def start(body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("seed", range(5))
def test_a_backend_with_one_order_for_both_directions_never_stalls(seed: int) -> None:
    ends = [FakeOffers(0), FakeOffers(1)]
    # Like NCCL: it moves data only while both ranks are in the same transfer.
    meeting = threading.Barrier(2, timeout=LIMIT_S)
    at: list[Any] = [None, None]
    moved: list[Any] = []

    def transfer(rank: int, label: tuple[int, int]) -> None:
        assert at[rank] is None, f"{label} begins while {at[rank]} is under way"
        at[rank] = label
        meeting.wait()
        assert at[0] == at[1]
        if rank == 0:
            moved.append(label)
        meeting.wait()
        at[rank] = None

    receiving = [start(end.receive) for end in ends]
    jobs = [
        (rank, src, number, turn_on(ends[rank], ends[1 - rank], number, is_sender=src == rank))
        for src, number in itertools.product((0, 1), range(8))
        for rank in (0, 1)
    ]
    random.Random(seed).shuffle(jobs)
    failed: list[BaseException] = []

    def move(rank: int, src: int, number: int, turn: DeviceTurn) -> None:
        try:
            with turn:
                turn.move(lambda: transfer(rank, (src, number)))
        except BaseException as error:
            failed.append(error)
            meeting.abort()
            raise

    threads = [start(functools.partial(move, *job)) for job in jobs]
    for thread in threads:
        thread.join(LIMIT_S)
    assert not failed
    assert sorted(moved) == list(itertools.product((0, 1), range(8)))
    for end in ends:
        end.inbox.put(None)
    for thread in receiving:
        thread.join(LIMIT_S)


@pytest.mark.parametrize("is_sender", [True, False])
def test_the_higher_rank_keeps_to_the_order_of_the_answers(*, is_sender: bool) -> None:
    here = FakeOffers(1)
    kind = Operation.READY if is_sender else Operation.START
    first, second = (turn_on(here, None, number, is_sender=is_sender) for number in range(2))
    here.answer(kind, 0)
    here.answer(kind, 1)
    done: list[int] = []

    def move_second() -> None:
        with second:
            second.move(lambda: done.append(1))

    thread = start(move_second)
    wait_until(lambda: here.looks > 0 or bool(done), "the second to wait")
    assert done == []
    with first:
        first.move(lambda: done.append(0))
    thread.join(LIMIT_S)
    assert done == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_sender", [True, False])
def test_the_end_of_the_connection_ends_each_wait(rank: int, *, is_sender: bool) -> None:
    here = FakeOffers(rank)
    here.is_ended = True
    Ticket(here.turns).take()  # for a transfer that never ends
    with (
        turn_on(here, None, 1, is_sender=is_sender) as turn,
        pytest.raises(TransportError, match="it died"),
    ):
        turn.move(lambda: pytest.fail("it has begun"))
    assert not here.withdraw(1, Operation.READY)
    assert here.turns.waiting == 1
