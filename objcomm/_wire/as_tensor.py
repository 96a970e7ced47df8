"""The serialization layer on its own: converts any object to a ``uint8`` tensor and back."""

import zlib
from collections.abc import Iterable
from typing import Any

import torch

from objcomm._codecs.base import codec_named, decode, encode
from objcomm._codecs.buffers import empty, readable, writable
from objcomm._config import Allowed, DeviceLike, parse_device, settings, settings_with
from objcomm._wire.admission import Gate
from objcomm._wire.header import HEADER_NBYTES, Header, Operation, Status
from objcomm._wire.message import Message, compose, open_body
from objcomm.errors import UsageError, WireError

_HEADER = Header(status=Status.VALUE, operation=Operation.NONE)

# What a signature depends on: no group or time, so the bytes may be stored and read later.
_PURPOSE = "to_tensor"


def to_tensor(obj: object, *, codec: str | None = None) -> torch.Tensor:
    """Serialize any object to bytes that a tensor collective, or a file, can carry.

    Needs no process group. The bytes are one message as described in ``docs/wire-format.md``, with
    a checksum over everything.

    Args:
        obj: anything that the codec can encode.
        codec: ``"pickle"``, ``"msgpack"`` or a registered name.

    Returns:
        A one-dimensional ``uint8`` CPU tensor that owns its memory.

    Raises:
        EncodeError: the codec can't encode the object; the error names its path.
        UsageError: ``codec`` is not the name of a codec.

    Examples:
        >>> import objcomm
        >>> flat = objcomm.to_tensor({"step": 3})
        >>> flat.dtype, flat.dim()
        (torch.uint8, 1)
        >>> objcomm.from_tensor(flat)
        {'step': 3}
    """
    in_force = settings()
    chosen = codec_named(codec or in_force.codec, "to_tensor")
    encoded = encode(chosen, obj)
    message = compose(_HEADER, encoded.meta, encoded.buffers, codec=chosen.name)
    if message.large:
        checksum = 0
        for buffer in message.large:
            checksum = zlib.crc32(readable(buffer.flat), checksum)
        message.header = message.header._replace(tag=checksum)
    head = Gate(in_force, _PURPOSE).head_of(message)[:HEADER_NBYTES]
    flat = empty(HEADER_NBYTES + message.header.nbytes)
    room = writable(flat)
    for part in (head, *message.content()):
        room[: len(part)] = part
        room = room[len(part) :]
    return flat


def from_tensor(
    tensor: torch.Tensor,
    *,
    device: DeviceLike = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
) -> Any:
    """Rebuild an object from the bytes that ``to_tensor`` returned.

    A pickle runs code chosen by the creator of the bytes, unless ``allow`` is given.

    Args:
        tensor: one-dimensional ``uint8``, on any device.
        device: device on which to place received tensors.
        accept: the codecs that it may be encoded with.
        allow: the classes and functions that a pickle may name; see ``objcomm.configure``.

    Returns:
        The object, independent of ``tensor``.

    Raises:
        UsageError: ``tensor`` is not a flat ``uint8`` tensor.
        WireError: the bytes are not a message, or are damaged, cut off or larger than a limit;
            nothing was allocated for them.
        AuthenticationError: a key is set and the bytes were not signed with it, or no key is set
            and they are signed.
        DecodeError: the codec is not accepted, or can't rebuild the object here.
        ForbiddenTypeError: it contains something that ``allow``, or the registered classes, do not
            permit.

    Examples:
        >>> import objcomm
        >>> objcomm.from_tensor(objcomm.to_tensor((1, 2.5, None), codec="msgpack"))
        (1, 2.5, None)
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"from_tensor: tensor={tensor!r} must be a flat uint8 tensor")
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise UsageError(f"expected a flat uint8 tensor, not {tensor.dtype} of {tensor.dim()} dims")
    target = parse_device(device, "from_tensor")
    chosen = settings_with(accept, allow, "from_tensor")
    gate = Gate(chosen, _PURPOSE)
    flat = tensor.detach().cpu().contiguous()
    raw = memoryview(readable(flat))
    header = gate.header_in(raw[:HEADER_NBYTES])
    if refusal := gate.refusal(header):
        raise refusal
    nbytes, body_until = HEADER_NBYTES + header.nbytes, HEADER_NBYTES + header.body_nbytes
    if header.status != Status.VALUE or nbytes != flat.numel():
        raise WireError(f"a message of {nbytes} bytes was announced, but {flat.numel()} arrived")
    payload = raw[body_until:]
    if zlib.crc32(payload) != header.tag:
        raise WireError("the payload's checksum is wrong: the message was damaged")
    # A copy: a codec may keep what it gets, and the tensor's memory may be released.
    message = Message(header, bytes(raw[HEADER_NBYTES:body_until]))
    message.behind, message.signer = payload, gate.signer
    open_body(message)
    message.check()
    owners = [buffer.owner for buffer in message.buffers]
    return decode(header.codec, message.meta, owners, device=target, chosen=chosen)
