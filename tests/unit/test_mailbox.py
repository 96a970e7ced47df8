"""Which request gets which message, and which messages are kept, without any rank."""

import _thread
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objcomm._failures.verdict import Cause, Verdict
from objcomm._p2p import mailbox as module
from objcomm._p2p.call import Receive
from objcomm._p2p.mailbox import Arrived, Mailbox, RecvRequest
from objcomm._transport.lane import Lane
from objcomm._wire.header import Header, Operation
from tests.unit.mailboxes import (
    DESYNC,
    FAILED,
    FIRST,
    LANE,
    LOST,
    Asked,
    arrival,
    ask,
    filled,
    poll,
)
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


def test_a_poll_takes_a_message_that_has_arrived_unless_it_is_a_probe() -> None:
    box = filled(arrival(1, 0, "a"), arrival(1, 0, "b"))
    assert poll(box, 1, 0).obj == "a"
    assert poll(box, 1, 0, is_probe=False).obj == "a"
    assert poll(box, 1, 0).obj == "b"
    assert poll(box, 1, 1, is_probe=False) is None
    assert ask(box, 1).got == "b"


def test_meet_takes_a_message_that_has_arrived_and_leaves_no_request() -> None:
    box = filled(arrival(1, 0, "a"))
    hit, miss = Asked(1), Asked(1)
    assert box.meet(hit.request)
    assert hit.got == "a"
    assert not box.meet(miss.request)
    box.deliver(arrival(1, 0, "b"))
    assert miss.ends == []
    assert ask(box, 1).got == "b"


def test_a_message_that_is_given_back_keeps_its_place() -> None:
    box = filled(arrival(1, 7, "older"))
    taken = ask(box, 1, 0)
    box.deliver(arrival(1, 0, "mine"))
    box.deliver(arrival(1, 0, "later"))
    box.give_back(taken.arrived)
    assert [ask(box, 1, None).got for _ in range(3)] == ["older", "mine", "later"]


def test_a_message_that_is_given_back_serves_a_waiting_request() -> None:
    box = filled()
    taken, waiting = ask(box, 1), ask(box, 1)
    box.deliver(arrival(1, 0, "a"))
    box.give_back(taken.arrived)
    assert waiting.got == "a"


def _met(box: Mailbox) -> Any:
    asked = Asked(1)
    assert box.meet(asked.request)
    return asked.got


@pytest.fixture
def _no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("can't start new thread")
    monkeypatch.setattr(_thread, "start_new_thread", mock.Mock(side_effect=error))


NEXT_STEPS: dict[str, Callable[[Any], Any]] = {
    "ask": lambda box: ask(box, 1).got,
    "meet": _met,
    "look": lambda box: box.look(1, 0).obj,
    "poll": lambda box: poll(box, 1, 0).obj,
}


@pytest.mark.usefixtures("_no_more_threads")
@pytest.mark.parametrize("step", sorted(NEXT_STEPS))
def test_a_message_that_is_dropped_is_in_its_place_before_the_next_step(step: str) -> None:
    box = filled(*[arrival(1, 0, name) for name in "abc"])
    first, second = ask(box, 1), ask(box, 1)
    box.drop(second.arrived)
    box.drop(first.arrived)
    assert NEXT_STEPS[step](box) == "a"


@pytest.mark.usefixtures("_no_more_threads")
def test_a_message_that_is_dropped_comes_before_what_is_delivered() -> None:
    box = filled()
    taken, waiting = ask(box, 1), ask(box, 1)
    box.deliver(arrival(1, 0, "dropped"))
    box.drop(taken.arrived)
    box.deliver(arrival(1, 0, "later"))
    assert waiting.got == "dropped"
    assert ask(box, 1).got == "later"


def test_a_message_that_is_dropped_serves_a_waiting_request_though_nothing_else_happens() -> None:
    """Also if a thread in the middle of another step drops it."""
    box = filled()
    taken, waiting = ask(box, 1), ask(box, 1)
    box.deliver(arrival(1, 0, "a"))
    with box._lock:  # noqa: SLF001  # as such a step holds it
        box.drop(taken.arrived)
        assert waiting.ends == []
    wait_until(lambda: waiting.ends, "the thread that gives it back")
    assert waiting.got == "a"


def test_a_message_that_is_dropped_after_its_mesh_has_failed_is_lost() -> None:
    box = filled()
    mesh: Any = SimpleNamespace(verdict=FAILED)
    box.drop(Arrived(1, 0, 0, mesh=mesh))
    assert ask(box, 1).ends == []


