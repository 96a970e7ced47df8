"""One message: its parts, and how they are received.

Combines the layout of ``header`` with the memory of ``codecs.buffers``. Knows codecs only by name,
and nothing of who sends to whom.

A *whole* message is sent in one step: all of it is its head. Others take up to three steps, each
determined by the one before::

    head     header, followed by the body if both fit into the window
    body     table, codec's bytes and small buffers, if they did not fit
    buffers  each large buffer, from the sender's memory into the receiver's
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from objcomm._codecs.buffers import (
    Buffer,
    BufferKind,
    allocate,
    fill,
    from_bytes,
    on_host,
    readable,
    without_memory,
)
from objcomm._wire.header import (
    HEADER_NBYTES,
    ROW_NBYTES,
    Flag,
    Header,
    SizeRow,
    made,
    pack_table,
    unpack_table,
)
from objcomm.errors import AuthenticationError, ObjcommError, WireError

if TYPE_CHECKING:
    from objcomm._wire.signing import Signer

_WHOLE = int(Flag.WHOLE)  # an IntFlag's ``&`` costs 0.7 µs
# With these flags, what follows the head gets receipts, waits for an answer or takes another path.
_NOT_WHOLE = int(Flag.STAGED | Flag.PACED | Flag.OFFERED | Flag.ON_DEVICE)

# The other kinds own their memory, or are on a device.
_MAPPABLE = frozenset({BufferKind.TENSOR, BufferKind.MEMORY})


class Message:
    """A message to send, or a received one.

    Attributes:
        header: its fixed part.
        body: table, codec's bytes and small buffers; on a receiver, filled once it has
            arrived.
        buffers: all buffers in the codec's order; on a receiver, only after ``open_body``.
        large: the buffers that follow the body, or are sent separately.
        arrived: the head as received, on a receiver.
        behind: the large buffers, end to end, that arrived after the body of a whole message.
        signer: verifies the content, on a receiver with a key.
        refusal: why this rank does not decode it.
        is_open: whether its body was read.
        is_all_head: whether nothing follows the head.
    """

    __slots__ = (
        "arrived",
        "behind",
        "body",
        "buffers",
        "header",
        "is_all_head",
        "is_open",
        "large",
        "refusal",
        "signer",
    )

    def __init__(
        self,
        header: Header,
        body: bytes | bytearray | memoryview,
        buffers: Sequence[Buffer] = (),
        large: Sequence[Buffer] = (),
        arrived: bytes | memoryview | None = None,
    ) -> None:
        self.header = header
        self.body = body
        self.buffers = buffers
        self.large = large
        self.arrived = arrived
        self.behind: memoryview | None = None
        self.signer: Signer | None = None
        self.refusal: ObjcommError | None = None
        self.is_open = False
        self.is_all_head = header.is_all_head

    def make_whole(self, head_max_nbytes: int) -> None:
        """Mark a message to be sent entirely as its head, if that is allowed and it fits.

        The receiver then copies its buffers, which costs less than separate messages do.
        """
        header = self.header
        is_short = HEADER_NBYTES + header.nbytes <= head_max_nbytes
        if is_short and not header.flags & _NOT_WHOLE and len(self.on_host) == len(self.large):
            self.header = header._replace(flags=header.flags | _WHOLE)
            self.is_all_head = True

    def content(self) -> Iterator[Any]:
        """Yield all bytes after the header, piece by piece, as objects with the buffer protocol."""
        yield self.body
        for buffer in self.large:
            flat = buffer.flat.cpu()
            yield readable(flat)

    def check(self) -> None:
        """Check a received message; must be called before its content is used.

        Raises:
            ObjcommError: this rank's options refuse it.
            AuthenticationError: its content is not what its sender signed.
        """
        if self.refusal is not None:
            raise self.refusal
        signer, self.signer = self.signer, None
        if signer is not None and signer.digest(self.content()) != self.header.digest:
            position = self.header.position
            raise AuthenticationError(f"the content of {position} is not what was signed")

    @property
    def meta(self) -> memoryview:
        """The codec's own bytes."""
        start = self.header.buffer_count * ROW_NBYTES
        return memoryview(self.body)[start : start + self.header.meta_nbytes]

    def replace(self, before: Sequence[Buffer], after: Sequence[Buffer]) -> None:
        """Replace buffers that had no memory yet."""
        places = {id(old): new for old, new in zip(before, after, strict=True)}
        self.buffers = [places.get(id(each), each) for each in self.buffers]
        self.large = [places.get(id(each), each) for each in self.large]

    @property
    def on_host(self) -> list[Buffer]:
        """The large buffers in CPU memory."""
        return [buffer for buffer in self.large if buffer.kind is not BufferKind.DEVICE]

    @property
    def buffers_on_device(self) -> list[torch.Tensor]:
        """Flat tensors of all buffers on the accelerator, including those that came in the body."""
        return [buffer.flat for buffer in self.buffers if buffer.kind is BufferKind.DEVICE]

    @property
    def following_on_host(self) -> list[torch.Tensor]:
        """Flat tensors of the large buffers in CPU memory."""
        return [buffer.flat for buffer in self.on_host]

    @property
    def following_on_device(self) -> list[torch.Tensor]:
        """Flat tensors of the large buffers on the accelerator."""
        return [buffer.flat for buffer in self.large if buffer.kind is BufferKind.DEVICE]


