"""How what follows a head is cut into pieces, and what knows how far it has come.

A receiver waits for a *unit* in one go. Normally all that follows is one unit, and one receipt
tells the sender of it. Where a message's header says that it is paced, each piece is a unit with a
receipt of its own, so that both ends know how many bytes have arrived.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from objcomm.frames import Flag
from objcomm.message import Message

_PACED = int(Flag.PACED)  # an IntFlag's ``&`` costs 0.7 µs

#: The tensors of one unit, in order.
Unit = list[torch.Tensor]


class Meter(Protocol):
    """Is told of a call's bytes while they move, on the thread that moves them; never raises."""

    def expect(self, nbytes: int) -> None:
        """So many more are to move."""

    def moved(self, nbytes: int) -> None:
        """So many have arrived: here, or at all the ranks to which this one sends them."""


class _Nobody:
    def expect(self, nbytes: int) -> None:
        """See ``Meter``."""

    def moved(self, nbytes: int) -> None:
        """See ``Meter``."""


#: The meter of a call that shows nothing.
NOBODY: Meter = _Nobody()


def is_paced(message: Message) -> bool:
    """Whether each piece of what follows the head has a receipt."""
    return bool(message.header.flags & _PACED)


def units(message: Message, flats: Sequence[torch.Tensor], chunk_nbytes: int) -> list[Unit]:
    """What follows a head, or a part of it, as sender and receiver cut it alike."""
    if is_paced(message):
        return [ended([piece]) for flat in flats for piece in flat.split(chunk_nbytes)]
    return [ended(list(flats))] if flats else []


def nbytes_of(units: Sequence[Unit]) -> int:
    """How long some units are together."""
    return sum(flat.numel() for unit in units for flat in unit)


def ended(pieces: list[torch.Tensor]) -> Unit:
    """The same bytes, of which the last one travels by itself.

    When a connection closes, Gloo wakes the receives that stand posted, but neither the one that is
    being filled nor a send whose receive is posted: whoever waits for one of those waits until the
    limit (``Pair::signalException`` of torch 2.13 forgets ``rx_``, and the ``ubuf`` in ``tx_``). So
    a receiver waits for the last byte first, which is posted until all before it has come.
    """
    if not pieces or pieces[-1].numel() <= 1:
        return pieces
    *rest, last = pieces
    return [*rest, last[:-1], last[-1:]]
