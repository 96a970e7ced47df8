"""Which waits can never end, found from the ranks' positions without any process."""

import _thread
import itertools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.utils.data._utils import pin_memory

from objcomm._failures.deadlock import MEETING, LaneWait, Step, WaitSnapshot, find_deadlock
from objcomm._failures.inquiry import (
    is_idle_in_a_pool,
    is_out_of_python,
    is_single,
    serves_a_library,
)
from objcomm._wire.header import Operation
from objcomm.errors import CYCLE, NO_MATCH, OTHER_OPTIONS
from tests.unit.whereabouts import (
    MAIN,
    OTHER,
    conflict_among,
    conflict_of,
    lane,
    meeting,
    pair,
    recv,
    send,
    step,
)
from tests.waits import PATIENCE_S, wait_until


def test_two_calls_of_the_same_number_that_differ_are_found() -> None:
    mine, theirs = step(3, Operation.GATHER), step(3, Operation.BARRIER)
    found = conflict_of({0: [lane("world", mine, awaits=1)], 1: [lane("world", theirs, awaits=0)]})
    assert found is not None
    assert found.reason == "different operations"
    assert [(rank, call) for rank, _, call in found.found] == [(0, mine), (1, theirs)]
    assert found.is_of_one_lane


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        (step(1, root=0), step(1, root=1), "different roots"),
        (step(1)._replace(fingerprint=7, name="a"), step(1), "different names"),
        (step(1)._replace(fingerprint=7), step(1), OTHER_OPTIONS),
    ],
)
def test_roots_and_names_count(mine: Step, theirs: Step, reason: str) -> None:
    found = conflict_of({0: [lane("world", mine, awaits=1)], 1: [lane("world", theirs, awaits=0)]})
    assert found is not None
    assert found.reason == reason


def test_a_call_that_the_other_rank_has_left_counts() -> None:
    """It only sent, and is ahead now."""
    theirs = lane("world", step(1, Operation.GATHER), step(2, Operation.BROADCAST))
    found = conflict_of({0: [lane("world", step(1), awaits=1)], 1: [theirs]})
    assert found is not None
    assert found.found[1][2].operation == Operation.GATHER


def test_two_groups_in_which_two_ranks_wait_for_each_other() -> None:
    for ranks, start in itertools.product(
        (
            {0: [lane("a", step(0), awaits=1)], 1: [lane("b", step(0), awaits=0)]},
            {0: [meeting("a", awaits=1)], 1: [meeting("b", awaits=0)]},
        ),
        (0, 1),
    ):
        found = conflict_of(ranks, start)
        assert found is not None
        assert found.reason == "each waits for another"
        assert {rank for rank, _, _ in found.found} == {0, 1}
        assert not found.is_of_one_lane


def test_a_circle_of_three_is_found_by_each() -> None:
    ranks = {
        0: [lane("a", step(0), awaits=1)],
        1: [lane("b", step(0), awaits=2)],
        2: [lane("c", step(0), awaits=0)],
    }
    for start in ranks:
        found = conflict_of(ranks, start)
        assert found is not None
        assert len(found.found) == 3


def test_a_circle_is_known_from_who_has_left_it() -> None:
    """Rank 0 has raised and no longer waits; without its report rank 2 would wait forever."""
    ranks = {
        0: [lane("a", step(0), awaits=1, since=5.0)],
        1: [lane("b", step(0), awaits=2, since=6.0)],
        2: [lane("c", step(0), awaits=0, since=7.0)],
    }
    told = conflict_of(ranks)
    assert told is not None
    assert not told.is_published
    left = WaitSnapshot(2, MAIN, (lane("a", step(0)),), (told,))
    for rank in (1, 2):
        known = {each: WaitSnapshot(2, MAIN, tuple(lanes)) for each, lanes in ranks.items()}
        known[0] = left
        found = find_deadlock(rank, known[rank], ranks[rank][0], known.get)
        assert found == told._replace(is_published=True)
    later = ranks[2][0]._replace(since=8.0)  # a later wait on the same lane
    assert find_deadlock(2, WaitSnapshot(2, MAIN, (later,)), later, {0: left}.get) is None


