"""What tensors a rank has to change in place, as text, and where two ranks' differ.

Knows tensors; knows no messages, and nothing of how tensors are combined.
"""

import enum
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from objcomm import elementwise
from objcomm.codecs.tensors import dtype_name, is_plain_tensor
from objcomm.errors import UsageError
from objcomm.memory import COPIED_MAX_NBYTES
from objcomm.structures import DifferenceError

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}


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


class Kind(NamedTuple):
    """What some tensors have in common.

    Attributes:
        text: all that must agree of a tensor besides its name.
        rule: what becomes of it; those without fractions are shared.
        lot: a name of those that may travel as one.
        device_type: where it lies.
        nbytes: of all its elements.
    """

    text: str
    rule: Rule
    lot: str
    device_type: str
    nbytes: int


class Manifest(NamedTuple):
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


def manifest_of(bundles: Sequence[Bundle], linked: str) -> tuple[Manifest, list[Kind]]:
    """This rank's, and the kind of each tensor.

    Raises:
        UsageError: a tensor can't be changed in place; names it.
    """
    kinds: list[Kind] = []
    lines: list[str] = []
    for bundle in bundles:
        found = _kinds(bundle)
        texts = [kind.text for kind in found]
        _mark_repeated(bundle, found, texts)
        kinds += found
        lines += [f"{name}\0{text}" for name, text in zip(bundle.names, texts, strict=True)]
    present = bytes([tensor is not None for bundle in bundles for tensor in bundle.tensors])
    return Manifest(lines, present, linked), kinds


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


# All tensors are asked one thing after another, and looked at one by one only where something is
# wrong: a loop over 1,000 of them that asks each for everything takes as long as their transfer.


def _kinds(bundle: Bundle) -> list[Kind]:
    rule, names, likes, tensors = bundle
    _check_plain(names, likes, "")
    keys = [(each.dtype, each.shape, each.device) for each in likes]
    firsts = dict(zip(keys, range(len(keys)), strict=True))
    found = {key: _kind(rule, names[at], at, likes[at]) for key, at in firsts.items()}
    if tensors is not likes:
        _check_gradients(names, likes, tensors)
    what = "" if tensors is likes else "the gradient of "
    for at, each in enumerate(tensors):
        if each is None or (each.is_contiguous() and each.data_ptr()):
            continue
        if torch._debug_has_internal_overlap(each) == 1:  # noqa: SLF001  # no public way
            raise UsageError(
                f"{what}{_label(names[at], at)} is expanded: several of its elements are one. "
                "Give its clone()"
            )
        if each.numel() and not each.data_ptr():
            raise UsageError(f"{what}{_label(names[at], at)} has no memory: somebody has freed it")
    return [found[key] for key in keys]


def _check_plain(names: Sequence[str], tensors: Sequence[torch.Tensor], what: str) -> None:
    kinds = set(map(type, tensors))
    if kinds <= _PLAIN_TYPES and {each.layout for each in tensors} <= {torch.strided}:
        return
    at = next(at for at, each in enumerate(tensors) if not is_plain_tensor(each))
    found = tensors[at]
    layout = f" of {getattr(found, 'layout', 'no layout')}"
    raise UsageError(
        f"{what}{_label(names[at], at)} is a {type(found).__name__}{layout}; only dense tensors "
        "of no subclass change in place"
    )


def _check_gradients(
    names: Sequence[str], likes: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]
) -> None:
    places = [at for at, each in enumerate(tensors) if each is not None]
    owned = [each for each in tensors if each is not None]
    _check_plain([names[at] for at in places], owned, "the gradient of ")
    dtypes = [likes[at].dtype for at in places]
    if [each.dtype for each in owned] != dtypes:  # torch sees to shapes and devices
        at = next(at for at, own in zip(places, owned, strict=True) if own.dtype != likes[at].dtype)
        raise UsageError(f"the gradient of {_label(names[at], at)} has another dtype than it")


def _kind(rule: Rule, name: str, at: int, like: torch.Tensor) -> Kind:
    if like.is_meta or like.is_quantized:
        what = "a meta tensor" if like.is_meta else "quantized"
        raise UsageError(f"{_label(name, at)} is {what}, and can't be changed in place")
    dtype, device_type = dtype_name(like.dtype), like.device.type
    where = "" if device_type == "cpu" else f" on {device_type}"
    text = f"{dtype} of shape {tuple(like.shape)}{where}, {rule.value}"
    is_fraction = like.is_floating_point() or like.is_complex()
    kept = rule if is_fraction and like.dtype in elementwise.DTYPES else Rule.SHARE
    return Kind(text, kept, f"{kept.name} {dtype} {device_type}", device_type, like.nbytes)


def _mark_repeated(bundle: Bundle, kinds: Sequence[Kind], texts: list[str]) -> None:
    """Say of each large tensor whether it is one that stands further ahead.

    A gradient that this rank lacks is its parameter's: another rank may have it.
    """
    places: dict[tuple[bool, int], int] = {}
    for at, (kind, tensor) in enumerate(zip(kinds, bundle.tensors, strict=True)):
        if kind.nbytes > COPIED_MAX_NBYTES:
            lacking = tensor is None
            key = id(bundle.likes[at]) if tensor is None else tensor.data_ptr()
            first = places.setdefault((lacking, key), at)
            if first != at:
                texts[at] += f"\0{first}"


def _label(name: str, at: int) -> str:
    return repr(name) if name else f"tensor {at}"
