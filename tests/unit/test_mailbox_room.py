"""What a mailbox keeps: messages that outlive their connection, up to a limit in bytes."""

from types import SimpleNamespace
from typing import Any

import pytest

from objcomm._failures.verdict import Cause, Verdict
from objcomm._p2p import mailbox as module
from objcomm._p2p.mailbox import Arrived
from objcomm._wire.header import Header, Operation
from tests.unit.mailboxes import DESYNC, FAILED, FIRST, LOST, Asked, arrival, ask, filled, poll

REFUSED = Verdict.of(Cause.REFUSED)


def header(*, body_nbytes: int) -> Header:
    return Header(operation=Operation.SEND, sender=1, body_nbytes=body_nbytes)


def over(mesh: Any, tag: int, *, body_nbytes: int = 10, raw: bytes = b"") -> Arrived:
    return Arrived(1, tag, 0, header(body_nbytes=body_nbytes), raw, mesh)


@pytest.mark.parametrize(
    ("verdict", "stays"), [(LOST, True), (DESYNC, True), (REFUSED, True), (FAILED, False)]
)
def test_a_whole_message_outlives_its_connection_but_no_block_that_has_failed(
    verdict: Verdict, *, stays: bool
) -> None:
    large, small = over(None, 3, body_nbytes=1 << 20), over(None, 4)
    assert (large.is_whole, small.is_whole) == (False, True)
    box = filled(large, small, arrival(2, 0, "another's"))
    box.fail(1, FIRST, verdict, is_for_any=True)
    assert box.look(1, 3) is None
    assert box.look(1, 4) is (small if stays else None)
    assert ask(box).got == "another's"


@pytest.mark.parametrize("verdict", [LOST, DESYNC, FAILED])
def test_what_is_lost_is_given_to_nobody_before_anybody_has_told_so(verdict: Verdict) -> None:
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


def test_a_sender_waits_while_its_share_is_full_until_somebody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.parametrize("src", [1, None])
def test_each_look_in_vain_lets_one_message_more_come(
    monkeypatch: pytest.MonkeyPatch, src: int | None
) -> None:
    monkeypatch.setattr(module, "_KEPT_MAX_NBYTES", 10)
    prompts: list[int] = []
    box = filled(Arrived(1, 7, 0, raw=bytes(40)))
    box.expect(1, FIRST, lambda: prompts.append(1))
    assert poll(box, src, 7) is not None
    for count in range(1, 4):
        assert not box.has_room(1)
        assert poll(box, src, 8) is None
        assert len(prompts) == count
        assert box.has_room(1)


def test_a_request_prompts_a_sender_that_had_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_MAX_NBYTES", 10)
    prompts: list[int] = []
    box = filled(Arrived(1, 7, 0, raw=bytes(40)))
    box.expect(1, FIRST, lambda: prompts.append(1))
    assert not box.has_room(1)
    asked = Asked(1, 8)
    box.ask(asked.request)
    assert prompts == [1]
    assert box.has_room(1)
