"""Which waits can never end, found from the ranks' positions without any process."""

import _thread
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.utils.data._utils import pin_memory

from objcomm._failures import inquiry
from objcomm._failures.deadlock import MEETING, Deadlock, LaneWait, Step
from objcomm._wire.header import Operation
from objcomm.errors import CYCLE, NO_MATCH, OTHER_OPTIONS
from tests.unit.whereabouts import (
    OTHER,
    conflict_of,
    lane,
    meeting,
    pair,
    recv,
    send,
    step,
)
from tests.waits import PATIENCE_S, wait_until

Ranks = dict[int, list[LaneWait]]


def deadlock_of(ranks: Ranks, start: int = 0, **options: Any) -> Deadlock:
    """Return what ``conflict_of`` finds, which must be something."""
    found = conflict_of(ranks, start, **options)
    assert found is not None
    return found


def check_cycle(ranks: Ranks, reason: str, **options: Any) -> None:
    """Check that each of the ranks finds the deadlock of all of them."""
    for start in ranks:
        found = deadlock_of(ranks, start, **options)
        assert found.reason == reason
        assert {rank for rank, _, _ in found.found} == set(ranks)
        assert not found.is_of_one_lane  # so it must be seen twice


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        (step(3, Operation.GATHER), step(3), "different operations"),
        (step(1, root=0), step(1, root=1), "different roots"),
        (step(1)._replace(fingerprint=7, name="a"), step(1), "different names"),
        (step(1)._replace(fingerprint=7), step(1), OTHER_OPTIONS),
    ],
)
def test_different_calls_with_one_number_are_found(mine: Step, theirs: Step, reason: str) -> None:
    found = deadlock_of({0: [lane("world", mine, awaits=1)], 1: [lane("world", theirs, awaits=0)]})
    assert found.reason == reason
    assert [(rank, call) for rank, _, call in found.found] == [(0, mine), (1, theirs)]
    assert found.is_of_one_lane


def test_a_call_that_the_other_rank_has_left_counts() -> None:
    """It only sent, and is ahead now."""
    theirs = lane("world", step(1, Operation.GATHER), step(2, Operation.BROADCAST))
    found = deadlock_of({0: [lane("world", step(1), awaits=1)], 1: [theirs]})
    assert found.found[1][2].operation == Operation.GATHER


CYCLES: dict[str, Ranks] = {
    "two groups": {0: [lane("a", step(0), awaits=1)], 1: [lane("b", step(0), awaits=0)]},
    "two meetings": {0: [meeting("a", awaits=1)], 1: [meeting("b", awaits=0)]},
    "three groups": {
        0: [lane("a", step(0), awaits=1)],
        1: [lane("b", step(0), awaits=2)],
        2: [lane("c", step(0), awaits=0)],
    },
}


@pytest.mark.parametrize("ranks", CYCLES.values(), ids=CYCLES)
def test_a_cycle_through_several_groups_is_found_by_each_rank(ranks: Ranks) -> None:
    check_cycle(ranks, CYCLE)


def test_a_cycle_through_groups_that_were_used_before_is_found() -> None:
    """Each rank has made call 0 of both groups; now it waits in one and is awaited in the other."""
    ranks = {
        0: [lane("a", step(0), step(1), awaits=1), lane("b", step(0))],
        1: [lane("b", step(0), step(1), awaits=0), lane("a", step(0))],
    }
    for start in ranks:
        found = deadlock_of(ranks, start).found
        assert sorted((rank, state.group) for rank, state, _ in found) == [(0, "a"), (1, "b")]


