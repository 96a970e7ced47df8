"""What one rank has offered another, and the answers that take an offer; no traffic."""

from types import SimpleNamespace
from typing import Any

import pytest

from objcomm import WireError
from objcomm._failures.mesh import Mesh
from objcomm._p2p.peer import Offers, answer
from objcomm._wire.header import Operation


def _mesh(rank: int, secret: bytes | None = None) -> Any:
    """Return the parts of a mesh that prove which rank has sent something."""
    mesh = SimpleNamespace(rank=rank, session="a session", _secret=secret)
    mesh.proof = lambda sender, content: Mesh.proof(mesh, sender, content)  # type: ignore[arg-type]  # see above
    return mesh


def _offered(*numbers: int, secret: bytes | None = None) -> tuple[Offers, list[tuple[int, bool]]]:
    """Return the offers that rank 0 has made, and the list of those that have ended."""
    answered: list[tuple[int, bool]] = []
    offers = Offers(_mesh(0, secret), 1)
    for number in numbers:
        offers.put(number, lambda got, number=number: answered.append((number, got)))  # type: ignore[misc]  # bound as a default
    return offers, answered


def test_each_offer_gets_its_own_answer_once_in_any_order() -> None:
    offers, answered = _offered(3, 4, 5)
    peer = _mesh(1)
    for number in (5, 3, 5):
        assert offers.accept_answer(answer(peer, Operation.TAKE, number) + b"behind it")
    assert answered == [(5, True), (3, True)]


def test_another_answer_about_the_same_message_is_another_offer() -> None:
    offers, answered = _offered(3)
    offers.accept_answer(answer(_mesh(1), Operation.READY, 3))
    assert answered == []
    offers.put(3, lambda is_answered: answered.append((-3, is_answered)), Operation.READY)
    offers.accept_answer(answer(_mesh(1), Operation.READY, 3))
    assert answered == [(-3, True)]


def test_what_is_withdrawn_gets_no_answer() -> None:
    offers, answered = _offered(3, 4)
    assert offers.withdraw(3)
    assert not offers.withdraw(3)
    offers.accept_answer(answer(_mesh(1), Operation.TAKE, 3))
    offers.fail()
    assert answered == [(4, False)]


def test_an_offer_after_the_end_is_informed_immediately() -> None:
    offers, answered = _offered()
    offers.fail()
    offers.put(7, lambda is_answered: answered.append((7, is_answered)))
    assert answered == [(7, False)]


_ANSWER = answer(_mesh(1, b"key"), Operation.TAKE, 3)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        _ANSWER[:8],
        _ANSWER[:-1],
        bytes([0]) + _ANSWER[1:],
        bytes([Operation.SEND]) + _ANSWER[1:],
        bytes([Operation.READY]) + _ANSWER[1:],
        _ANSWER[:1] + bytes([4]) + _ANSWER[2:],
        _ANSWER[:-1] + bytes([_ANSWER[-1] ^ 1]),
        answer(_mesh(0, b"key"), Operation.TAKE, 3),
        answer(_mesh(1, b"another"), Operation.TAKE, 3),
        answer(_mesh(1), Operation.TAKE, 3),
    ],
    ids=[
        *("nothing", "cut off", "a short proof", "no answer", "no answer to an offer"),
        *("another answer", "another number", "another proof"),
        *("this rank's own", "another key", "no key"),
    ],
)
def test_an_answer_that_the_other_rank_has_not_sent_is_an_error(raw: bytes) -> None:
    offers, answered = _offered(3, secret=b"key")
    with pytest.raises(WireError, match="rank 1 has sent an invalid answer"):
        offers.accept_answer(raw)
    assert answered == []
    offers.accept_answer(_ANSWER)
    assert answered == [(3, True)]
