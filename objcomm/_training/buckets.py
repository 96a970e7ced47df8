"""Share or average tensors on all ranks, in place and in few transfers.

The ranks first compare digests of their manifests. If the digests differ, one rank reads all
manifests; it reports the first difference in the tensors, or merges the manifests if the ranks
differ only in which gradients and device links they have. No tensor moves before then. After
that, small tensors of one dtype travel together, and large ones are sent from and received into
their own memory.
"""

import enum
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import increment_version

from objcomm._algorithms import routes, tensor_reduction
from objcomm._algorithms.device import DevicePath
from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.parts import Combine, Part
from objcomm._algorithms.tensor_reduction import reduce_on_device
from objcomm._calls.call import Call
from objcomm._codecs.buffers import COPIED_MAX_NBYTES
from objcomm._codecs.tensors import dtype_name, is_plain_tensor
from objcomm._collectives.gather import answered
from objcomm._collectives.reduction import operators
from objcomm._wire.failure_message import DifferenceError
from objcomm._wire.message import Message
from objcomm.errors import UsageError

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
_HOST = torch.device("cpu")


class Rule(enum.Enum):
    """What to do with tensors."""

    SHARE = "shared"  # every rank gets the root's
    AVERAGE = "averaged"  # summed in float64, so the mean of equal tensors has the same bits
    GRADIENTS = "averaged as gradients"  # as DistributedDataParallel does


_Flat: TypeAlias = tuple[Rule, torch.Tensor]  # a bucket's rule, and its elements
_Carrier: TypeAlias = Callable[[Call, Exchange, Sequence[_Flat]], None]


class Bundle(NamedTuple):
    """Tensors to which one rule applies.

    Attributes:
        rule: what to do with them.
        names: for errors; an empty string for a tensor without a name.
        likes: for each, a tensor of the same dtype, shape and device.
        tensors: the tensors to change; None for a gradient that this rank does not have.
    """

    rule: Rule
    names: Sequence[str]
    likes: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor | None]


class TensorGroup(NamedTuple):
    """The properties that some tensors have in common.

    Attributes:
        text: everything besides the name that must be the same on all ranks.
        rule: what to do with each; dtypes that have no mean are shared.
        lot: a key that is equal for tensors that may travel together.
        device_type: the type of device that each is on.
        nbytes: the size of each.
    """

    text: str
    rule: Rule
    lot: str
    device_type: str
    nbytes: int


class Manifest(NamedTuple):
    """Everything that ranks must agree on before any tensor moves.

    Attributes:
        lines: one string for each tensor of each bundle, in order: its name and description.
        present: one byte for each tensor: whether this rank has it.
        linked: the device types that this rank's device links join, separated by commas; may be
            empty.
    """

    lines: Sequence[str]
    present: bytes
    linked: str

    @property
    def digest(self) -> bytes:
        """A hash of all fields."""
        text = "\n".join(self.lines).encode("utf-8", "surrogatepass")
        tail = b"\0" + self.present + b"\0" + self.linked.encode()
        return hashlib.blake2b(text + tail, digest_size=16).digest()