def test_a_cycle_is_reported_by_a_rank_that_has_left_it() -> None:
    """Rank 0 has raised and no longer waits; without its report rank 2 would wait forever."""
    ranks = {
        0: [lane("a", step(0), awaits=1, since=5.0)],
        1: [lane("b", step(0), awaits=2, since=6.0)],
        2: [lane("c", step(0), awaits=0, since=7.0)],
    }
    deadlock = deadlock_of(ranks)
    assert not deadlock.is_published
    ranks[0] = [lane("a", step(0))]
    for rank in (1, 2):
        found = conflict_of(ranks, rank, reported={0: deadlock})
        assert found == deadlock._replace(is_published=True)
    later = ranks[2][0]._replace(since=8.0)  # a later wait on the same lane
    assert conflict_of({0: ranks[0], 2: [later]}, 2, reported={0: deadlock}) is None


def test_a_cycle_is_reported_only_by_the_ranks_in_it() -> None:
    ranks = {
        0: [lane("a", step(0), awaits=1)],
        1: [lane("b", step(0), awaits=2)],
        2: [lane("c", step(0), awaits=1)],
    }
    assert conflict_of(ranks) is None
    assert conflict_of(ranks, 1) is not None


def test_a_rank_in_a_meeting_that_another_has_left_is_in_no_cycle() -> None:
    """Rank 0 has raised and meets again; rank 1 has yet to hear why the last meeting ended."""
    new, old = meeting("a", awaits=1)._replace(nonce="new"), meeting("a", awaits=0)
    assert conflict_of({0: [new], 1: [old._replace(nonce="old")]}) is None
    assert conflict_of({0: [new], 1: [meeting("b", awaits=0)._replace(nonce="old")]}) is not None


@pytest.mark.parametrize("start", [0, 1])
def test_a_wait_on_a_mesh_that_has_ended_is_in_no_cycle(start: int) -> None:
    """Rank 0 is busy, and has yet to learn of the error that ended the mesh on rank 1."""
    behind = lane("world", step(0), awaits=1, nonce="old")
    ended = lane("world", step(0), nonce="old")._replace(has_ended=True)
    assert conflict_of({0: [behind], 1: [meeting("world", awaits=0), ended]}, start) is None
    elsewhere = lane("other", step(0), awaits=0)
    assert conflict_of({0: [behind], 1: [elsewhere, ended]}, start) is None
    unended = lane("world", nonce="old")
    assert conflict_of({0: [behind], 1: [elsewhere, unended]}, start) is not None


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize(
    ("known_seconds", "is_over"), [(0.4, True), (1.0, True), (1.1, False), (60.0, False)]
)
def test_a_wait_beside_a_cycle_that_was_reported_since_is_in_no_other(
    start: int, known_seconds: float, *, is_over: bool
) -> None:
    """Ranks 0 and 1 have raised; rank 2 has met in "b" for a second, and may have left since."""
    deadlock = deadlock_of(CYCLES["two meetings"])._replace(known_seconds=known_seconds)
    waits = {0: [lane("world", step(0), awaits=2)], 2: [meeting("b", awaits=0)]}
    assert (conflict_of(waits, start, reported={0: deadlock}) is None) == is_over


@pytest.mark.parametrize(("known_seconds", "is_over"), [(3.0, True), (10.0, False)])
def test_a_wait_long_after_a_reported_cycle_counts(known_seconds: float, *, is_over: bool) -> None:
    """Whatever has delayed the rank, nothing else would end its wait."""
    late = meeting("b", awaits=0)._replace(seconds=20.0)
    deadlock = Deadlock(CYCLE, ((1, late, step(0)),), known_seconds=known_seconds)
    waits = {0: [lane("world", step(0), awaits=2)], 2: [late]}
    assert (conflict_of(waits, reported={0: deadlock}) is None) == is_over


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("began", [5.0, 5.1])
def test_a_rank_that_waits_again_may_be_in_another_cycle(start: int, began: float) -> None:
    """Rank 1 published the duration of its wait after rank 0 had, so its wait looks older."""
    waits = {
        0: meeting("a", awaits=1)._replace(since=7.0, seconds=0.5),
        1: meeting("b", awaits=0)._replace(since=began, seconds=0.7),
    }
    ended = [(at, wait._replace(since=wait.since - 3.0), step(0)) for at, wait in waits.items()]
    deadlock = Deadlock(CYCLE, tuple(ended), known_seconds=0.6)
    ranks = {rank: [wait] for rank, wait in waits.items()}
    found = deadlock_of(ranks, start, reported={0: deadlock})
    assert found.waits == {(rank, wait.group, 0, wait.since) for rank, wait in waits.items()}