def compose(
    header: Header,
    meta: bytes | bytearray,
    buffers: Sequence[Buffer] = (),
    *,
    status: int | None = None,
    codec: str | None = None,
    device_types: str = "",
) -> Message:
    """Create a message to send.

    Args:
        header: who sends what; its sizes and checksum are filled in here.
        meta: the codec's own bytes.
        buffers: the codec's buffers.
        status: kind of message; None for the header's.
        codec: name of the codec; None for the header's.
        device_types: device types of buffers, separated by commas; they must match ``devices`` of
            ``open_body`` on the receiver, in the same order.

    Raises:
        WireError: a buffer is on another type of device.
    """
    body: bytes | bytearray = bytes(meta)  # copies nothing if it is bytes already
    payload_nbytes = 0
    large = []
    if buffers:
        rows, packed = [], []
        for buffer in buffers:
            flat, kind = buffer.flat, int(buffer.kind)
            if buffer.kind is BufferKind.DEVICE:
                kind = _row_kind(buffer, device_types)
            rows.append(SizeRow(flat.numel(), kind))
            if rows[-1].is_packed:
                packed.append(flat)
            else:
                large.append(buffer)
                payload_nbytes += rows[-1].nbytes
        if device_types:
            packed = on_host(packed)
        body = bytearray().join([pack_table(rows), meta, *map(readable, packed)])
    complete: Header = made(
        Header,
        (
            header.status if status is None else status,
            *header[1:10],
            header.codec if codec is None else codec,
            header.call_site,
            len(buffers),
            len(meta),
            len(body),
            payload_nbytes,
            *header[16:21],
            zlib.crc32(body),
            header.name,
        ),
    )
    return Message(complete, body, buffers, large)


def _row_kind(buffer: Buffer, device_types: str) -> int:
    """Return a device buffer's kind for the size table, where it includes the device type."""
    found, types = buffer.flat.device.type, device_types.split(",")
    if found not in types:
        raise WireError(f"a buffer on {found!r} cannot be sent from there, only from {types}")
    return buffer.kind + types.index(found)


def head_of(raw: bytes | memoryview, header: Header) -> Message:
    """Return a message from its head alone; a body that is part of it is not read yet.

    Args:
        raw: the received bytes; those after the head are ignored.
        header: the result of ``Header.unpack(raw)``, checked by the caller.

    Raises:
        WireError: the head was cut off.
    """
    head_nbytes = header.head_nbytes
    if len(raw) != head_nbytes:
        if len(raw) < head_nbytes:  # one of several heads in a bundle
            raise WireError(f"{header.position} sent a message that was cut off")
        raw = raw[:head_nbytes]
    rest = memoryview(raw)[HEADER_NBYTES:]
    message = Message(header, rest, arrived=raw)
    if header.flags & _WHOLE:
        message.body, message.behind = rest[: header.body_nbytes], rest[header.body_nbytes :]
    return message


def open_body(
    message: Message,
    devices: Sequence[torch.device] = (),
    mapped_from_nbytes: float = math.inf,
) -> None:
    """Read the body and create the buffers; copy what has arrived into them.

    Args:
        message: a message whose body has arrived. Its buffers are created; those whose content
            has arrived are filled.
        devices: devices for ``BufferKind.DEVICE`` buffers, see ``allocate``.
        mapped_from_nbytes: tensors and out-of-band members of at least this length get no memory;
            ``Message.replace`` provides it with their content.

    Raises:
        WireError: the body is damaged or disagrees with the header, or there is no memory.
    """
    header, body = message.header, memoryview(message.body)
    if zlib.crc32(body) != header.body_checksum:
        raise WireError("the body's checksum is wrong: the message was damaged")
    message.is_open = True
    if not (header.buffer_count or header.payload_nbytes) and len(body) == header.meta_nbytes:
        return
    rows = unpack_table(header, body)
    at = header.buffer_count * ROW_NBYTES + header.meta_nbytes
    behind = message.behind
    buffers, large = [], []
    to_device: list[tuple[torch.Tensor, memoryview]] = []
    for row in rows:
        if row.is_packed:
            raw = body[at : at + row.nbytes]
            buffers.append(from_bytes(row.kind, raw, devices, to_device))
            at += row.nbytes
            continue
        if behind is not None:
            buffer = from_bytes(row.kind, behind[: row.nbytes], devices, to_device)
            behind = behind[row.nbytes :]
        elif row.kind in _MAPPABLE and row.nbytes >= mapped_from_nbytes:
            buffer = without_memory(row.kind, row.nbytes)
        else:
            buffer = allocate(row.kind, row.nbytes, devices)
        buffers.append(buffer)
        large.append(buffer)
    fill(to_device)
    message.buffers, message.large = buffers, large
