"""Large tensors combined element by element; one rank computes each element, all ranks get it.

Each piece of the tensors has an owner. All ranks send it their operands of the piece. It combines
them in rank order and sends the result back (a reduce-scatter, then an all-gather, each directly
from rank to rank). So each element is computed once, in rank order, and is identical on all ranks.
The data is sent without a head, because the ranks have already agreed on it.

The transfers are objcomm's own, not ``dist.all_reduce``, so that a waiting rank notices when a peer
dies (see ``Transfers.ended``) and two lanes cannot mix.

Tensors on accelerators are combined there, in the same order. Each rank receives one part of every
tensor and sends its result to all (an all-to-all, then an all-gather, both over the device link).
NCCL's own all-reduce would accumulate half precision in half precision, not in rank order, and it
supports fewer dtypes and operators, so a result would depend on the tensor's device. Both
move the same number of bytes.
"""

import itertools
from collections.abc import Iterable, Iterator

import torch

from objcomm._algorithms import routes, shared_reduction
from objcomm._algorithms.device import DevicePath
from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.parts import Batch, Part, Piece, aligned, batches, nbytes_of
from objcomm._algorithms.transfers import Arriving
from objcomm._codecs.buffers import empty

# A piece that fits into the processor's cache, and is large enough to make messages cheap. 64 MiB
# among 4 ranks on 2 cores took 228 ms in pieces of 1 MiB, 268 with 4 MiB, and 250 with 512 KiB.
_BATCH_MAX_NBYTES = 1 << 20
# An owner has memory for the received operands of this many of its batches.
_AHEAD = 3


def reduce_tensors(exchange: Exchange, parts: Iterable[Part], root: int | None) -> None:
    """Fill in the results of all parts; every rank calls this with matching parts.

    Args:
        exchange: the operation's exchange.
        parts: in the same order on all ranks.
        root: the only rank that gets results; every rank if None.
    """
    own = list(parts)
    workspace = exchange.workspace(nbytes_of(own))
    if workspace is not None:
        shared_reduction.reduce_tensors(exchange, own, root, workspace)
        return
    cut = batches(own, exchange.size, _BATCH_MAX_NBYTES)
    if cut:
        _Run(exchange, cut, root).run()


