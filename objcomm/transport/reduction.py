"""Large tensors of all ranks, combined element by element: one rank computes each, all get it.

Every piece of the tensors has an owner. All ranks send it their operands' piece, it combines them
in rank order and sends the result back (reduce-scatter, then all-gather, each straight from rank
to rank). So each element is computed once, in the order of the ranks, and is the same everywhere.
What travels is a message's payload without a message: the ranks have agreed on it before.

The transfers are this library's own and not ``dist.all_reduce``: Gloo does not wake a receive that
is being filled when its peer dies, and ``Exchange.arrived`` does; two lanes cannot mix.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from objcomm.memory import empty
from objcomm.transport.exchange import Arriving, Exchange

# A piece small enough for the processor's cache, and large enough that messages cost little.
_PIECE_MIN_NBYTES = 256 << 10
_PIECE_MAX_NBYTES = 4 << 20
# Parts of at most this size share a piece: copying them costs less than messages of their own.
_SHARED_MAX_NBYTES = 120 << 10
# So many pieces for each owner let it combine one while the next arrives.
_PIECES_FOR_EACH_OWNER = 4
# For so many of its pieces an owner has memory for the operands that arrive.
_AHEAD = 3

Combine = Callable[[Sequence[torch.Tensor], torch.Tensor], None]


class Part(NamedTuple):
    """One tensor of this rank's in a reduction.

    Attributes:
        operand: flat and contiguous in CPU memory; None where this rank has none.
        result: flat and contiguous; None on a rank that gets no result.
        dtype: the operand's on all ranks.
        result_dtype: the result's.
        numel: elements.
        present: the ranks that have an operand, in order; at least one.
        combine: computes the result's elements from those of ``present``.
        kind: parts of one kind may share a piece; they agree in all but numel.
    """

    operand: torch.Tensor | None
    result: torch.Tensor | None
    dtype: torch.dtype
    result_dtype: torch.dtype
    numel: int
    present: tuple[int, ...]
    combine: Combine
    kind: object


@dataclass(slots=True)
class _Piece:
    """Neighbouring elements that travel as one; the same picture on all ranks."""

    owner: int
    spans: list[tuple[Part, int, int]]
    numel: int
    operand: torch.Tensor | None = None
    result: torch.Tensor | None = None
    arriving: list[tuple[int, Arriving]] = field(default_factory=list)

    @property
    def about(self) -> Part:
        """Any of its parts, which agree in dtype, operator and ranks."""
        return self.spans[0][0]


def reduce_tensors(exchange: Exchange, parts: Iterable[Part], root: int | None) -> None:
    """Fill in the results of all parts; every rank calls this with parts that agree.

    Args:
        exchange: this operation's.
        parts: in the same order on all ranks.
        root: the only rank that gets results; every rank if None.
    """
    pieces = _pieces(list(parts), exchange.size)
    if pieces:
        _Run(exchange, pieces, root).run()


def _pieces(parts: list[Part], size: int) -> list[_Piece]:
    """Cut large parts, join small ones of the same kind, and give each piece an owner."""
    nbytes = sum(part.numel * part.dtype.itemsize for part in parts)
    fair = -(-nbytes // (size * _PIECES_FOR_EACH_OWNER))
    limit = min(max(fair, _PIECE_MIN_NBYTES), _PIECE_MAX_NBYTES)
    pieces: list[_Piece] = []
    open_bags: dict[object, _Piece] = {}
    for part in parts:
        most = limit // max(part.dtype.itemsize, part.result_dtype.itemsize)
        if part.numel * part.dtype.itemsize > _SHARED_MAX_NBYTES:
            count = -(-part.numel // most)
            cuts = [part.numel * at // count for at in range(count + 1)]
            pieces += [
                _Piece(0, [(part, start, stop)], stop - start)
                for start, stop in itertools.pairwise(cuts)
            ]
        elif part.numel:
            bag = open_bags.get(part.kind)
            if bag is None or bag.numel + part.numel > most:
                bag = open_bags[part.kind] = _Piece(0, [], 0)
                pieces.append(bag)
            bag.spans.append((part, 0, part.numel))
            bag.numel += part.numel
    for at, piece in enumerate(pieces):
        piece.owner = at % size
    return pieces


class _Run:
    """One reduction on this rank."""

    def __init__(self, exchange: Exchange, pieces: list[_Piece], root: int | None) -> None:
        self._exchange = exchange
        self._pieces = pieces
        self._root = root
        rank, size = exchange.rank, exchange.size
        self._rank = rank
        # Each begins with another peer, or all would send to the same one first.
        self._others = [(rank + step) % size for step in range(1, size)]
        self._takers = self._others if root is None else [root] * (rank != root)
        self._is_taker = root in {None, rank}
        self._memory: list[torch.Tensor] = []
        self._sent_to: set[int] = set()
        self._received_from: set[int] = set()

    def run(self) -> None:
        """See ``reduce_tensors``."""
        mine = [piece for piece in self._pieces if piece.owner == self._rank]
        others = [piece for piece in self._pieces if piece.owner != self._rank]
        for at, piece in enumerate(mine[:_AHEAD]):
            self._await_operands(piece, at)
        coming = self._await_results(others) if self._is_taker else []
        for piece in others:
            if self._rank in piece.about.present:
                self._send(_operand(piece), piece.owner, is_ended=True)
        last = mine[-1] if mine else None
        for at, piece in enumerate(mine):
            self._combine(piece)
            if at + _AHEAD < len(mine):
                self._await_operands(mine[at + _AHEAD], at)
            for peer in self._takers:
                # Whoever waits for the last byte of the last piece has all before it.
                self._send_result(piece, peer, is_ended=piece is last)
        for peer, arriving in coming:
            arriving.wait(peer)
        for piece in self._pieces if self._is_taker else ():
            _unpack(piece)
        self._exchange.confirm(self._received_from, self._sent_to)

    def _await_operands(self, piece: _Piece, at: int) -> None:
        """Make ready for all ranks' operands of a piece of this rank's own."""
        about = piece.about
        nbytes = piece.numel * about.dtype.itemsize
        peers = [peer for peer in self._others if peer in about.present]
        slots = self._slots(at % _AHEAD, len(peers), nbytes)
        for peer, flat in zip(peers, slots, strict=True):
            arriving = self._exchange.arriving(flat, peer, is_ended=True)
            piece.arriving.append((peer, arriving))
            self._received_from.add(peer)

    def _slots(self, row: int, count: int, nbytes: int) -> list[torch.Tensor]:
        """Memory for operands, used again by the piece that comes ``_AHEAD`` later."""
        places = range(row * len(self._others), row * len(self._others) + count)
        while len(self._memory) < (row + 1) * len(self._others):
            self._memory.append(empty(0))
        for place in places:
            if self._memory[place].numel() < nbytes:
                self._memory[place] = empty(nbytes)
        return [self._memory[place][:nbytes] for place in places]

    def _combine(self, piece: _Piece) -> None:
        about = piece.about
        operands = {}
        for peer, arriving in piece.arriving:
            operands[peer] = arriving.wait(peer).view(about.dtype)
        if self._rank in about.present:
            operands[self._rank] = _operand(piece)
        into = _room(piece)
        about.combine([operands[rank] for rank in about.present], into)
        piece.arriving.clear()

    def _await_results(self, pieces: list[_Piece]) -> list[tuple[int, Arriving]]:
        """Post all receives of results; each owner's last one is to be waited for."""
        last = {piece.owner: piece for piece in pieces}
        coming = []
        for piece in pieces:
            flat = _room(piece).view(torch.uint8)
            is_last = last[piece.owner] is piece
            arriving = self._exchange.arriving(flat, piece.owner, is_result=True, is_ended=is_last)
            coming.append((piece.owner, arriving))
        self._received_from.update(last)
        # The last pieces first: when one has come, all before it have, and none is half-filled.
        return coming[::-1]

    def _send(self, flat: torch.Tensor, peer: int, *, is_ended: bool) -> None:
        self._sent_to.add(peer)
        self._exchange.send_flat(flat.view(torch.uint8), peer, is_ended=is_ended)

    def _send_result(self, piece: _Piece, peer: int, *, is_ended: bool) -> None:
        self._sent_to.add(peer)
        flat = _room(piece).view(torch.uint8)
        self._exchange.send_flat(flat, peer, is_result=True, is_ended=is_ended)