def test_a_circle_that_this_group_is_not_part_of_is_the_others_matter() -> None:
    ranks = {
        0: [lane("a", step(0), awaits=1)],
        1: [lane("b", step(0), awaits=2)],
        2: [lane("c", step(0), awaits=1)],
    }
    assert conflict_of(ranks) is None
    assert conflict_of(ranks, 1) is not None


def test_who_waits_in_a_meeting_that_another_has_left_is_in_no_circle() -> None:
    """Rank 0 has raised and meets again; rank 1 has yet to hear why the last meeting ended."""
    new, old = meeting("a", awaits=1)._replace(nonce="new"), meeting("a", awaits=0)
    assert conflict_of({0: [new], 1: [old._replace(nonce="old")]}) is None
    assert conflict_of({0: [new], 1: [meeting("b", awaits=0)._replace(nonce="old")]}) is not None


# Messages between two ranks: any thread may send one, so a wait is hopeless only if the other
# process has a single thread, and that thread waits too.


def is_circle(ranks: dict[int, list[LaneWait]], reason: str = NO_MATCH) -> bool:
    """Return whether each of the ranks finds the deadlock of all of them."""
    found = [conflict_among(ranks, rank) for rank in ranks]
    return all(
        each is not None
        and each.reason == reason
        and {rank for rank, _, _ in each.found} == set(ranks)
        for each in found
    )


@pytest.mark.parametrize("operation", [Operation.RECV, Operation.SEND])
def test_two_that_wait_for_each_others_messages(operation: Operation) -> None:
    mine, theirs = (pair(0, 1, waits=operation, awaits=other) for other in (1, 0))
    assert is_circle({0: [mine], 1: [theirs]})


def test_a_circle_of_messages_or_meetings_is_none_of_calls_that_both_remember() -> None:
    """So it is believed only after two identical looks, and then reported."""
    for ranks in (
        {0: [recv(0, 1)], 1: [recv(1, 0)]},
        {0: [meeting("a", awaits=1)], 1: [meeting("b", awaits=0)]},
    ):
        found = conflict_among(ranks)
        assert found is not None
        assert not found.is_of_one_lane


def test_a_message_under_way_is_no_conflict() -> None:
    """Rank 1 has sent, and waits for an answer; the bytes have not arrived yet."""
    ranks = {0: [recv(0, 1, taken=2)], 1: [recv(1, 0, sent=3)]}
    assert conflict_among(ranks) is None
    assert conflict_among(ranks, 1) is None
    assert is_circle({0: [recv(0, 1, taken=3)], 1: [recv(1, 0, sent=3)]})


def test_what_was_sent_over_an_earlier_connection_is_not_under_way() -> None:
    waits = recv(0, 1)._replace(nonce="")
    ended = pair(0, 1, sent=5)
    ranks = {0: [waits], 1: [lane("world", step(0), awaits=0), ended]}
    assert is_circle(ranks, "each waits for another")


def test_a_large_message_that_waits_for_its_receiver_is_no_help_to_another_tag() -> None:
    """Its head has arrived, and rank 0 waits for another message."""
    assert is_circle({0: [recv(0, 1, taken=1)], 1: [send(1, 0, sent=1)]})


def test_a_second_thread_there_may_still_send() -> None:
    ranks = {0: [recv(0, 1)], 1: [recv(1, 0)]}
    assert conflict_among(ranks, threaded=(1,)) is None
    assert conflict_among(ranks, threaded=(0,)) is None
    assert conflict_among(ranks) is not None


def test_a_message_and_a_collective() -> None:
    reason = "each waits for another"
    assert is_circle({0: [recv(0, 1)], 1: [lane("world", step(3), awaits=0)]}, reason)
    assert is_circle({0: [send(0, 1)], 1: [meeting("world", awaits=0)]}, reason)


