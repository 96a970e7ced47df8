"""Large tensors of all ranks, combined element by element: one rank computes each, all get it.

Every piece of the tensors has an owner. All ranks send it their operands' piece, it combines them
in rank order and sends the result back (reduce-scatter, then all-gather, each straight from rank
to rank). So each element is computed once, in the order of the ranks, and is the same everywhere.
What travels is a message's payload without a message: the ranks have agreed on it before.

The transfers are this library's own and not ``dist.all_reduce``: who waits hears when a peer dies,
see ``Transfers.ended``, and two lanes cannot mix.

Tensors on accelerators are combined there in the same order: each rank gets one part of every
tensor and sends the result to all (all-to-all, then all-gather, both over the device link). NCCL's
own all-reduce would add up halves as halves, in another order than the ranks', and knows fewer
dtypes and operators: a result would depend on where a tensor lies. As many bytes move.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from objcomm.algorithms import routes
from objcomm.algorithms.exchange import Exchange
from objcomm.algorithms.transfers import Arriving
from objcomm.codecs.buffers import COPIED_MAX_NBYTES, empty
from objcomm.wire.message import compose

# A piece small enough for the processor's cache, and large enough that messages cost little. 64 MiB
# among 4 ranks on 2 cores: in pieces of 1 MiB 228 ms, of 4 MiB 268, of 512 KiB 250.
_PIECE_MIN_NBYTES = 256 << 10
_PIECE_MAX_NBYTES = 1 << 20
# So many pieces for each owner let it combine one while the next arrives. 4 MiB among 2 and 4 ranks
# on 2 cores: with 2 pieces 10.2 and 22.8 ms, with 4 12.1 and 24.5, with 1 10.2 and 20.2.
_PIECES_FOR_EACH_OWNER = 2
# For so many of its pieces an owner has memory for the operands that arrive.
_AHEAD = 3

_ALIGNMENT = 64

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

    spans: list[tuple[Part, int, int]]
    numel: int
    operand: torch.Tensor | None = None
    result: torch.Tensor | None = None
    arriving: list[tuple[int, Arriving]] = field(default_factory=list)

    @property
    def about(self) -> Part:
        """Any of its parts, which agree in dtype, operator and ranks."""
        return self.spans[0][0]

    @property
    def nbytes(self) -> int:
        """Of the operand."""
        return self.numel * self.about.dtype.itemsize


class _Batch(NamedTuple):
    """Pieces that a rank waits for together, because each wait costs a message of its own."""

    owner: int
    pieces: list[_Piece]

    def of(self, rank: int) -> list[_Piece]:
        """The pieces that ``rank`` has operands of."""
        return [piece for piece in self.pieces if rank in piece.about.present]


def reduce_tensors(exchange: Exchange, parts: Iterable[Part], root: int | None) -> None:
    """Fill in the results of all parts; every rank calls this with parts that agree.

    Args:
        exchange: this operation's.
        parts: in the same order on all ranks.
        root: the only rank that gets results; every rank if None.
    """
    batches = _batches(list(parts), exchange.size)
    if batches:
        _Run(exchange, batches, root).run()


def _batches(parts: list[Part], size: int) -> list[_Batch]:
    """Neighbouring pieces together, and each batch's owner in turn."""
    nbytes = sum(part.numel * part.dtype.itemsize for part in parts)
    fair = -(-nbytes // (size * _PIECES_FOR_EACH_OWNER))
    limit = min(max(fair, _PIECE_MIN_NBYTES), _PIECE_MAX_NBYTES)
    batches: list[_Batch] = []
    filled = limit
    for piece in _pieces(parts, limit):
        if filled + piece.nbytes // 2 >= limit:
            batches.append(_Batch(len(batches) % size, []))
            filled = 0
        batches[-1].pieces.append(piece)
        filled += piece.nbytes
    return batches


def _pieces(parts: list[Part], limit: int) -> list[_Piece]:
    """Cut large parts, and join small ones of the same kind."""
    pieces: list[_Piece] = []
    open_bags: dict[object, _Piece] = {}
    for part in parts:
        most = limit // max(part.dtype.itemsize, part.result_dtype.itemsize)
        if part.numel * part.dtype.itemsize > COPIED_MAX_NBYTES:
            count = -(-part.numel // most)
            cuts = [part.numel * at // count for at in range(count + 1)]
            pieces += [
                _Piece([(part, start, stop)], stop - start)
                for start, stop in itertools.pairwise(cuts)
            ]
        elif part.numel:
            bag = open_bags.get(part.kind)
            if bag is None or bag.numel + part.numel > most:
                bag = open_bags[part.kind] = _Piece([], 0)
                pieces.append(bag)
            bag.spans.append((part, 0, part.numel))
            bag.numel += part.numel
    return pieces


class _Run:
    """One reduction on this rank."""

    def __init__(self, exchange: Exchange, batches: list[_Batch], root: int | None) -> None:
        self._exchange = exchange
        self._batches = batches
        rank, size = exchange.rank, exchange.size
        self._rank = rank
        # Each begins with another peer, or all would send to the same one first.
        self._others = [(rank + step) % size for step in range(1, size)]
        self._takers = self._others if root is None else [root] * (rank != root)
        self._is_taker = root in {None, rank}
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        self._sent_to: set[int] = set()
        self._received_from: set[int] = set()

    def run(self) -> None:
        """See ``reduce_tensors``."""
        mine = [batch for batch in self._batches if batch.owner == self._rank]
        others = [batch for batch in self._batches if batch.owner != self._rank]
        for at, batch in enumerate(mine[:_AHEAD]):
            self._await_operands(batch, at)
        coming = self._await_results(others) if self._is_taker else []
        for batch in others:
            self._send_operands(batch)
        for at, batch in enumerate(mine):
            self._combine(batch)
            if at + _AHEAD < len(mine):
                self._await_operands(mine[at + _AHEAD], at)
            self._send_results(batch, is_last=batch is mine[-1])
        for peer, arriving in coming:
            arriving.wait(peer)
        for batch in self._batches if self._is_taker else ():
            for piece in batch.pieces:
                _unpack(piece)
        self._exchange.confirm(self._received_from, self._sent_to)

    def _await_operands(self, batch: _Batch, at: int) -> None:
        """Make ready for all ranks' operands of a batch of this rank's own."""
        for peer in self._others:
            pieces = batch.of(peer)
            flats = self._slots(at % _AHEAD, peer, pieces)
            for piece, flat in zip(pieces, flats, strict=True):
                is_last = piece is pieces[-1]
                arriving = self._exchange.arriving(flat, peer, is_ended=is_last)
                piece.arriving.append((peer, arriving))
                self._received_from.add(peer)

    def _slots(self, row: int, peer: int, pieces: list[_Piece]) -> list[torch.Tensor]:
        """Memory for one rank's operands, used again by the batch that comes ``_AHEAD`` later."""
        ends = list(itertools.accumulate(_aligned(piece.nbytes) for piece in pieces))
        nbytes = ends[-1] if ends else 0
        memory = self._memory.get((row, peer))
        if memory is None or memory.numel() < nbytes:
            memory = self._memory[row, peer] = empty(nbytes)
        return [
            memory[end - _aligned(piece.nbytes) :][: piece.nbytes]
            for piece, end in zip(pieces, ends, strict=True)
        ]

    def _combine(self, batch: _Batch) -> None:
        # The last piece first: when it has come, all before it have, and none is half-filled.
        for piece in reversed(batch.pieces):
            for peer, arriving in piece.arriving:
                arriving.wait(peer)
        for piece in batch.pieces:
            about = piece.about
            operands = {peer: each.flat.view(about.dtype) for peer, each in piece.arriving}
            if self._rank in about.present:
                operands[self._rank] = _operand(piece)
            about.combine([operands[rank] for rank in about.present], _room(piece))
            piece.arriving.clear()

    def _await_results(self, batches: list[_Batch]) -> list[tuple[int, Arriving]]:
        """Post all receives of results, and list them in the order in which to wait."""
        last = {batch.owner: batch.pieces[-1] for batch in batches}
        coming = []
        for batch in batches:
            for piece in batch.pieces:
                flat = _room(piece).view(torch.uint8)
                is_last = piece is last[batch.owner]
                arriving = self._exchange.arriving(
                    flat, batch.owner, is_result=True, is_ended=is_last
                )
                coming.append((batch.owner, arriving))
        self._received_from.update(last)
        return coming[::-1]  # as in ``_combine``

    def _send_operands(self, batch: _Batch) -> None:
        pieces = batch.of(self._rank)
        for piece in pieces:
            self._send(_operand(piece), batch.owner, is_ended=piece is pieces[-1])

    def _send_results(self, batch: _Batch, *, is_last: bool) -> None:
        for piece in batch.pieces:
            # Whoever waits for the last byte of the last piece has all before it.
            is_ended = is_last and piece is batch.pieces[-1]
            for peer in self._takers:
                self._send(_room(piece), peer, is_result=True, is_ended=is_ended)

    def _send(
        self, flat: torch.Tensor, peer: int, *, is_result: bool = False, is_ended: bool
    ) -> None:
        self._sent_to.add(peer)
        self._exchange.send_flat(
            flat.view(torch.uint8), peer, is_result=is_result, is_ended=is_ended
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _operand(piece: _Piece) -> torch.Tensor:
    """This rank's elements of a piece: their own memory, or several parts' copied together."""
    if piece.operand is None:
        part, start, stop = piece.spans[0]
        if len(piece.spans) == 1 and part.operand is not None:
            piece.operand = part.operand[start:stop]
        else:
            piece.operand = empty(piece.numel * part.dtype.itemsize).view(part.dtype)
            # Only whole parts share a piece, and a rank has all of them or none.
            operands = [part.operand for part, _, _ in piece.spans if part.operand is not None]
            if operands:
                torch.cat(operands, out=piece.operand)
    return piece.operand


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
    results = [part.result for part, _, _ in piece.spans if part.result is not None]
    if len(piece.spans) > 1 and piece.result is not None and results:
        sizes = [part.numel for part, _, _ in piece.spans]
        torch.split_with_sizes_copy(piece.result, sizes, out=results)


# What travels together, so that small parts cost no transfer of their own; packed memory is
# about three times as large.
_BAG_MAX_NBYTES = 64 << 20

# Torch takes memory from the device in blocks of 2 MiB or more, and has so much at hand.
_SURELY_THERE_NBYTES = 1 << 20


def reduce_on_device(exchange: Exchange, parts: Iterable[Part]) -> None:
    """Fill in the results of all parts; every rank calls this with parts that agree.

    Args:
        exchange: this operation's, which has a device link on every rank.
        parts: in the same order on all ranks, in memory of the link's device; every rank has an
            operand of each.
    """
    for bag in _bags(parts):
        _reduce(exchange, bag)


def _bags(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts of one kind together, up to a limit."""
    by_kind: dict[object, list[Part]] = {}
    for part in parts:
        if part.numel:
            by_kind.setdefault(part.kind, []).append(part)
    for alike in by_kind.values():
        bag: list[Part] = []
        nbytes = 0
        for part in alike:
            nbytes += part.numel * part.dtype.itemsize
            if bag and nbytes > _BAG_MAX_NBYTES:
                yield bag
                bag, nbytes = [], part.numel * part.dtype.itemsize
            bag.append(part)
        yield bag


def _reduce(exchange: Exchange, bag: list[Part]) -> None:
    about = bag[0]
    numel = sum(part.numel for part in bag)
    share = -(-numel // exchange.size)
    operand = _packed(bag, share * exchange.size)
    arrived = torch.empty_like(operand)
    mine = torch.empty(share, dtype=about.result_dtype, device=operand.device)
    whole = torch.empty(share * exchange.size, dtype=about.result_dtype, device=operand.device)
    if operand.nbytes > _SURELY_THERE_NBYTES:
        # A device without room raises here, and so on all ranks: nothing would wake those that
        # wait for it in the device link.
        routes.all_meet(exchange, compose(exchange.header, b""))
    exchange.accelerators().all_to_all(operand.view(torch.uint8), arrived.view(torch.uint8))
    about.combine(arrived.split(share), mine)
    exchange.accelerators().all_gather(mine.view(torch.uint8), whole.view(torch.uint8))
    results = [part.result for part in bag if part.result is not None]
    if results:
        sizes = [part.numel for part in bag]
        torch.split_with_sizes_copy(whole[:numel], sizes, out=results)


def _packed(bag: list[Part], numel: int) -> torch.Tensor:
    """This rank's operands one after another, and zeros up to ``numel``."""
    operands = [part.operand for part in bag if part.operand is not None]
    if len(operands) == 1 and operands[0].numel() == numel:
        return operands[0]
    missing = numel - sum(each.numel() for each in operands)
    return torch.cat([*operands, operands[0].new_zeros(missing)])