def manifest_of(bundles: Sequence[Bundle], linked: str) -> tuple[Manifest, list[TensorGroup]]:
    """Return this rank's manifest, and the kind of each tensor.

    Raises:
        UsageError: a tensor can't be changed in place. The error names it.
    """
    kinds: list[TensorGroup] = []
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
    """Merge the ranks' manifests.

    A tensor is present if any rank has it. Device links count if they are the same on all ranks.

    Args:
        manifests: one per rank, in rank order.

    Raises:
        DifferenceError: the ranks have different tensors. The error names the first difference.
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
    """Whether a tensor shares its memory with an earlier one, given its line in a manifest."""
    return line.count("\0") > 1


# Each check covers all tensors in one pass, and single tensors are examined only if it fails. One
# loop that checks everything about each of 1,000 tensors takes as long as their transfer.


def _kinds(bundle: Bundle) -> list[TensorGroup]:
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
                f"{what}{_label(names[at], at)} is expanded: several of its elements share "
                "memory; pass its clone()"
            )
        if each.numel() and not each.data_ptr():
            raise UsageError(f"{what}{_label(names[at], at)} has no memory: its storage was freed")
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
    if [each.dtype for each in owned] != dtypes:  # torch checks shapes and devices
        at = next(at for at, own in zip(places, owned, strict=True) if own.dtype != likes[at].dtype)
        raise UsageError(f"{_label(names[at], at)} and its gradient have different dtypes")


def _kind(rule: Rule, name: str, at: int, like: torch.Tensor) -> TensorGroup:
    if like.is_meta or like.is_quantized:
        what = "a meta tensor" if like.is_meta else "quantized"
        raise UsageError(f"{_label(name, at)} is {what}, and can't be changed in place")
    dtype, device_type = dtype_name(like.dtype), like.device.type
    where = "" if device_type == "cpu" else f" on {device_type}"
    text = f"{dtype} of shape {tuple(like.shape)}{where}, {rule.value}"
    is_fraction = like.is_floating_point() or like.is_complex()
    kept = rule if is_fraction and like.dtype in operators.DTYPES else Rule.SHARE
    return TensorGroup(text, kept, f"{kept.name} {dtype} {device_type}", device_type, like.nbytes)


def _mark_repeated(bundle: Bundle, kinds: Sequence[TensorGroup], texts: list[str]) -> None:
    """Mark each large tensor that shares its memory with an earlier one.

    A gradient that this rank lacks is identified by its parameter: another rank may have it.
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


# Packing needs extra memory: for one bucket at a time over a device link, for all buckets at the
# same time in CPU memory.
_BUCKET_MAX_NBYTES = 32 << 20


def synchronise(call: Call, make: Callable[[], Sequence[Bundle]], *, moves: bool = True) -> None:
    """Synchronize all tensors of all bundles, in place.

    Args:
        call: the call, already entered; its root's tensors are the ones that are shared.
        make: returns the bundles, in the same order on all ranks; if it raises, this rank fails.
        moves: whether to change the tensors; if not, the ranks only compare what they have.
    """
    if call.is_alone:
        call.alone(lambda: manifest_of(make(), ""))
        return
    bundles: Sequence[Bundle] = ()
    kinds: Sequence[TensorGroup] = ()
    own = Manifest((), b"", "")

    def digest(make: Callable[[], Sequence[Bundle]]) -> bytes:
        nonlocal bundles, kinds, own
        bundles = call.aside(make)
        own, kinds = manifest_of(bundles, call.exchange.device.linked)
        return own.digest

    mine = call.message(make, digest)
    made: dict[int, torch.Tensor] = {}
    # One exchange for all steps: a rank that runs out of memory must report that to the others.
    with call.exchange as exchange:
        outcomes, manifest = _agreed(call, exchange, mine, own)
        if moves and manifest is not None:
            with torch.inference_mode(mode=False):  # for tensors that autograd can use
                buckets = _buckets(bundles, manifest, kinds, made)
            # Inference tensors can be changed only in inference mode, where nothing is traced.
            with torch.inference_mode():
                _move(call, exchange, buckets, manifest.linked)
    call.raise_failures(outcomes)
    likes = [like for bundle in bundles for like in bundle.likes]
    for at, gradient in made.items():
        likes[at].grad = gradient


def _agreed(
    call: Call, exchange: Exchange, digest: Message, own: Manifest
) -> tuple[Sequence[Message], Manifest | None]:
    """Compare what the ranks have, and return the manifest that holds for all of them.

    If they have different tensors, or some rank's can't be changed, the manifest is None, and the
    messages returned with it say what is wrong.
    """
    messages = routes.all_gather(exchange, digest)
    if call.failures(messages) is not None:
        return messages, None
    read = partial(call.decode_as, fits=lambda plain: type(plain) is bytes, what="digest")
    if len(set(map(read, messages))) == 1:
        return (), own

    def merge(messages: Sequence[Message]) -> tuple[bytes, str]:
        what = "description of tensors"
        found = merged([Manifest(*call.decode_as(each, _is_manifest, what)) for each in messages])
        return found.present, found.linked

    def is_merged(plain: Any) -> bool:
        return isinstance(plain, (tuple, list)) and _is_manifest([own.lines, *plain])

    message = answered(call, exchange, call.message(tuple(own)), merge)
    if call.failures([message]) is not None:
        return [message], None
    return (), Manifest(
        own.lines, *call.decode_as(message, is_merged, "a merged description of tensors")
    )


