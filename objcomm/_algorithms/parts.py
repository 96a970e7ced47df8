"""Tensors that ranks combine element by element, cut into pieces; one rank computes each piece.

Every rank cuts the same way, based on what all ranks agreed on.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from objcomm._codecs.buffers import COPIED_MAX_NBYTES

# Fewer bytes are not worth a separate owner.
_BATCH_MIN_NBYTES = 256 << 10
# Less space than this at the end of a batch is not worth cutting the next part for.
_CUT_MIN_NBYTES = 16 << 10
# With this many batches, an owner combines one while the next arrives. 4 MiB among 2 and 4
# ranks on 2 cores took 10.2 and 22.8 ms with 2 batches, 12.1 and 24.5 with 4, 10.2 and 20.2 with 1.
_BATCHES_FOR_EACH_OWNER = 2

_ALIGNMENT = 64


class Combine(Protocol):
    """Combines tensors element by element, in rank order: all together, or after a total."""

    def __call__(
        self,
        operands: Sequence[torch.Tensor],
        into: torch.Tensor,
        *,
        total: torch.Tensor | None = None,
        count: int = 0,
        is_over: bool = True,
    ) -> None:
        """Combine the operands of some ranks.

        Args:
            operands: flat, of equal length, one for each rank; not modified.
            into: receives the result, or the total so far. It may be an operand if the operator is
                a mean.
            total: the total of all lower ranks; None if there are none.
            count: number of operands of all ranks; 0 if these are all of them.
            is_over: whether these are the last ones.
        """


class Part(NamedTuple):
    """One of this rank's tensors in a reduction.

    Attributes:
        operand: flat and contiguous in memory; None if this rank has none.
        result: flat and contiguous; None on a rank that gets no result.
        dtype: dtype of the operand on all ranks.
        result_dtype: dtype of the result.
        wide: dtype in which operands are accumulated.
        numel: number of elements.
        present: the ranks that have an operand, in order; at least one.
        combine: computes the result's elements from those of ``present``.
        kind: parts of the same kind may share a piece; they agree in everything but numel.
    """

    operand: torch.Tensor | None
    result: torch.Tensor | None
    dtype: torch.dtype
    result_dtype: torch.dtype
    wide: torch.dtype
    numel: int
    present: tuple[int, ...]
    combine: Combine
    kind: object


@dataclass(slots=True, eq=False)
class Piece:
    """Adjacent elements that are sent together; all ranks have the same pieces.

    Attributes:
        spans: parts, each with the start and stop of its elements within the part.
        numel: number of elements of all spans.
    """

    spans: list[tuple[Part, int, int]]
    numel: int

    @property
    def about(self) -> Part:
        """One of its parts, all of which agree in dtype, operator and ranks."""
        return self.spans[0][0]

    @property
    def operand_nbytes(self) -> int:
        """Bytes of one rank's operand."""
        return self.numel * self.about.dtype.itemsize

    @property
    def result_nbytes(self) -> int:
        """Bytes of the result."""
        return self.numel * self.about.result_dtype.itemsize

    @property
    def room_nbytes(self) -> int:
        """Space for an operand or a result, rounded up for alignment."""
        return aligned(max(self.operand_nbytes, self.result_nbytes))

    @property
    def operand(self) -> torch.Tensor | None:
        """This rank's elements if they are contiguous; None if they must be packed."""
        part, start, stop = self.spans[0]
        return None if len(self.spans) > 1 or part.operand is None else part.operand[start:stop]

    @property
    def result(self) -> torch.Tensor | None:
        """Where the result goes; None if it must be unpacked, or is not wanted here."""
        part, start, stop = self.spans[0]
        return None if len(self.spans) > 1 or part.result is None else part.result[start:stop]

    def pack(self, into: torch.Tensor) -> torch.Tensor:
        """Copy this rank's elements to the start of ``into``, and return them there."""
        packed = into[: self.operand_nbytes].view(self.about.dtype)
        # A rank has operands for all parts of a piece, or for none.
        operands = [
            part.operand[start:stop] for part, start, stop in self.spans if part.operand is not None
        ]
        if len(operands) == 1:
            copy(operands[0], packed)
        elif operands:
            torch.cat(operands, out=packed)
        return packed

    def unpack(self, packed: torch.Tensor) -> None:
        """Copy the result to where this rank wants it, if it wants it."""
        results = [
            part.result[start:stop] for part, start, stop in self.spans if part.result is not None
        ]
        if len(results) == 1:
            copy(packed, results[0])
        elif results:
            sizes = [stop - start for _, start, stop in self.spans]
            torch.split_with_sizes_copy(packed, sizes, out=results)


class Batch(NamedTuple):
    """Pieces that a rank combines together, because each wait costs a message."""

    owner: int
    pieces: list[Piece]

    def of(self, rank: int) -> list[Piece]:
        """Return the pieces for which ``rank`` has operands."""
        return [piece for piece in self.pieces if rank in piece.about.present]


def nbytes_of(parts: Sequence[Part]) -> int:
    """Return the bytes of all of one rank's operands."""
    return sum(part.numel * part.dtype.itemsize for part in parts)


def batches(parts: Sequence[Part], size: int, most_nbytes: int) -> list[Batch]:
    """Group adjacent pieces into batches; the ranks own them in rotation.

    Args:
        parts: in the same order on all ranks.
        size: number of ranks.
        most_nbytes: limit for the operands of a batch, and for its results; a multiple of 64.
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
    """Return the bytes of an element of the operand or the result, whichever is larger."""
    return max(part.dtype.itemsize, part.result_dtype.itemsize)


def _room_nbytes(part: Part) -> int:
    return part.numel * _itemsize(part)


def _bags(parts: Sequence[Part], limit: int) -> list[Piece]:
    """Group small parts of the same kind."""
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
    """Round a number of bytes up to a multiple of the alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
