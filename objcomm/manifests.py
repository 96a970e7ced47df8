"""What tensors a rank has to change in place, as text, and where two ranks' differ.

Knows tensors; knows no messages, and nothing of how tensors are combined.
"""

import enum
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from objcomm.codecs.tensors import dtype_name, is_plain_tensor
from objcomm.errors import UsageError
from objcomm.structures import DifferenceError

#: Larger tensors in CPU memory travel from their own memory: copying them costs more than messages.
SMALL_MAX_NBYTES = 120 << 10


class Rule(enum.Enum):
    """What becomes of tensors."""

    SHARE = "shared"  # the root's
    AVERAGE = "averaged"  # added up in float64: equal tensors stay equal, bit by bit
    GRADIENTS = "averaged as gradients"  # as DistributedDataParallel does


class Bundle(NamedTuple):
    """Tensors of one rule.

    Attributes:
        rule: what becomes of them.
        names: for errors; empty texts where they have none.
        likes: one tensor for each, which tells dtype, shape and device.
        tensors: what changes; None for a gradient that this rank does not have.
    """

    rule: Rule
    names: Sequence[str]
    likes: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that ranks must agree on before anything moves.

    Attributes:
        lines: a text for each tensor of each bundle, in order: its name, and what it is.
        present: for each, whether this rank has it.
        linked: the type of device that this rank's device link joins; empty if there is none.
    """

    lines: Sequence[str]
    present: bytes
    linked: str

    @property
    def digest(self) -> bytes:
        """Equal on two ranks if all else is."""
        text = "\n".join(self.lines).encode("utf-8", "surrogatepass")
        tail = b"\0" + self.present + b"\0" + self.linked.encode()
        return hashlib.blake2b(text + tail, digest_size=16).digest()


def manifest_of(bundles: Sequence[Bundle], linked: str) -> Manifest:
    """This rank's.

    Raises:
        UsageError: a tensor can't be changed in place; names it.
    """
    lines = [line for bundle in bundles for line in _lines(bundle)]
    present = bytes(tensor is not None for bundle in bundles for tensor in bundle.tensors)
    return Manifest(lines, present, linked)


def merged(manifests: Sequence[Manifest]) -> Manifest:
    """What holds for all ranks: what any of them has, and a device link if all have it.

    Args:
        manifests: one per rank, in rank order.

    Raises:
        DifferenceError: they have other tensors; names the first.
    """
    first = manifests[0]
    for rank, other in enumerate(manifests):
        _compare(first.lines, other.lines, rank)
    present = bytes(map(max, *(each.present for each in manifests)))
    linked = {each.linked for each in manifests}
    return Manifest(first.lines, present, linked.pop() if len(linked) == 1 else "")


def _compare(first: Sequence[str], other: Sequence[str], rank: int) -> None:
    for at, (ours, theirs) in enumerate(zip(first, other, strict=False)):
        if ours != theirs:
            (our_name, our_kind), (name, kind) = _parts(ours), _parts(theirs)
            if our_name == name:
                raise DifferenceError(_label(name, at), (0, rank), f"{our_kind}; and {kind}")
            reason = f"{_label(our_name, at)} ({our_kind}); and {_label(name, at)} ({kind})"
            raise DifferenceError(f"tensor {at}", (0, rank), reason)
    if len(first) != len(other):
        at = min(len(first), len(other))
        lacking = rank if len(first) > at else 0
        name, kind = _parts((first if len(first) > at else other)[at])
        reason = f"{len(first)}; and {len(other)}. Rank {lacking} lacks {_label(name, at)} ({kind})"
        raise DifferenceError("the number of tensors", (0, rank), reason)


def _parts(line: str) -> tuple[str, str]:
    name, _, kind = line.partition("\0")
    return name, kind.replace("\0", ", the same memory as tensor ")


def is_repeated(line: str) -> bool:
    """Whether a tensor is one that stands further ahead, too."""
    return line.count("\0") > 1


def _lines(bundle: Bundle) -> Iterator[str]:
    kinds: dict[Any, str] = {}
    places: dict[int, int] = {}
    rows = zip(bundle.names, bundle.likes, bundle.tensors, strict=True)
    for at, (name, like, tensor) in enumerate(rows):
        key = (type(like), like.layout, like.dtype, like.shape, like.device)
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _kind_of(bundle.rule, name, at, like)
        if tensor is not None:
            if tensor is not like:
                _check_gradient(name, at, tensor, like)
            if not tensor.is_contiguous():
                _check_expansion(name, at, tensor)
            if tensor.nbytes > SMALL_MAX_NBYTES:
                first = places.setdefault(tensor.data_ptr(), at)
                kind = kind if first == at else f"{kind}\0{first}"
        yield f"{name}\0{kind}"


def _kind_of(rule: Rule, name: str, at: int, like: torch.Tensor) -> str:
    if not is_plain_tensor(like) or like.is_meta:
        raise UsageError(_refusal(name, at, like))
    where = "" if like.device.type == "cpu" else f" on {like.device.type}"
    return f"{dtype_name(like.dtype)} of shape {tuple(like.shape)}{where}, {rule.value}"


def _check_gradient(name: str, at: int, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if not is_plain_tensor(tensor):
        raise UsageError(f"the gradient of {_refusal(name, at, tensor)}")
    if (tensor.dtype, tensor.device) != (like.dtype, like.device):
        raise UsageError(f"the gradient of {_label(name, at)} has its own dtype or device")


def _check_expansion(name: str, at: int, tensor: torch.Tensor) -> None:
    if torch._debug_has_internal_overlap(tensor) == 1:  # noqa: SLF001  # no public way to ask
        raise UsageError(
            f"{_label(name, at)} is expanded: several of its elements are one. Give its clone()"
        )


def _refusal(name: str, at: int, tensor: torch.Tensor) -> str:
    kind = "meta tensor" if tensor.is_meta else f"{type(tensor).__name__} of {tensor.layout}"
    return f"{_label(name, at)} is a {kind}; only dense tensors with memory change in place"


def _label(name: str, at: int) -> str:
    return repr(name) if name else f"tensor {at}"