def _is_manifest(plain: Any) -> bool:
    """Whether a received value consists of the fields of a ``Manifest``."""
    match plain:
        case [list(lines), bytes(present), str()]:
            are_flags = len(present) == len(lines) and set(present) <= {False, True}
            return are_flags and all(type(line) is str for line in lines)
    return False


def _is_like(flat: torch.Tensor, plain: Any) -> bool:
    """Whether a received value is a tensor of the dtype and shape of ``flat``."""
    is_tensor = isinstance(plain, torch.Tensor)
    return is_tensor and (plain.dtype, plain.shape) == (flat.dtype, flat.shape)


class _Bucket:
    """Tensors of one rule and dtype that travel together; all ranks group them alike.

    Attributes:
        rule: what to do with them.
        device_type: the type of device that they are on, on all ranks.
        tensors: this rank's own.
        nbytes: their total size.
    """

    def __init__(self, rule: Rule, device_type: str) -> None:
        self.rule = rule
        self.device_type = device_type
        self.tensors: list[torch.Tensor] = []
        self.nbytes = 0
        self._views: list[torch.Tensor] = []
        self._copied: list[int] = []
        self._packed: torch.Tensor | None = None

    def open(self) -> torch.Tensor:
        """Return all elements as one flat tensor; a single tensor is not copied.

        They are packed on the first tensor's device. Ranks may spread a model over devices of one
        type in different ways, so the tensors of a bucket may be on several devices.
        """
        tensors = self.tensors
        device = tensors[0].device
        is_complex = tensors[0].is_complex()
        # A tensor that torch conjugates or negates lazily can't be sent from its memory either.
        self._copied = [
            at
            for at, each in enumerate(tensors)
            if not each.is_contiguous()
            or each.is_neg()
            or (is_complex and each.is_conj())
            or each.device != device
        ]
        views = [each if each.dim() == 1 else each.reshape(-1) for each in tensors]
        for at in self._copied:
            copied = torch.empty(tensors[at].shape, dtype=tensors[at].dtype, device=device)
            views[at] = copied.copy_(tensors[at]).view(-1)
        self._views = views
        self._packed = views[0] if len(views) == 1 else torch.cat(views)
        return self._packed

    def close(self, flat: torch.Tensor) -> None:
        """Write the results back into the tensors, and notify autograd of the change."""
        views, tensors = self._views, self.tensors
        if flat is not self._packed or len(views) > 1:
            sizes = [view.numel() for view in views]
            torch.split_with_sizes_copy(flat.to(views[0].device), sizes, out=views)
        elif not self._copied and not tensors[0].is_inference():
            increment_version(tensors[0])  # torch does not count received data as a change
        for at in self._copied:
            tensors[at].copy_(views[at].view(tensors[at].shape))
        self._views, self._packed = [], None


def _buckets(
    bundles: Sequence[Bundle],
    manifest: Manifest,
    kinds: Sequence[TensorGroup],
    made: dict[int, torch.Tensor],
) -> list[_Bucket]:
    """Group tensors by what is the same on all ranks: rule, dtype, size and type of device."""
    buckets: list[_Bucket] = []
    open_ones: dict[str, _Bucket] = {}
    likes = [like for bundle in bundles for like in bundle.likes]
    tensors = [tensor for bundle in bundles for tensor in bundle.tensors]
    for at, (kind, own) in enumerate(zip(kinds, tensors, strict=True)):
        tensor, nbytes = own, kind.nbytes
        is_large = nbytes > COPIED_MAX_NBYTES
        if is_large and is_repeated(manifest.lines[at]):
            continue
        if own is None and manifest.present[at]:
            tensor = made[at] = torch.zeros_like(likes[at])
        if tensor is None or not nbytes:
            continue
        bucket = open_ones.get(kind.lot)
        is_alone = is_large and kind.device_type == "cpu"
        if is_alone or bucket is None or bucket.nbytes + nbytes > _BUCKET_MAX_NBYTES:
            bucket = _Bucket(kind.rule, kind.device_type)
            buckets.append(bucket)
            if not is_alone:
                open_ones[kind.lot] = bucket
        bucket.tensors.append(tensor)
        bucket.nbytes += nbytes
    return buckets


