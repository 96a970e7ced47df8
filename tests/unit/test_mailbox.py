"""Which request gets which message, without any rank: matching, probes, and ends."""

import _thread
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objcomm._p2p.mailbox import Arrived, Mailbox, RecvRequest
from tests.unit.mailboxes import DESYNC, FAILED, FIRST, LOST, Asked, arrival, ask, filled, poll
from tests.waits import wait_until


def test_a_probe_sees_a_message_and_leaves_it() -> None:
    box = filled()
    before, taker, behind = ask(box, 1, is_probe=True), ask(box, 1), ask(box, 1, is_probe=True)
    box.deliver(arrival(1, 0, "a"))
    assert before.got == taker.got == "a"
    assert behind.ends == []
    box.deliver(arrival(1, 0, "b"))
    assert behind.got == "b"
    assert ask(box, 1, is_probe=True).got == "b"
    assert ask(box, 1).got == "b"


def test_to_poll_takes_what_is_here_unless_it_is_a_probe() -> None:
    box = filled(arrival(1, 0, "a"), arrival(1, 0, "b"))
    assert poll(box, 1, 0).obj == "a"
    assert poll(box, 1, 0, is_probe=False).obj == "a"
    assert poll(box, 1, 0).obj == "b"
    assert poll(box, 1, 1, is_probe=False) is None
    assert ask(box, 1).got == "b"


def test_to_meet_takes_what_is_here_and_asks_for_nothing() -> None:
    box = filled(arrival(1, 0, "a"))
    hit, miss = Asked(1), Asked(1)
    assert box.meet(hit.request)
    assert hit.got == "a"
    assert not box.meet(miss.request)
    box.deliver(arrival(1, 0, "b"))
    assert miss.ends == []
    assert ask(box, 1).got == "b"


def test_what_is_given_back_is_before_what_came_later_and_behind_what_came_before() -> None:
    box = filled(arrival(1, 7, "older"))
    taken = ask(box, 1, 0)
    box.deliver(arrival(1, 0, "mine"))
    box.deliver(arrival(1, 0, "later"))
    assert taken.request.arrival is not None
    box.give_back(taken.request.arrival)
    assert [ask(box, 1, None).got for _ in range(3)] == ["older", "mine", "later"]


def test_what_is_given_back_serves_who_waits() -> None:
    box = filled()
    taken, waiting = ask(box, 1), ask(box, 1)
    box.deliver(arrival(1, 0, "a"))
    assert taken.request.arrival is not None
    box.give_back(taken.request.arrival)
    assert waiting.got == "a"


def _met(box: Mailbox) -> Any:
    asked = Asked(1)
    assert box.meet(asked.request)
    return asked.got


NEXT_STEPS: dict[str, Callable[[Mailbox], Any]] = {
    "ask": lambda box: ask(box, 1).got,
    "meet": _met,
    "look": lambda box: getattr(box.look(1, 0), "obj", None),
    "poll": lambda box: getattr(poll(box, 1, 0), "obj", None),
}


@pytest.mark.parametrize("step", sorted(NEXT_STEPS))
def test_what_is_dropped_is_in_its_place_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", _no_more_threads)
    box = filled(*[arrival(1, 0, name) for name in "abc"])
    first, second = ask(box, 1).request.arrival, ask(box, 1).request.arrival
    assert first is not None
    assert second is not None
    box.drop(second)
    box.drop(first)
    assert NEXT_STEPS[step](box) == "a"