class _Run:
    """One reduction, as seen by this rank."""

    def __init__(self, exchange: Exchange, batches: list[Batch], root: int | None) -> None:
        self._exchange = exchange
        self._batches = batches
        rank, size = exchange.rank, exchange.size
        self._rank = rank
        # Each rank starts with a different peer, so that they do not all send to one first.
        self._others = [(rank + step) % size for step in range(1, size)]
        self._takers = self._others if root is None else [root] * (rank != root)
        self._is_taker = root in {None, rank}
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        self._arriving: dict[Piece, list[tuple[int, Arriving]]] = {}
        self._packed: dict[Piece, torch.Tensor] = {}
        self._rooms: dict[Piece, torch.Tensor] = {}
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
        for piece, room in self._rooms.items():
            piece.unpack(room)
        self._exchange.confirm(self._received_from, self._sent_to)

    def _await_operands(self, batch: Batch, at: int) -> None:
        """Post the receives of all ranks' operands for one of this rank's own batches."""
        for peer in self._others:
            pieces = batch.of(peer)
            flats = self._slots(at % _AHEAD, peer, pieces)
            for piece, flat in zip(pieces, flats, strict=True):
                is_last = piece is pieces[-1]
                arriving = self._exchange.arriving(flat, peer, is_ended=is_last)
                self._arriving.setdefault(piece, []).append((peer, arriving))
                self._received_from.add(peer)

    def _slots(self, row: int, peer: int, pieces: list[Piece]) -> list[torch.Tensor]:
        """Return memory for one rank's operands, reused ``_AHEAD`` batches later."""
        ends = list(itertools.accumulate(aligned(piece.operand_nbytes) for piece in pieces))
        nbytes = ends[-1] if ends else 0
        memory = self._memory.get((row, peer))
        if memory is None or memory.numel() < nbytes:
            memory = self._memory[row, peer] = empty(nbytes)
        return [
            memory[end - aligned(piece.operand_nbytes) :][: piece.operand_nbytes]
            for piece, end in zip(pieces, ends, strict=True)
        ]

    def _combine(self, batch: Batch) -> None:
        # The last piece first: once it has arrived, so have all earlier ones, completely.
        for piece in reversed(batch.pieces):
            for peer, arriving in self._arriving.get(piece, ()):
                arriving.wait(peer)
        for piece in batch.pieces:
            about = piece.about
            arrived = self._arriving.pop(piece, ())
            operands = {peer: each.flat.view(about.dtype) for peer, each in arrived}
            if self._rank in about.present:
                operands[self._rank] = self._operand(piece)
            about.combine([operands[rank] for rank in about.present], self._room(piece))

    def _await_results(self, batches: list[Batch]) -> list[tuple[int, Arriving]]:
        """Post all receives of results, and list them in the order in which to wait."""
        last = {batch.owner: batch.pieces[-1] for batch in batches}
        coming = []
        for batch in batches:
            for piece in batch.pieces:
                flat = self._room(piece).view(torch.uint8)
                is_last = piece is last[batch.owner]
                arriving = self._exchange.arriving(
                    flat, batch.owner, is_result=True, is_ended=is_last
                )
                coming.append((batch.owner, arriving))
        self._received_from.update(last)
        return coming[::-1]  # backward, as in ``_combine``

    def _send_operands(self, batch: Batch) -> None:
        pieces = batch.of(self._rank)
        for piece in pieces:
            self._send(self._operand(piece), batch.owner, is_ended=piece is pieces[-1])

    def _send_results(self, batch: Batch, *, is_last: bool) -> None:
        for piece in batch.pieces:
            # The receiver waits for the last byte of the last piece; all others arrive before it.
            is_ended = is_last and piece is batch.pieces[-1]
            for peer in self._takers:
                self._send(self._room(piece), peer, is_result=True, is_ended=is_ended)

    def _send(
        self, flat: torch.Tensor, peer: int, *, is_result: bool = False, is_ended: bool
    ) -> None:
        self._sent_to.add(peer)
        self._exchange.send_flat(
            flat.view(torch.uint8), peer, is_result=is_result, is_ended=is_ended
        )

    def _operand(self, piece: Piece) -> torch.Tensor:
        """Return this rank's elements of a piece: its own memory, or a packed copy."""
        if piece.operand is not None:
            return piece.operand
        if piece not in self._packed:
            self._packed[piece] = piece.pack(empty(piece.operand_nbytes))
        return self._packed[piece]

    def _room(self, piece: Piece) -> torch.Tensor:
        """Return where a piece's result goes on this rank."""
        if piece.result is not None:
            return piece.result
        if piece not in self._rooms:
            dtype = piece.about.result_dtype
            self._rooms[piece] = empty(piece.result_nbytes).view(dtype)
        return self._rooms[piece]


# Parts are sent together up to this size, so that small ones do not each cost a transfer. Packing
# takes about three times as much memory.
_BAG_MAX_NBYTES = 64 << 20

# torch allocates device memory in blocks of 2 MiB or more, so this much is available.
_SURELY_THERE_NBYTES = 1 << 20


def reduce_on_device(exchange: Exchange, parts: Iterable[Part]) -> None:
    """Fill in the results of all parts; every rank calls this with matching parts.

    Args:
        exchange: the operation's exchange, which has a device link on every rank.
        parts: in the same order on all ranks, in memory of the link's device; every rank has an
            operand for each.
    """
    for bag in _bags(parts):
        _reduce(exchange, bag)


def _bags(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Group parts of one kind, up to a size limit."""
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
        routes.meet_before_devices(exchange)

    def transfer(path: DevicePath) -> None:
        path.all_to_all(operand.view(torch.uint8), arrived.view(torch.uint8))
        about.combine(arrived.split(share), mine)
        path.all_gather(mine.view(torch.uint8), whole.view(torch.uint8))

    exchange.on_devices(transfer)
    results = [part.result for part in bag if part.result is not None]
    if results:
        sizes = [part.numel for part in bag]
        torch.split_with_sizes_copy(whole[:numel], sizes, out=results)


def _packed(bag: list[Part], numel: int) -> torch.Tensor:
    """Return this rank's operands one after another, padded with zeros to ``numel``."""
    operands = [part.operand for part in bag if part.operand is not None]
    if len(operands) == 1 and operands[0].numel() == numel:
        return operands[0]
    missing = numel - sum(each.numel() for each in operands)
    return torch.cat([*operands, operands[0].new_zeros(missing)])