def _operand(piece: _Piece) -> torch.Tensor:
    """This rank's elements of a piece: their own memory, or several parts' copied together."""
    if piece.operand is None:
        part, start, stop = piece.spans[0]
        if len(piece.spans) == 1 and part.operand is not None:
            piece.operand = part.operand[start:stop]
        else:
            piece.operand = empty(piece.numel * part.dtype.itemsize).view(part.dtype)
            for (part, start, stop), room in _shared(piece, piece.operand):
                if part.operand is not None:
                    room.copy_(part.operand[start:stop])
    return piece.operand


def _shared(
    piece: _Piece, flat: torch.Tensor
) -> Iterator[tuple[tuple[Part, int, int], torch.Tensor]]:
    """Each part of a piece, with its place in the piece's memory."""
    sizes = [stop - start for _, start, stop in piece.spans]
    return zip(piece.spans, flat.split(sizes), strict=True)


def _room(piece: _Piece) -> torch.Tensor:
    """Where a piece's result goes on this rank."""
    if piece.result is None:
        part, start, stop = piece.spans[0]
        if part.result is not None and len(piece.spans) == 1:
            piece.result = part.result[start:stop]
        else:
            dtype = part.result_dtype
            piece.result = empty(piece.numel * dtype.itemsize).view(dtype)
    return piece.result


def _unpack(piece: _Piece) -> None:
    """Copy the results of several parts that shared a piece to where each belongs."""
    if len(piece.spans) == 1 or piece.result is None:
        return
    for (part, start, stop), room in _shared(piece, piece.result):
        if part.result is not None:
            part.result[start:stop].copy_(room)