def _no_more_threads(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_what_is_dropped_comes_before_what_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", _no_more_threads)
    box = filled()
    taken, waiting = ask(box, 1), ask(box, 1)
    box.deliver(arrival(1, 0, "dropped"))
    assert taken.request.arrival is not None
    box.drop(taken.request.arrival)
    box.deliver(arrival(1, 0, "later"))
    assert waiting.got == "dropped"
    assert ask(box, 1).got == "later"


def test_what_is_dropped_serves_who_waits_though_nothing_else_happens() -> None:
    """Also if a thread in the middle of another step drops it."""
    box = filled()
    taken, waiting = ask(box, 1), ask(box, 1)
    box.deliver(arrival(1, 0, "a"))
    assert taken.request.arrival is not None
    with box._lock:  # noqa: SLF001  # as such a step holds it
        box.drop(taken.request.arrival)
        assert waiting.ends == []
    wait_until(lambda: waiting.ends, "the thread that gives it back")
    assert waiting.got == "a"


def test_what_is_dropped_and_lost_goes_to_nobody() -> None:
    box = filled()
    mesh: Any = SimpleNamespace(verdict=FAILED)
    box.drop(Arrived(1, 0, 0, mesh=mesh))
    assert ask(box, 1).ends == []


@pytest.mark.parametrize("is_here_before", [False, True])
def test_what_was_given_before_an_interrupt_and_told_to_nobody_is_given_back(
    monkeypatch: pytest.MonkeyPatch, *, is_here_before: bool
) -> None:
    def interrupted(_: RecvRequest) -> bool:
        raise KeyboardInterrupt

    box, asked = filled(), Asked(1)
    steps: list[Any] = [
        lambda: box.ask(asked.request),
        lambda: box.deliver(arrival(1, 0, "a")),
    ]
    first, second = reversed(steps) if is_here_before else steps
    first()
    with monkeypatch.context() as patch:
        patch.setattr(RecvRequest, "notify", interrupted)
        with pytest.raises(KeyboardInterrupt):
            second()
    box.cancel(asked.request)
    assert asked.ends == []
    assert ask(box, 1).got == "a"
    assert ask(box, 1).ends == []


def test_what_one_cannot_take_goes_to_the_next_however_many_there_are() -> None:
    box = filled()
    refused: list[int] = []

    def refuse() -> bool:
        refused.append(1)
        return False

    probe = ask(box, 1, is_probe=True)
    for _ in range(2000):
        box.ask(RecvRequest(1, 0, on_end=refuse))
    last = ask(box, 1)
    box.deliver(arrival(1, 0, "a"))
    assert last.got == probe.got == "a"
    box.deliver(arrival(1, 0, "b"))
    box.ask(RecvRequest(1, 0, on_end=refuse))
    assert len(refused) == 2001
    assert ask(box, 1).got == "b"


def test_a_cancelled_probe_gives_nothing_back() -> None:
    box = filled(arrival(1, 0, "a"))
    probe = ask(box, 1, is_probe=True)
    box.cancel(probe.request)
    assert ask(box, 1).got == "a"
    assert ask(box, 1).ends == []


def test_a_withdrawn_request_takes_nothing() -> None:
    box = filled()
    asked = ask(box, 1)
    box.withdraw(asked.request, LOST)
    box.withdraw(asked.request, DESYNC)
    assert asked.request.verdict is LOST
    box.deliver(arrival(1, 0, "a"))
    assert len(asked.ends) == 1
    assert asked.request.arrival is None
    assert ask(box, 1).got == "a"


def test_a_request_that_is_withdrawn_before_it_is_put_takes_nothing_and_ends() -> None:
    """Its limit may pass while its thread does not get to run."""
    box, late = filled(arrival(1, 0, "a")), Asked(1)
    box.withdraw(late.request, LOST)
    assert late.ends == []
    box.ask(late.request)
    assert (late.ends, late.request.verdict, late.request.arrival) == ([1], LOST, None)
    assert ask(box, 1).got == "a"


def test_a_failure_ends_who_waits_for_that_rank_or_for_any() -> None:
    box = filled()
    alone, anybody, other = ask(box, 1), ask(box), ask(box, 2)
    box.fail(1, FIRST, LOST, is_for_any=False)
    assert (alone.request.verdict, len(alone.ends)) == (LOST, 1)
    assert (anybody.ends, other.ends) == ([], [])
    box.fail(1, FIRST, LOST, is_for_any=True)
    assert anybody.request.verdict is LOST
    assert other.ends == []


def test_who_waits_for_any_rank_ends_with_the_last_one() -> None:
    box = filled()
    for peer in (2, 3):
        box.expect(peer, FIRST, lambda: None)
    asked = ask(box)
    for peer in (3, 1):
        box.fail(peer, FIRST, LOST, is_for_any=False)
        assert asked.ends == []
    box.fail(2, FIRST, LOST, is_for_any=False)
    assert asked.request.verdict is LOST


def test_an_end_that_was_known_before_a_request_does_not_end_it() -> None:
    """Two threads report the end: the first to find it, and a moment later the connection's own."""
    box = filled()
    box.expect(2, FIRST, lambda: None)
    first = ask(box)
    box.fail(1, FIRST, LOST, is_for_any=True)
    assert first.request.verdict is LOST
    second = Asked()
    second.request.among = frozenset({2, 3})
    box.ask(second.request)
    box.fail(1, FIRST, LOST, is_for_any=True)
    assert second.ends == []
    box.fail(2, FIRST, LOST, is_for_any=True)
    assert second.request.verdict is LOST


def test_the_end_of_an_earlier_connection_counts_no_more() -> None:
    box = filled()
    second = object()
    box.expect(1, second, lambda: None)
    box.deliver(arrival(1, 0, "new"))
    asked = ask(box, 1, 5)
    box.fail(1, FIRST, LOST, is_for_any=True)
    assert asked.ends == []
    assert ask(box, 1).got == "new"
    box.fail(1, second, LOST, is_for_any=True)
    assert asked.request.verdict is LOST


class Model:
    """A mailbox in its simplest form: two lists, searched from the front."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, int, int]] = []
        self.requests: list[tuple[int, int | None, int | None]] = []
        self.served: dict[int, int] = {}

    @staticmethod
    def fits(src: int | None, tag: int | None, message: tuple[int, int, int]) -> bool:
        return src in (None, message[0]) and tag in (None, message[1])

    def send(self, message: tuple[int, int, int]) -> None:
        for request in self.requests:
            if self.fits(*request[1:], message):
                self.requests.remove(request)
                self.served[request[0]] = message[2]
                return
        self.messages.append(message)

    def ask(self, number: int, src: int | None, tag: int | None) -> None:
        for message in self.messages:
            if self.fits(src, tag, message):
                self.messages.remove(message)
                self.served[number] = message[2]
                return
        self.requests.append((number, src, tag))


SENDS = st.tuples(st.just("send"), st.integers(1, 3), st.integers(0, 2))
ASKS = st.tuples(st.just("ask"), st.none() | st.integers(1, 3), st.none() | st.integers(0, 2))
WITHDRAWALS = st.tuples(st.just("withdraw"), st.integers(0, 20), st.none())
PROBES = st.tuples(st.just("probe"), st.none() | st.integers(1, 3), st.none() | st.integers(0, 2))


@given(st.lists(SENDS | ASKS | WITHDRAWALS | PROBES, max_size=40))
def test_any_sequence_gives_what_a_simple_model_gives(
    steps: list[tuple[str, int | None, int | None]],
) -> None:
    box, model = Mailbox(0, 4), Model()
    asked: dict[int, Asked] = {}
    for number, (what, who, tag) in enumerate(steps):
        if what == "send":
            assert who is not None
            assert tag is not None
            box.deliver(arrival(who, tag, number))
            model.send((who, tag, number))
        elif what == "ask":
            asked[number] = ask(box, who, tag)
            model.ask(number, who, tag)
        elif what == "probe":
            found = box.look(who, tag)
            want = next((each for each in model.messages if model.fits(who, tag, each)), None)
            assert (found and found.obj) == (want and want[2])
        elif asked:
            chosen = sorted(asked)[(who or 0) % len(asked)]
            verdict = LOST._replace(reason=f"step {number}")
            box.withdraw(asked[chosen].request, verdict)
            still = [each for each in model.requests if each[0] == chosen]
            assert (asked[chosen].request.verdict is verdict) == bool(still)
            model.requests = [each for each in model.requests if each[0] != chosen]
    served = {
        number: each.got
        for number, each in asked.items()
        if each.ends and each.request.arrival is not None
    }
    assert served == model.served
    while (left := ask(box, None, None)).ends:
        assert left.got == model.messages.pop(0)[2]
    assert model.messages == []


def test_a_search_looks_at_no_more_where_there_are_thousands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []

    def counted(each: Arrived) -> bool:
        looks.append(each.number)
        return False

    monkeypatch.setattr(Arrived, "is_dead", property(counted))
    count = 2000
    box = filled(*[arrival(1, tag, tag) for tag in range(count)])
    for tag in reversed(range(count)):
        assert ask(box, 1 if tag % 2 else None, tag).got == tag
    waiting = [ask(box, 1) for _ in range(count)]
    for number in range(count):
        box.deliver(arrival(1, 0, number))
    assert [each.got for each in waiting] == list(range(count))
    assert len(looks) <= 4 * count


def test_a_request_that_was_never_put_takes_no_others_place() -> None:
    box = Mailbox(0, 2)
    first = ask(box, 1)
    box.cancel(Asked(1).request)
    box.deliver(arrival(1, 0, "a"))
    assert first.got == "a"
