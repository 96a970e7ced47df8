"""Large tensors combined element by element; one rank computes each element, all ranks get it.

Each piece of the tensors has an owner. All ranks send it their operands of the piece. It combines
them in rank order and sends the result back (a reduce-scatter, then an all-gather, each directly
from rank to rank). So each element is computed once, in rank order, and is identical on all ranks.
The data is sent without a head, because the ranks have already agreed on it.

If several ranks share a host and all ranks get the result, each piece has an owner on each host.
The first host's owner combines the operands of its host, and the total goes from host to host,
where the other owners continue; the result goes back the same way. The order is the same, and a
network card carries each element once or twice in each direction, and not up to twice for each rank
of its host.

The transfers are objcomm's own, not ``dist.all_reduce``, so that a waiting rank notices when a peer
dies (see ``Transfers.ended``) and two lanes cannot mix.

Tensors on accelerators are combined there, in the same order. Each rank receives one part of every
tensor and sends its result to all (an all-to-all, then an all-gather, both over the device link).
NCCL's own all-reduce would accumulate half precision in half precision, not in rank order, and it
supports fewer dtypes and operators, so a result would depend on the tensor's device. Both
move the same number of bytes.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from objcomm._algorithms import routes, shared_reduction, topology
from objcomm._algorithms.device import DevicePath
from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.parts import Batch, Part, Piece, aligned, batches, nbytes_of
from objcomm._codecs.buffers import empty
from objcomm._wire.message import compose

if TYPE_CHECKING:
    from objcomm._algorithms.transfers import Arriving

# A piece that fits into the processor's cache, and is large enough to make messages cheap. 64 MiB
# among 4 ranks on 2 cores took 228 ms in pieces of 1 MiB, 268 with 4 MiB, and 250 with 512 KiB.
_BATCH_MAX_NBYTES = 1 << 20
# The limit if totals go from host to host, where a batch also waits for the hosts before.
# 8 MiB on two hosts of two ranks, over cards of 200 Mbit/s, 1 Gbit/s and more: 528, 99 and 29 ms;
# with 256 KiB 444, 89 and 34; with 1 MiB 581, 124 and 29. Before there were totals: 793, 149, 28.
_TOTALS_MAX_NBYTES = 512 << 10
# More batches than this are not sent ahead, see ``frames.WAITING_MAX``.
_TOTALS_MAX = 1 << 12
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
    nbytes, groups = nbytes_of(own), [list(range(exchange.size))]
    # A total is kept where the result will be, so it must not need more memory.
    if root is None and all(part.wide == part.result_dtype for part in own):
        groups = topology.reduction_groups(nbytes, exchange.hosts)
    most_nbytes = _BATCH_MAX_NBYTES
    if len(groups) > 1:
        most_nbytes = max(_TOTALS_MAX_NBYTES, aligned(nbytes // _TOTALS_MAX))
    cut = batches(own, exchange.size, most_nbytes)
    if cut:
        _Run(exchange, cut, root, groups).run()


@dataclass(frozen=True, slots=True)
class _Way:
    """How one batch is combined, as seen from one group of ranks.

    Attributes:
        batch: the batch.
        before: the owner in the group before this one; None if this is the first.
        owner: the owner in this group, which combines the group's operands.
        after: the owner in the next group; None if this is the last.
    """

    batch: Batch
    before: int | None
    owner: int
    after: int | None


class _Run:
    """One reduction, as seen by this rank."""

    def __init__(
        self,
        exchange: Exchange,
        batches: list[Batch],
        root: int | None,
        groups: Sequence[Sequence[int]],
    ) -> None:
        self._exchange = exchange
        self._rank = rank = exchange.rank
        at = next(at for at, group in enumerate(groups) if rank in group)
        self._group = group = groups[at]
        # Each rank starts with a different peer, so that they do not all send to one first.
        place = group.index(rank)
        self._others = [*group[place + 1 :], *group[:place]]
        self._is_taker = root in {None, rank}
        self._takers = [peer for peer in self._others if root in {None, peer}]
        ways = []
        for number, batch in enumerate(batches):
            owners = [each[number % len(each)] for each in groups]
            before, after = [None, *owners][at], [*owners, None][at + 1]
            ways.append(_Way(batch, before, owners[at], after))
        self._mine = [way for way in ways if way.owner == rank]
        self._theirs = [way for way in ways if way.owner != rank]
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        self._arriving: dict[Piece, list[tuple[int, Arriving]]] = {}
        self._coming: dict[Piece, tuple[int, Arriving]] = {}
        self._packed: dict[Piece, torch.Tensor] = {}
        self._rooms: dict[Piece, torch.Tensor] = {}
        self._sent_to: set[int] = set()
        self._received_from: set[int] = set()

    def run(self) -> None:
        """See ``reduce_tensors``."""
        mine = self._mine
        for at, way in enumerate(mine[:_AHEAD]):
            self._await_operands(way, at)
        self._await_results()
        for way in self._theirs:
            self._send_operands(way)
        for at, way in enumerate(mine):
            self._combine(way)
            if at + _AHEAD < len(mine):
                self._await_operands(mine[at + _AHEAD], at)
            if way.after is None:
                self._send_results(way)
        # Only now: a wait for results in between would delay totals for which other hosts wait.
        for way in [way for way in mine if way.after is not None]:
            self._take(way.batch.pieces)
            self._send_results(way)
        if self._is_taker:
            self._take([piece for way in self._theirs for piece in way.batch.pieces])
        self._end()

    def _end(self) -> None:
        """Put packed results where they belong; return once all ranks have theirs."""
        for piece, room in self._rooms.items():
            piece.unpack(room)
        if len(self._group) == self._exchange.size:
            self._exchange.confirm(self._received_from, self._sent_to)
        else:  # no rank may return if one that it has sent nothing to fails
            routes.all_meet(self._exchange, compose(self._exchange.header, b""))

    def _await_operands(self, way: _Way, at: int) -> None:
        """Post the receives of what one of this rank's own batches is combined from."""
        batch = way.batch
        for peer in self._others:
            pieces = batch.of(peer)
            self._await(pieces, peer, at, [piece.operand_nbytes for piece in pieces])
        if way.before is not None:
            # Those for which a rank of an earlier group has an operand.
            pieces = [each for each in batch.pieces if each.about.present[0] < self._group[0]]
            self._await(pieces, way.before, at, [piece.result_nbytes for piece in pieces])

    def _await(self, pieces: list[Piece], peer: int, at: int, nbytes: list[int]) -> None:
        if not pieces:
            return
        for piece, flat in zip(pieces, self._slots(at % _AHEAD, peer, nbytes), strict=True):
            arriving = self._exchange.arriving(flat, peer, is_ended=piece is pieces[-1])
            self._arriving.setdefault(piece, []).append((peer, arriving))
            self._received_from.add(peer)

    def _slots(self, row: int, peer: int, nbytes: list[int]) -> list[torch.Tensor]:
        """Return memory for what one rank sends, reused ``_AHEAD`` batches later."""
        ends = list(itertools.accumulate(map(aligned, nbytes)))
        memory = self._memory.get((row, peer))
        if memory is None or memory.numel() < ends[-1]:
            memory = self._memory[row, peer] = empty(ends[-1])
        return [
            memory[end - aligned(each) :][:each] for each, end in zip(nbytes, ends, strict=True)
        ]

    def _combine(self, way: _Way) -> None:
        batch = way.batch
        # The last piece first: once it has arrived, so have all earlier ones, completely.
        for piece in reversed(batch.pieces):
            for peer, arriving in self._arriving.get(piece, ()):
                arriving.wait(peer)
        going = [piece for piece in batch.pieces if piece.about.present[0] <= self._group[-1]]
        for piece in going:
            about = piece.about
            arrived = {peer: each.flat for peer, each in self._arriving.pop(piece, ())}
            total = arrived.pop(way.before, None) if way.before is not None else None
            operands = {peer: flat.view(about.dtype) for peer, flat in arrived.items()}
            if self._rank in about.present:
                operands[self._rank] = self._operand(piece)
            about.combine(
                [operands[rank] for rank in self._group if rank in operands],
                self._room(piece),
                total=None if total is None else total.view(about.result_dtype),
                count=len(about.present),
                is_over=way.after is None,
            )
            if way.after is not None:  # the result comes only when all of this total has arrived
                self._send(self._room(piece), way.after, is_ended=piece is going[-1])

    def _await_results(self) -> None:
        """Post all receives of results, in the order in which each rank sends them."""
        last = {way.owner: way.batch.pieces[-1] for way in self._theirs}
        for way in self._theirs if self._is_taker else ():
            for piece in way.batch.pieces:
                self._await_result(piece, way.owner, is_ended=piece is last[way.owner])
        for way in self._mine:
            if way.after is not None:
                for piece in way.batch.pieces:
                    self._await_result(piece, way.after, is_ended=piece is way.batch.pieces[-1])

    def _await_result(self, piece: Piece, peer: int, *, is_ended: bool) -> None:
        flat = self._room(piece).view(torch.uint8)
        arriving = self._exchange.arriving(flat, peer, is_result=True, is_ended=is_ended)
        self._coming[piece] = peer, arriving
        self._received_from.add(peer)

    def _take(self, pieces: Sequence[Piece]) -> None:
        """Wait for the results of pieces; backward, as in ``_combine``."""
        for piece in reversed(pieces):
            peer, arriving = self._coming[piece]
            arriving.wait(peer)

    def _send_operands(self, way: _Way) -> None:
        pieces = way.batch.of(self._rank)
        for piece in pieces:
            self._send(self._operand(piece), way.owner, is_ended=piece is pieces[-1])

    def _send_results(self, way: _Way) -> None:
        """Send the results of one of this rank's own batches, or pass them on."""
        pieces = way.batch.pieces
        for piece in pieces:
            is_last = piece is pieces[-1]
            # The receiver waits for the last byte of the last piece; all others arrive before it.
            is_ended = is_last and way is self._mine[-1]
            for peer in self._takers:
                self._send(self._room(piece), peer, is_result=True, is_ended=is_ended)
            if way.before is not None:
                self._send(self._room(piece), way.before, is_result=True, is_ended=is_last)

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