def test_a_circle_of_three_through_messages_and_a_collective() -> None:
    ranks = {
        0: [recv(0, 1, since=1.0)],
        1: [send(1, 2, since=2.0)],
        2: [lane("world", step(3), awaits=0, since=3.0)],
    }
    assert is_circle(ranks, "each waits for another")
    ranks[1] = [send(1, 2, waiter=0)]
    assert conflict_among(ranks) is None


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize(
    ("operation", "is_circle_of_all"),
    [(Operation.BARRIER, True), (Operation.ALL_GATHER, True), (Operation.SCAN, False)],
)
def test_a_message_and_a_collective_in_which_a_third_rank_waits_for_the_receiver(
    start: int, operation: Operation, *, is_circle_of_all: bool
) -> None:
    """Rank 2 receives from rank 1, which waits for rank 0, which waits for rank 2."""
    call = step(1, operation)
    message = pair(1, 2, waits=Operation.RECV, awaits=1)
    ranks = {
        0: [lane("world", step(0), call, awaits=2)],
        1: [lane("world", step(0), call, awaits=0)],
        2: [message, lane("world", step(0))],
    }
    found = conflict_among(ranks, start)
    assert (found is not None) == is_circle_of_all
    assert found is None or (found.reason, len(found.found)) == (CYCLE, 3)
    ranks[2] = [message, lane("world", step(0), call)]  # rank 2 has called; rank 0 may be ahead
    assert conflict_among(ranks, start) is None


def test_a_ring_of_receives() -> None:
    ranks = {rank: [recv(rank, (rank + 1) % 3)] for rank in range(3)}
    assert is_circle(ranks)
    ranks[2] = [recv(2, 0, sent=1)]  # sent to rank 0, which waits for another rank
    assert is_circle(ranks)
    ranks[0].append(pair(0, 2, sent=1))  # but this counts: rank 0 has sent what rank 2 waits for
    for rank in range(3):
        assert conflict_among(ranks, rank) is None


MEETS = Step(MEETING, Operation.NONE, 1, 0, "train.py:1", "send")
SENDS = send(0, 1, sent=1)._replace(now=MEETS)
# ``sendrecv``: the sending thread waits in the other half.
SENDS_AND_RECEIVES = [recv(0, 1, sent=1, since=1.0), SENDS._replace(waiter=OTHER)]
# The host of a meeting, which sends, knows the mesh's name before its guest does.
GUEST = recv(1, 0)._replace(nonce="")
GATHER, NEW = step(1, Operation.GATHER), step(0, Operation.GATHER)
ELSEWHERE = step(1)._replace(call_site="eval.py:9")

