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
    for number in (5, 3, 5):
        assert offers.accept_answer(answer(_mesh(1), Operation.TAKE, number) + b"behind it")
    assert answered == [(5, True), (3, True)]


def test_an_answer_of_another_kind_takes_no_offer() -> None:
    offers, answered = _offered(3)
    offers.accept_answer(answer(_mesh(1), Operation.READY, 3))
    assert answered == []
    offers.put(3, lambda is_answered: answered.append((-3, is_answered)), Operation.READY)
    offers.accept_answer(answer(_mesh(1), Operation.READY, 3))
    assert answered == [(-3, True)]


def test_a_withdrawn_offer_gets_no_answer_and_a_late_one_fails_immediately() -> None:
    offers, answered = _offered(3, 4)
    assert offers.withdraw(3)
    assert not offers.withdraw(3)
    offers.accept_answer(answer(_mesh(1), Operation.TAKE, 3))
    offers.fail()
    assert answered == [(4, False)]
    offers.put(7, lambda is_answered: answered.append((7, is_answered)))
    assert answered == [(4, False), (7, False)]


_ANSWER = answer(_mesh(1, b"key"), Operation.TAKE, 3)
_INVALID = {
    "nothing": b"",
    "cut off": _ANSWER[:8],
    "a short proof": _ANSWER[:-1],
    "not an answer": bytes([0]) + _ANSWER[1:],
    "not an answer to an offer": bytes([Operation.SEND]) + _ANSWER[1:],
    "another answer": bytes([Operation.READY]) + _ANSWER[1:],
    "another number": _ANSWER[:1] + bytes([4]) + _ANSWER[2:],
    "another proof": _ANSWER[:-1] + bytes([_ANSWER[-1] ^ 1]),
    "this rank's own": answer(_mesh(0, b"key"), Operation.TAKE, 3),
    "another key": answer(_mesh(1, b"another"), Operation.TAKE, 3),
    "no key": answer(_mesh(1), Operation.TAKE, 3),
}


@pytest.mark.parametrize("case", _INVALID)
def test_an_answer_that_the_other_rank_has_not_sent_is_an_error(case: str) -> None:
    offers, answered = _offered(3, secret=b"key")
    with pytest.raises(WireError, match="rank 1 has sent an invalid answer"):
        offers.accept_answer(_INVALID[case])
    assert answered == []
    offers.accept_answer(_ANSWER)
    assert answered == [(3, True)]
