"""What one rank has offered another, and the answers that take an offer; no traffic."""

from types import SimpleNamespace
from typing import Any

import pytest

from objcomm import WireError
from objcomm._failures.mesh import Mesh
from objcomm._p2p.peer import Offers, answer
from objcomm._wire.header import Operation


def _mesh(rank: int, secret: bytes | None = None) -> Any:
    """Return the parts of a mesh that prove which rank has said something."""
    mesh = SimpleNamespace(rank=rank, session="a session", _secret=secret)
    mesh.proof = lambda sender, said: Mesh.proof(mesh, sender, said)  # type: ignore[arg-type]  # see above
    return mesh


def _offered(*numbers: int, secret: bytes | None = None) -> tuple[Offers, list[tuple[int, bool]]]:
    """Return the offers that rank 0 has made, and the list of answers it has heard."""
    heard: list[tuple[int, bool]] = []
    offers = Offers(_mesh(0, secret), 1)
    for number in numbers:
        offers.put(number, lambda is_said, number=number: heard.append((number, is_said)))  # type: ignore[misc]  # bound as a default
    return offers, heard


def test_each_offer_hears_its_own_word_once_in_any_order() -> None:
    offers, heard = _offered(3, 4, 5)
    peer = _mesh(1)
    for number in (5, 3, 5):
        assert offers.hear(answer(peer, Operation.TAKE, number) + b"behind it")
    assert heard == [(5, True), (3, True)]


def test_another_word_on_the_same_message_is_another_offer() -> None:
    offers, heard = _offered(3)
    offers.hear(answer(_mesh(1), Operation.READY, 3))
    assert heard == []
    offers.put(3, lambda is_said: heard.append((-3, is_said)), Operation.READY)
    offers.hear(answer(_mesh(1), Operation.READY, 3))
    assert heard == [(-3, True)]


def test_what_is_withdrawn_hears_nothing() -> None:
    offers, heard = _offered(3, 4)
    assert offers.withdraw(3)
    assert not offers.withdraw(3)
    offers.hear(answer(_mesh(1), Operation.TAKE, 3))
    offers.fail()
    assert heard == [(4, False)]


def test_what_is_offered_after_the_end_hears_of_it_at_once() -> None:
    offers, heard = _offered()
    offers.fail()
    offers.put(7, lambda is_said: heard.append((7, is_said)))
    assert heard == [(7, False)]


_ANSWER = answer(_mesh(1, b"key"), Operation.TAKE, 3)


@pytest.mark.parametrize(
    "said",
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
        *("nothing", "cut off", "a short proof", "no word", "no word on an offer"),
        *("another word", "another number", "another proof"),
        *("this rank's own", "another key", "no key"),
    ],
)
def test_a_word_that_the_other_rank_has_not_said_is_an_error(said: bytes) -> None:
    offers, heard = _offered(3, secret=b"key")
    with pytest.raises(WireError, match="rank 1 has sent an invalid answer"):
        offers.hear(said)
    assert heard == []
    offers.hear(_ANSWER)
    assert heard == [(3, True)]