# Positions of ranks, none of which is in a wait that can never end.
IN_STEP: dict[str, dict[int, list[LaneWait]]] = {
    "call sites do not count": {
        0: [lane("world", step(1), awaits=1)],
        1: [lane("world", ELSEWHERE, awaits=0)],
    },
    "gone on: what it sent is under way, however slow the network is": {
        0: [lane("world", step(1), awaits=1)],
        1: [lane("world", step(1), step(2), awaits=0)],
    },
    "it computes, and may still come": {0: [lane("world", step(1), awaits=1)], 1: []},
    "it computes after another call": {
        0: [lane("world", step(1), awaits=1)],
        1: [lane("world", step(0))],
    },
    "silence": {0: [lane("world", step(1), awaits=1)]},
    "rank 0 only sent in call 1; rank 1 is in it, because rank 2 has not come": {
        0: [lane("world", GATHER, step(2), awaits=1)],
        1: [lane("world", GATHER, awaits=2)],
        2: [],
    },
    "one meeting": {0: [meeting("a", awaits=1)], 1: [meeting("a", awaits=0)]},
    "one meeting, whose host knows the mesh's name": {
        0: [meeting("a", awaits=1)._replace(nonce="n")],
        1: [meeting("a", awaits=0)],
    },
    "rank 1 waits on a second thread; its main thread may still come to a": {
        0: [lane("a", step(0), awaits=1), lane("b", thread=OTHER)],
        1: [lane("b", step(0), awaits=0, thread=OTHER), lane("a", thread=MAIN)],
    },
    "nobody has used a on rank 1: its main thread would": {
        0: [lane("a", step(0), awaits=1), lane("b", thread=OTHER)],
        1: [lane("b", step(0), awaits=0, thread=OTHER)],
    },
    "rank 1's main thread waits in b; another one may still come to a": {
        0: [lane("a", step(0), awaits=1, thread=OTHER), lane("b", thread=OTHER)],
        1: [lane("b", step(0), awaits=0)],
    },
    "rank 0 has sent all of call 0 in b; slow bytes keep rank 1 there": {
        0: [lane("a", step(0), awaits=1), lane("b", step(0))],
        1: [lane("b", step(0), awaits=0)],
    },
    "numbers begin again after a verdict, of which rank 1 has not heard yet": {
        0: [lane("a", NEW, awaits=1, nonce="new")],
        1: [lane("a", step(0), nonce="old")],
    },
    "a meeting for a message": {0: [SENDS], 1: [GUEST]},
    "a meeting for two messages": {0: SENDS_AND_RECEIVES, 1: [GUEST]},
    "a large message is being taken in, which awaits nobody": {
        0: [recv(0, 1, taken=1)._replace(awaits=-1)],
        1: [send(1, 0, sent=1)],
    },
    "rank 1 has begun to receive and computes": {0: [recv(0, 1)], 1: [recv(1, 0, waiter=0)]},
    "rank 0 has been in call 3 and has gone on: what it sent is on the way": {
        0: [recv(0, 1), lane("world", step(3))],
        1: [lane("world", step(3), awaits=0)],
    },
    "a slow third rank": {0: [recv(0, 1)], 1: [lane("world", step(3), awaits=2)], 2: []},
    "any rank may send": {0: [recv(0, 1)._replace(awaits=-1)], 1: [recv(1, 0)]},
    "each direction counts its messages by itself": {
        0: [recv(0, 1, taken=4, sent=9)],
        1: [pair(0, 1, sent=5, taken=9)],
    },
}


@pytest.mark.parametrize("name", IN_STEP)
def test_these_may_go_on(name: str) -> None:
    ranks = IN_STEP[name]
    for start in (each for each in ranks if ranks[each]):
        assert conflict_among(ranks, start) is None


def test_threads_of_libraries_keep_no_circle_from_being_found() -> None:
    bar = type("TMonitor", (threading.Thread,), {"__module__": "tqdm._monitor"})
    assert serves_a_library(bar())
    assert serves_a_library(threading.Thread(target=pin_memory.pin_memory))
    assert not serves_a_library(threading.Thread(target=step))
    assert not serves_a_library(threading.Thread())


def test_nor_do_idle_threads_of_a_pool() -> None:
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    go_on = threading.Event()

    def work() -> None:
        threads.put(threading.current_thread())
        go_on.wait(PATIENCE_S)

    with ThreadPoolExecutor(max_workers=1) as pool:
        working = pool.submit(work)
        thread = threads.get(timeout=PATIENCE_S)
        assert not is_idle_in_a_pool(thread)
        go_on.set()
        working.result(PATIENCE_S)
        wait_until(lambda: is_idle_in_a_pool(thread), "the thread's idleness")
    assert not is_idle_in_a_pool(thread)  # it has ended
    assert not is_idle_in_a_pool(threading.current_thread())


def test_a_foreign_thread_counts_while_it_is_in_python() -> None:
    """Python lists it forever, even if it has ended or waits in C++ for the main thread."""
    seen: list[threading.Thread] = []
    leave = threading.Event()

    def run() -> None:
        seen.append(threading.current_thread())
        leave.wait(PATIENCE_S)

    _thread.start_new_thread(run, ())
    wait_until(lambda: seen, "the thread")
    assert not is_out_of_python(seen[0])
    assert not is_single()
    leave.set()
    wait_until(lambda: is_out_of_python(seen[0]), "its end")
    assert seen[0] in threading.enumerate()
    assert not is_out_of_python(threading.current_thread())