@pytest.mark.parametrize(("began", "is_over"), [(2.9, True), (3.1, False)])
def test_a_rank_knows_which_of_its_own_waits_is_older(began: float, *, is_over: bool) -> None:
    """Rank 2 heard of it at 3.0 by its own clock; durations from other processes do not count."""
    ended = ((0, meeting("a", awaits=1), step(0)), (1, meeting("b", awaits=0), step(0)))
    reported = {
        0: Deadlock(CYCLE, ended, known_seconds=0.4, known_since=7.0),
        2: Deadlock(CYCLE, ended, known_seconds=0.3, known_since=3.0),
    }
    waits = {
        0: [lane("world", step(0), awaits=2, since=8.0)],
        2: [meeting("b", awaits=0)._replace(since=began)],
    }
    assert (conflict_of(waits, reported=reported) is None) == is_over


# Messages between two ranks: any thread may send one, so a wait is hopeless only if the other
# process has a single thread, and that thread waits too.

MESSAGE_CYCLES: dict[str, Ranks] = {
    "two receives": {0: [recv(0, 1)], 1: [recv(1, 0)]},
    "two sends": {0: [send(0, 1)], 1: [send(1, 0)]},
    "all that was sent has been taken": {0: [recv(0, 1, taken=3)], 1: [recv(1, 0, sent=3)]},
    # Its head has arrived, and rank 0 waits for another message.
    "a large message with another tag": {0: [recv(0, 1, taken=1)], 1: [send(1, 0, sent=1)]},
    "a ring of receives": {0: [recv(0, 1)], 1: [recv(1, 2)], 2: [recv(2, 0)]},
    "a ring, and a message to rank 0": {0: [recv(0, 1)], 1: [recv(1, 2)], 2: [recv(2, 0, sent=1)]},
}
MIXED_CYCLES: dict[str, Ranks] = {
    "a message and a collective": {0: [recv(0, 1)], 1: [lane("g", step(3), awaits=0)]},
    "a message and a meeting": {0: [send(0, 1)], 1: [meeting("g", awaits=0)]},
    "what was sent over an earlier connection is not under way": {
        0: [recv(0, 1)._replace(nonce="")],
        1: [lane("g", step(0), awaits=0), pair(0, 1, sent=5)],
    },
    "two messages and a collective": {
        0: [recv(0, 1, since=1.0)],
        1: [send(1, 2, since=2.0)],
        2: [lane("g", step(3), awaits=0, since=3.0)],
    },
}


@pytest.mark.parametrize("ranks", MESSAGE_CYCLES.values(), ids=MESSAGE_CYCLES)
def test_a_cycle_of_messages_is_found_by_each_rank(ranks: Ranks) -> None:
    check_cycle(ranks, NO_MATCH, threaded=())


@pytest.mark.parametrize("ranks", MIXED_CYCLES.values(), ids=MIXED_CYCLES)
def test_a_cycle_of_messages_and_calls_is_found_by_each_rank(ranks: Ranks) -> None:
    check_cycle(ranks, CYCLE, threaded=())