@pytest.mark.parametrize("is_here_before", [False, True])
def test_a_message_whose_receive_was_interrupted_is_given_back(
    monkeypatch: pytest.MonkeyPatch, *, is_here_before: bool
) -> None:
    box, asked = filled(), Asked(1)
    steps: list[Any] = [lambda: box.ask(asked.request), lambda: box.deliver(arrival(1, 0, "a"))]
    first, second = reversed(steps) if is_here_before else steps
    first()
    with monkeypatch.context() as patch:
        patch.setattr(RecvRequest, "notify", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            second()
    box.cancel(asked.request)
    assert asked.ends == []
    assert ask(box, 1).got == "a"
    assert ask(box, 1).ends == []


def test_a_message_that_one_request_cannot_take_goes_to_the_next_however_many_there_are() -> None:
    box, refuse = filled(), mock.Mock(return_value=False)
    probe = ask(box, 1, is_probe=True)
    for _ in range(2000):
        box.ask(RecvRequest(1, 0, on_end=refuse))
    last = ask(box, 1)
    box.deliver(arrival(1, 0, "a"))
    assert last.got == probe.got == "a"
    box.deliver(arrival(1, 0, "b"))
    box.ask(RecvRequest(1, 0, on_end=refuse))
    assert refuse.call_count == 2001
    assert ask(box, 1).got == "b"


def test_a_cancelled_probe_gives_nothing_back() -> None:
    box = filled(arrival(1, 0, "a"))
    probe = ask(box, 1, is_probe=True)
    box.cancel(probe.request)
    assert ask(box, 1).got == "a"
    assert ask(box, 1).ends == []


def test_a_request_that_is_withdrawn_before_it_is_made_takes_nothing_and_ends() -> None:
    """Its limit may pass while its thread does not get to run."""
    box, late = filled(arrival(1, 0, "a")), Asked(1)
    box.withdraw(late.request, LOST)
    assert late.ends == []
    box.ask(late.request)
    assert (late.ends, late.request.verdict, late.request.arrival) == ([1], LOST, None)
    assert ask(box, 1).got == "a"


def test_a_failure_ends_requests_to_that_rank_or_to_any() -> None:
    box = filled()
    alone, anybody, other = ask(box, 1), ask(box), ask(box, 2)
    box.fail(1, FIRST, LOST, is_for_any=False)
    assert (alone.request.verdict, len(alone.ends)) == (LOST, 1)
    assert (anybody.ends, other.ends) == ([], [])
    box.fail(1, FIRST, LOST, is_for_any=True)
    assert anybody.request.verdict is LOST
    assert other.ends == []


def test_a_request_to_any_rank_ends_when_the_last_rank_has_failed() -> None:
    box = filled()
    for peer in (2, 3):
        box.expect(peer, FIRST, lambda: None, LANE)
    asked = ask(box)
    for peer in (3, 1):
        box.fail(peer, FIRST, LOST, is_for_any=False)
        assert asked.ends == []
    box.fail(2, FIRST, LOST, is_for_any=False)
    assert asked.request.verdict is LOST


def test_an_end_that_was_known_before_a_request_does_not_end_it() -> None:
    """Two threads report the end: the first to find it, and a moment later the connection's own."""
    box = filled()
    box.expect(2, FIRST, lambda: None, LANE)
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


def test_only_requests_for_any_rank_wait_on_the_lane_of_a_new_connection() -> None:
    box = filled()
    lanes: dict[int | None, dict[int, object]] = {None: {}, 1: {}, 2: {}}
    for src, got in lanes.items():
        asked = Asked(src)
        asked.request.on_lane = got.__setitem__
        box.ask(asked.request)
    box.expect(1, object(), lambda: None, LANE)
    assert lanes == {None: {1: LANE}, 1: {}, 2: {}}


def test_a_receive_waits_on_the_lane_of_each_ranks_latest_connection() -> None:
    receive: Any = object.__new__(Receive)
    receive.entry = object()
    first, second, other = (Lane("", 0, threading.main_thread()) for _ in range(3))
    for peer, lane in ((1, first), (2, other), (1, second)):
        receive._wait_on(peer, lane)  # noqa: SLF001  # as the mailbox calls it
    assert [len(each.p2p_calls) for each in (first, second, other)] == [0, 1, 1]


def test_the_end_of_an_earlier_connection_does_not_count() -> None:
    box = filled()
    second = object()
    box.expect(1, second, lambda: None, LANE)
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
def test_any_sequence_gives_the_same_as_a_simple_model(steps: list[Any]) -> None:
    box, model = Mailbox(0, 4), Model()
    asked: dict[int, Asked] = {}
    for number, (what, peer, tag) in enumerate(steps):
        if what == "send":
            box.deliver(arrival(peer, tag, number))
            model.send((peer, tag, number))
        elif what == "ask":
            asked[number] = ask(box, peer, tag)
            model.ask(number, peer, tag)
        elif what == "probe":
            found = box.look(peer, tag)
            want = next((each for each in model.messages if model.fits(peer, tag, each)), None)
            assert (found and found.obj) == (want and want[2])
        elif asked:
            chosen = sorted(asked)[(peer or 0) % len(asked)]
            verdict = LOST._replace(reason=f"step {number}")
            box.withdraw(asked[chosen].request, verdict)
            still = [each for each in model.requests if each[0] == chosen]
            assert (asked[chosen].request.verdict is verdict) == bool(still)
            model.requests = [each for each in model.requests if each[0] != chosen]
    for number, each in asked.items():
        is_over = each.request.verdict is not None or number in model.served
        assert len(each.ends) == is_over
    taken = {number: each for number, each in asked.items() if each.request.arrival is not None}
    assert {number: each.got for number, each in taken.items()} == model.served
    while (left := ask(box, None, None)).ends:
        assert left.got == model.messages.pop(0)[2]
    assert model.messages == []


def test_a_search_among_thousands_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_request_that_was_never_made_takes_the_place_of_no_other() -> None:
    box = Mailbox(0, 2)
    first = ask(box, 1)
    box.cancel(Asked(1).request)
    box.deliver(arrival(1, 0, "a"))
    assert first.got == "a"


REFUSED = Verdict.of(Cause.REFUSED)


def over(mesh: Any, tag: int, *, body_nbytes: int = 10) -> Arrived:
    header = Header(operation=Operation.SEND, sender=1, body_nbytes=body_nbytes)
    return Arrived(1, tag, 0, header, b"", mesh)


@pytest.mark.parametrize(
    ("verdict", "stays"), [(LOST, True), (DESYNC, True), (REFUSED, True), (FAILED, False)]
)
def test_a_whole_message_outlives_its_connection(verdict: Verdict, *, stays: bool) -> None:
    large, small = over(None, 3, body_nbytes=1 << 20), over(None, 4)
    assert (large.is_whole, small.is_whole) == (False, True)
    box = filled(large, small, arrival(2, 0, "another's"))
    box.fail(1, FIRST, verdict, is_for_any=True)
    assert box.look(1, 3) is None
    assert box.look(1, 4) is (small if stays else None)
    assert ask(box).got == "another's"


@pytest.mark.parametrize("verdict", [LOST, DESYNC, FAILED])
def test_a_lost_message_is_given_to_no_request(verdict: Verdict) -> None:
    """The connection ends on another thread, which reports it a moment later."""
    mesh = SimpleNamespace(verdict=None)
    box = filled(over(mesh, 3, body_nbytes=1 << 20), over(mesh, 3))
    mesh.verdict = verdict
    found = box.look(1, 3)
    assert (found is not None and found.is_whole) == (verdict is not FAILED)
    asked = ask(box, 1, 5)
    box.deliver(over(mesh, 5, body_nbytes=1 << 20))
    assert asked.ends == []
    assert box.look(1, 5) is None


def test_a_sender_waits_while_its_share_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_MAX_NBYTES", 100)
    box = filled()
    for _ in range(3):
        assert box.has_room(1)
        box.deliver(Arrived(1, 7, 0, raw=bytes(40)))
    assert not box.has_room(1)
    assert box.has_room(2)
    asked = ask(box, 2)
    assert not box.has_room(1)
    wanted = ask(box, 1)
    assert box.has_room(1)
    box.cancel(wanted.request)
    assert not box.has_room(1)
    ask(box, 1, 7)
    assert box.has_room(1)
    assert asked.ends == []


Full = tuple[Mailbox, mock.Mock]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Full:
    """A mailbox without room for rank 1, and what it calls when there is some."""
    monkeypatch.setattr(module, "_KEPT_MAX_NBYTES", 10)
    box, prompt = filled(Arrived(1, 7, 0, raw=bytes(40))), mock.Mock()
    box.expect(1, FIRST, prompt, LANE)
    assert not box.has_room(1)
    return box, prompt


@pytest.mark.parametrize("src", [1, None])
def test_each_poll_in_vain_makes_room_for_one_message(full: Full, src: int | None) -> None:
    box, prompt = full
    assert poll(box, src, 7) is not None
    for count in range(1, 4):
        assert not box.has_room(1)
        assert poll(box, src, 8) is None
        assert prompt.call_count == count
        assert box.has_room(1)


def test_a_request_prompts_a_sender_that_had_no_room(full: Full) -> None:
    box, prompt = full
    ask(box, 1, 8)
    assert prompt.call_count == 1
    assert box.has_room(1)