def _move(call: Call, exchange: Exchange, buckets: Sequence[_Bucket], linked: str) -> None:
    """Transfer all buckets, over a device link if one joins the tensors' devices."""
    # Data sent outside of messages is not signed.
    is_signed = exchange.gate.signer is not None
    placed = [
        (bucket, None if is_signed else exchange.device.joined(bucket.device_type, linked))
        for bucket in buckets
    ]
    on_host = [bucket for bucket, device in placed if device is None]

    def carry(batch: Sequence[_Bucket], device: torch.device, by: _Carrier) -> None:
        flats = [(bucket.rule, bucket.open().to(device)) for bucket in batch]
        by(call, exchange, flats)
        for bucket, (_, flat) in zip(batch, flats, strict=True):
            bucket.close(flat)

    if is_signed:
        for bucket in on_host:
            carry([bucket], _HOST, _in_messages)
    else:
        carry(on_host, _HOST, _between_hosts)
    for bucket, device in placed:
        if device is not None:
            carry([bucket], device, _between_devices)


def _between_hosts(call: Call, exchange: Exchange, flats: Sequence[_Flat]) -> None:
    shared = [flat.view(torch.uint8) for rule, flat in flats if rule is Rule.SHARE]
    if shared:
        routes.relay(exchange, shared, call.root)
    parts = [_part(exchange, *each) for each in flats if each[0] is not Rule.SHARE]
    tensor_reduction.reduce_tensors(exchange, parts, None)


def _between_devices(call: Call, exchange: Exchange, flats: Sequence[_Flat]) -> None:
    for rule, flat in flats:
        if rule is Rule.SHARE:
            routes.meet_before_devices(exchange)  # a rank that failed to pack its tensors is absent
            raw = flat.view(torch.uint8)
            exchange.on_devices(partial(DevicePath.broadcast_flat, flat=raw, root=call.root))
        else:
            reduce_on_device(exchange, [_part(exchange, rule, flat)])


def _in_messages(call: Call, exchange: Exchange, flats: Sequence[_Flat]) -> None:
    for rule, flat in flats:
        read = partial(call.decode_as, fits=partial(_is_like, flat), what="such tensor")
        if rule is Rule.SHARE:
            mine = call.message(flat) if call.is_root else None
            message = routes.broadcast(exchange, mine, call.root)
            if not call.is_root:
                flat.copy_(read(message))
            continue
        # A copy, because the means overwrite data that is still being sent.
        messages = routes.all_gather(exchange, call.message(flat, torch.Tensor.clone))
        operands = [
            flat if rank == call.rank else read(message) for rank, message in enumerate(messages)
        ]
        _, combine = _averaging(rule, flat.dtype)
        combine(operands, flat)


def _part(exchange: Exchange, rule: Rule, flat: torch.Tensor) -> Part:
    wide, combine = _averaging(rule, flat.dtype)
    return Part(
        operand=flat,
        result=flat,  # the averages may overwrite an operand
        dtype=flat.dtype,
        result_dtype=flat.dtype,
        wide=wide,
        numel=flat.numel(),
        present=tuple(range(exchange.size)),
        combine=combine,
        kind=(rule, flat.dtype),
    )


def _averaging(rule: Rule, dtype: torch.dtype) -> tuple[torch.dtype, Combine]:
    """Return the dtype of totals, and how tensors are averaged."""
    if rule is Rule.GRADIENTS:
        return operators.wide_dtype("sum", dtype, None), operators.average_tensors
    wide = operators.wide_dtype("mean", dtype, None)
    return wide, partial(operators.combine_tensors, "mean", wide=wide)