def test_a_second_thread_of_the_other_rank_may_still_send() -> None:
    ranks = {0: [recv(0, 1)], 1: [recv(1, 0)]}
    assert conflict_of(ranks, threaded=(1,)) is None
    assert conflict_of(ranks, threaded=(0,)) is None
    assert conflict_of(ranks, threaded=()) is not None


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize(
    ("operation", "is_cycle"),
    [(Operation.BARRIER, True), (Operation.ALL_GATHER, True), (Operation.SCAN, False)],
)
def test_a_message_and_a_collective_in_which_a_third_rank_waits_for_the_receiver(
    start: int, operation: Operation, *, is_cycle: bool
) -> None:
    """Rank 2 receives from rank 1, which waits for rank 0, which waits for rank 2."""
    call = step(1, operation)
    message = pair(1, 2, waits=Operation.RECV, awaits=1)
    ranks = {
        0: [lane("world", step(0), call, awaits=2)],
        1: [lane("world", step(0), call, awaits=0)],
        2: [message, lane("world", step(0))],
    }
    found = conflict_of(ranks, start, threaded=())
    assert (found is not None) == is_cycle
    assert found is None or (found.reason, len(found.found)) == (CYCLE, 3)
    ranks[2] = [message, lane("world", step(0), call)]  # rank 2 has called; rank 0 may be ahead
    assert conflict_of(ranks, start, threaded=()) is None


MEETS = Step(MEETING, Operation.NONE, 1, 0, "train.py:1", "send")
SENDS = send(0, 1, sent=1)._replace(now=MEETS)
# ``sendrecv``: the sending thread waits in the other half.
SENDS_AND_RECEIVES = [recv(0, 1, sent=1, since=1.0), SENDS._replace(waiter=OTHER)]
# The host of a meeting, which sends, knows the mesh's name before the other rank does.
RECEIVER = recv(1, 0)._replace(nonce="")
GATHER, NEW = step(1, Operation.GATHER), step(0, Operation.GATHER)
ELSEWHERE = step(1)._replace(call_site="eval.py:9")
CALLS = [lane("g", step(1), awaits=1)]
MEETS_1, MEETS_0 = meeting("a", awaits=1), meeting("a", awaits=0)
IN_A, IN_B = lane("a", step(0), awaits=1), lane("b", step(0), awaits=0)
THREAD_IN_A = lane("a", step(0), awaits=1, thread=OTHER)
THREAD_IN_B = lane("b", step(0), awaits=0, thread=OTHER)
USED_B = lane("b", thread=OTHER)

# Positions of ranks, none of which is in a wait that can never end.
IN_STEP: dict[str, Ranks] = {
    "other call sites": {0: CALLS, 1: [lane("g", ELSEWHERE, awaits=0)]},
    # What it sent is under way, however slow the network is.
    "rank 1 has gone on": {0: CALLS, 1: [lane("g", step(1), step(2), awaits=0)]},
    "rank 1 computes, and may still come": {0: CALLS, 1: []},
    "rank 1 computes after another call": {0: CALLS, 1: [lane("g", step(0))]},
    "rank 1 is silent": {0: CALLS},
    # Rank 1 is still in it, because rank 2 has not come.
    "rank 0 only sent in call 1": {
        0: [lane("g", GATHER, step(2), awaits=1)],
        1: [lane("g", GATHER, awaits=2)],
        2: [],
    },
    "one meeting": {0: [MEETS_1], 1: [MEETS_0]},
    "a meeting whose host knows the mesh's name": {0: [MEETS_1._replace(nonce="n")], 1: [MEETS_0]},
    # Its main thread may still come to a.
    "rank 1 waits in b on another thread": {0: [IN_A, USED_B], 1: [THREAD_IN_B, lane("a")]},
    # Its main thread would.
    "no thread has used a on rank 1": {0: [IN_A, USED_B], 1: [THREAD_IN_B]},
    # Another thread may still come to a.
    "rank 1 waits in b on its main thread": {0: [THREAD_IN_A, USED_B], 1: [IN_B]},
    # Slow bytes keep rank 1 there.
    "rank 0 has sent all of call 0 in b": {0: [IN_A, lane("b", step(0))], 1: [IN_B]},
    # Rank 1 has not heard of it yet.
    "numbers begin again after a verdict": {
        0: [lane("a", NEW, awaits=1, nonce="new")],
        1: [lane("a", step(0), nonce="old")],
    },
    "a meeting for a message": {0: [SENDS], 1: [RECEIVER]},
    "a meeting for two messages": {0: SENDS_AND_RECEIVES, 1: [RECEIVER]},
    "a message whose bytes have not arrived": {0: [recv(0, 1, taken=2)], 1: [recv(1, 0, sent=3)]},
    "a large message that is being taken in, which awaits no rank": {
        0: [recv(0, 1, taken=1)._replace(awaits=-1)],
        1: [send(1, 0, sent=1)],
    },
    "rank 1 has begun to receive and computes": {0: [recv(0, 1)], 1: [recv(1, 0, waiter=0)]},
    "rank 1 has begun to send to rank 2 and computes": {
        0: [recv(0, 1, since=1.0)],
        1: [send(1, 2, waiter=0)],
        2: [lane("g", step(3), awaits=0, since=3.0)],
    },
    "rank 0 has sent what rank 2 waits for": {
        0: [recv(0, 1), pair(0, 2, sent=1)],
        1: [recv(1, 2)],
        2: [recv(2, 0, sent=1)],
    },
    # What it sent is under way.
    "rank 0 has been in call 3 and has gone on": {
        0: [recv(0, 1), lane("g", step(3))],
        1: [lane("g", step(3), awaits=0)],
    },
    "a slow third rank": {0: [recv(0, 1)], 1: [lane("g", step(3), awaits=2)], 2: []},
    "any rank may send": {0: [recv(0, 1)._replace(awaits=-1)], 1: [recv(1, 0)]},
    "each direction counts its own messages": {
        0: [recv(0, 1, taken=4, sent=9)],
        1: [pair(0, 1, sent=5, taken=9)],
    },
}


