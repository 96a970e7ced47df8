"""Tensors that ranks combine element by element, cut into pieces: one rank computes each.

Every rank cuts the same way, from what the ranks have agreed on.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from objcomm._codecs.buffers import COPIED_MAX_NBYTES

# Less is not worth an owner of its own.
_BATCH_MIN_NBYTES = 256 << 10
# Nor is less at the end of a batch worth a piece of what follows.
_CUT_MIN_NBYTES = 16 << 10
# So many batches for each owner let it combine one while the next arrives. 4 MiB among 2 and 4
# ranks on 2 cores: with 2 pieces 10.2 and 22.8 ms, with 4 12.1 and 24.5, with 1 10.2 and 20.2.
_BATCHES_FOR_EACH_OWNER = 2

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


@dataclass(slots=True, eq=False)
class Piece:
    """Neighbouring elements that travel as one; the same picture on all ranks.

    Attributes:
        spans: parts, each with where its elements begin and end there.
        numel: elements of all of them.
    """

    spans: list[tuple[Part, int, int]]
    numel: int

    @property
    def about(self) -> Part:
        """Any of its parts, which agree in dtype, operator and ranks."""
        return self.spans[0][0]

    @property
    def operand_nbytes(self) -> int:
        """Of one rank's operand."""
        return self.numel * self.about.dtype.itemsize

    @property
    def result_nbytes(self) -> int:
        """Of the result."""
        return self.numel * self.about.result_dtype.itemsize

    @property
    def room_nbytes(self) -> int:
        """Enough for either, so that what follows is aligned."""
        return aligned(max(self.operand_nbytes, self.result_nbytes))

    @property
    def operand(self) -> torch.Tensor | None:
        """This rank's elements where they lie together; None if they are to be packed."""
        part, start, stop = self.spans[0]
        return None if len(self.spans) > 1 or part.operand is None else part.operand[start:stop]

    @property
    def result(self) -> torch.Tensor | None:
        """The result's place, if it is one; None if it is to be unpacked, or not wanted here."""
        part, start, stop = self.spans[0]
        return None if len(self.spans) > 1 or part.result is None else part.result[start:stop]

    def pack(self, into: torch.Tensor) -> torch.Tensor:
        """Copy this rank's elements into memory that is as long or longer; they are given there."""
        packed = into[: self.operand_nbytes].view(self.about.dtype)
        # A rank has an operand of all parts of a piece, or of none.
        operands = [
            part.operand[start:stop] for part, start, stop in self.spans if part.operand is not None
        ]
        if len(operands) == 1:
            copy(operands[0], packed)
        elif operands:
            torch.cat(operands, out=packed)
        return packed

    def unpack(self, packed: torch.Tensor) -> None:
        """Copy the result to where this rank wants it, if it does."""
        results = [
            part.result[start:stop] for part, start, stop in self.spans if part.result is not None
        ]
        if len(results) == 1:
            copy(packed, results[0])
        elif results:
            sizes = [stop - start for _, start, stop in self.spans]
            torch.split_with_sizes_copy(packed, sizes, out=results)


class Batch(NamedTuple):
    """Pieces that a rank combines together, because each wait costs a message of its own."""

    owner: int
    pieces: list[Piece]

    def of(self, rank: int) -> list[Piece]:
        """The pieces that ``rank`` has operands of."""
        return [piece for piece in self.pieces if rank in piece.about.present]


def nbytes_of(parts: Sequence[Part]) -> int:
    """How long one rank's operands are together."""
    return sum(part.numel * part.dtype.itemsize for part in parts)


def batches(parts: Sequence[Part], size: int, most_nbytes: int) -> list[Batch]:
    """Neighbouring pieces together, and each batch's owner in turn.

    Args:
        parts: in the same order on all ranks.
        size: number of ranks.
        most_nbytes: what the operands of a batch need at most, and so do its results; a multiple
            of 64.
    """
    fair = aligned(-(-nbytes_of(parts) // (size * _BATCHES_FOR_EACH_OWNER)))
    limit = min(max(fair, _BATCH_MIN_NBYTES), most_nbytes)
    found: list[Batch] = []
    room_nbytes = 0

    def place(piece: Piece) -> None:
        nonlocal room_nbytes
        found[-1].pieces.append(piece)
        room_nbytes -= piece.room_nbytes

    def begin() -> None:
        nonlocal room_nbytes
        found.append(Batch(len(found) % size, []))
        room_nbytes = limit

    copied = min(COPIED_MAX_NBYTES, limit)
    small = [part for part in parts if _room_nbytes(part) <= copied]
    for bag in _bags(small, limit):
        if bag.room_nbytes > room_nbytes:
            begin()
        place(bag)
    for part in parts:
        start = 0 if _room_nbytes(part) > copied else part.numel
        while start < part.numel:
            if room_nbytes < _CUT_MIN_NBYTES:
                begin()
            stop = min(part.numel, start + room_nbytes // _itemsize(part))
            place(Piece([(part, start, stop)], stop - start))
            start = stop
    return found


def _itemsize(part: Part) -> int:
    """Bytes of an element, of the operand or of the result."""
    return max(part.dtype.itemsize, part.result_dtype.itemsize)


def _room_nbytes(part: Part) -> int:
    return part.numel * _itemsize(part)


def _bags(parts: Sequence[Part], limit: int) -> list[Piece]:
    """Small parts of the same kind together."""
    bags: list[Piece] = []
    open_bags: dict[object, Piece] = {}
    for part in parts:
        bag = open_bags.get(part.kind)
        if bag is None or (bag.numel + part.numel) * _itemsize(part) > limit:
            bag = open_bags[part.kind] = Piece([], 0)
            bags.append(bag)
        bag.spans.append((part, 0, part.numel))
        bag.numel += part.numel
    return [bag for bag in bags if bag.numel]


def copy(flat: torch.Tensor, into: torch.Tensor) -> None:
    """Copy bytes on the calling thread alone; torch's own copies may start threads."""
    ctypes.memmove(into.data_ptr(), flat.data_ptr(), flat.nbytes)


def aligned(nbytes: int) -> int:
    """So many bytes or some more, so that what follows is aligned."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
