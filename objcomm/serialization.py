"""The serialization layer by itself: any object as one ``uint8`` tensor, and back."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from objcomm.codecs import codec_named, decode, encode
from objcomm.config import settings
from objcomm.errors import UsageError, WireError
from objcomm.frames import HEADER_NBYTES, Header, Operation, Status
from objcomm.memory import parse_device, readable, to_bytes, view
from objcomm.message import Message, compose, open_body

_HEADER = Header(status=Status.VALUE, operation=Operation.NONE)


def to_tensor(obj: object, *, codec: str | None = None) -> torch.Tensor:
    """Turn any object into bytes that a tensor collective, or a file, can carry.

    Needs no process group. The bytes are one message of ``docs/wire-format.md``, with a checksum
    over everything.

    Args:
        obj: anything that the codec takes.
        codec: ``"pickle"``, ``"msgpack"`` or a registered name.

    Returns:
        A one-dimensional ``uint8`` CPU tensor of its own memory.

    Raises:
        EncodeError: the codec refuses the object; the error names its path.
        UsageError: there is no such codec.

    Example:
        >>> import objcomm
        >>> flat = objcomm.to_tensor({"step": 3})
        >>> flat.dtype, flat.dim()
        (torch.uint8, 1)
        >>> objcomm.from_tensor(flat)
        {'step': 3}
    """
    chosen = codec_named(codec or settings().codec)
    encoded = encode(chosen, obj)
    message = compose(_HEADER._replace(codec=chosen.name), encoded.meta, encoded.buffers)
    header = message.header._replace(tag=_checksum(message.following_on_host))
    parts = [view(header.pack()), view(message.body), *message.following_on_host]
    return torch.cat([part for part in parts if part.numel()])


def from_tensor(tensor: torch.Tensor, *, device: torch.device | str | int | None = None) -> Any:
    """Turn the bytes that ``to_tensor`` made back into an object.

    With the ``pickle`` codec this runs code that whoever made the bytes chose.

    Args:
        tensor: one-dimensional ``uint8``, on any device.
        device: where tensors inside the object shall lie.

    Returns:
        The object, independent of ``tensor``.

    Raises:
        UsageError: it is no flat ``uint8`` tensor.
        WireError: the bytes are no message, damaged or cut off; nothing was allocated for them.
        DecodeError: the codec can't rebuild the object here.

    Example:
        >>> import objcomm
        >>> objcomm.from_tensor(objcomm.to_tensor((1, 2.5, None), codec="msgpack"))
        (1, 2.5, None)
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise UsageError(f"expected a flat uint8 tensor, not {tensor.dtype} of {tensor.dim()} dims")
    target = parse_device(device)
    flat = tensor.detach().cpu().contiguous()
    header = Header.unpack(to_bytes(flat[:HEADER_NBYTES]))
    nbytes = HEADER_NBYTES + header.body_nbytes + header.payload_nbytes
    if header.status != Status.VALUE or nbytes != flat.numel():
        raise WireError(f"a message of {nbytes} bytes was announced, here are {flat.numel()}")
    payload_from = HEADER_NBYTES + header.body_nbytes
    payload = flat[payload_from:]
    if _checksum([payload]) != header.tag:
        raise WireError("the payload's checksum is wrong: the message was damaged")
    message = Message(header, bytearray(to_bytes(flat[HEADER_NBYTES:payload_from])))
    open_body(message, None)
    for large in message.following_on_host:
        large.copy_(payload[: large.numel()])
        payload = payload[large.numel() :]
    owners = [buffer.owner for buffer in message.buffers]
    return decode(header.codec, message.meta, owners, device=target)


def _checksum(flats: Sequence[torch.Tensor]) -> int:
    checksum = 0
    for flat in flats:
        if flat.numel():
            checksum = zlib.crc32(readable(flat), checksum)
    return checksum