@pytest.mark.parametrize("ranks", IN_STEP.values(), ids=IN_STEP)
def test_ranks_that_may_go_on_are_in_no_deadlock(ranks: Ranks) -> None:
    for start in (each for each in ranks if ranks[each]):
        assert conflict_of(ranks, start, threaded=()) is None


def test_threads_of_libraries_hide_no_deadlock() -> None:
    bar = type("TMonitor", (threading.Thread,), {"__module__": "tqdm._monitor"})
    assert inquiry.serves_a_library(bar())
    assert inquiry.serves_a_library(threading.Thread(target=pin_memory.pin_memory))
    assert not inquiry.serves_a_library(threading.Thread(target=step))
    assert not inquiry.serves_a_library(threading.Thread())


def test_idle_threads_of_a_pool_hide_no_deadlock() -> None:
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    go_on = threading.Event()

    def work() -> None:
        threads.put(threading.current_thread())
        go_on.wait(PATIENCE_S)

    with ThreadPoolExecutor(max_workers=1) as pool:
        working = pool.submit(work)
        thread = threads.get(timeout=PATIENCE_S)
        assert not inquiry.is_idle_in_a_pool(thread)
        go_on.set()
        working.result(PATIENCE_S)
        wait_until(lambda: inquiry.is_idle_in_a_pool(thread), "the thread's idleness")
    assert not inquiry.is_idle_in_a_pool(thread)  # it has ended
    assert not inquiry.is_idle_in_a_pool(threading.current_thread())


def test_a_foreign_thread_counts_while_it_is_in_python() -> None:
    """Python lists it forever, even if it has ended or waits in C++ for the main thread."""
    seen: list[threading.Thread] = []
    leave = threading.Event()

    def run() -> None:
        seen.append(threading.current_thread())
        leave.wait(PATIENCE_S)

    _thread.start_new_thread(run, ())
    wait_until(lambda: seen, "the thread")
    assert not inquiry.is_out_of_python(seen[0])
    assert not inquiry.is_single()
    leave.set()
    wait_until(lambda: inquiry.is_out_of_python(seen[0]), "its end")
    assert seen[0] in threading.enumerate()
    assert not inquiry.is_out_of_python(threading.current_thread())
