"""Byte layout of one message: a fixed header, a size table, the codec's bytes.

Knows nothing of codecs, rank translation or torch, so a single process can test every rule. For
other implementations, the layout is described in ``docs/wire-format.md``, and only there.
"""

import functools
import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag
from typing import NamedTuple

from objcomm.errors import OTHER_OPTIONS, DesyncError, Position, WireError

MAGIC = b"OBJC"
VERSION = 1

#: Maximum length of an operation's first message, unless it is ``WHOLE``. A receive of a first
#: message may be posted with exactly this size: a receiver whose buffer is too small may not
#: survive (see ``Link``). 8 B and 64 KiB cost the same on the wire, so the window is generous.
WINDOW_NBYTES = 32 * 1024

_SIGNED = struct.Struct("<4sBBBBiiIIQQQ16s64sIQQQQiI32s32sI")
_CHECKSUM = struct.Struct("<I")
_SIGNED_NBYTES = _SIGNED.size
HEADER_NBYTES = _SIGNED_NBYTES + _CHECKSUM.size

#: The longest body that is sent together with its header.
INLINE_NBYTES = WINDOW_NBYTES - HEADER_NBYTES

#: A digest or signature without a key.
BLANK = bytes(32)
_SIGNATURE_UNTIL = HEADER_NBYTES - 2 * _CHECKSUM.size
_SIGNATURE_FROM = _SIGNATURE_UNTIL - len(BLANK)

# A call's line and its name share one field, in which the name gets at least 31 bytes.
_PLACE_NBYTES = 64
_NAME_MIN_NBYTES = 31
_NAME_MAX_NBYTES = 64

#: A header's ``destination`` if any rank may receive it.
EVERYONE = -1

_ROW = struct.Struct("<QB")
ROW_NBYTES = _ROW.size


class Operation(IntEnum):
    """All operations that a header may contain; numbers are never reused."""

    NONE = 0  # a message of ``to_tensor``, which belongs to no operation
    BROADCAST = 1
    GATHER = 2
    ALL_GATHER = 3
    SCATTER = 4
    REDUCE = 5
    ALL_REDUCE = 6
    BARRIER = 7
    REDUCE_AND_BROADCAST = 8
    GATHER_SCALAR = 9
    ALL_GATHER_SCALAR = 10
    FAIL_TOGETHER = 11
    ALL_TO_ALL = 12
    SCAN = 13
    EXSCAN = 14
    REDUCE_SCATTER = 15
    SEND = 16
    RECV = 17  # in no header: a call that waits for a SEND
    SPLIT = 18
    DUP = 19
    NODE_GROUP = 20
    LEADERS = 21
    RUN_ON_MAIN = 22
    RUN_ONCE_PER_NODE = 23
    MAIN_PROCESS_ONLY = 24
    ONCE_PER_NODE = 25
    MAIN_FIRST = 26
    NODE_FIRST = 27
    ZERO_ONLY = 28
    COMPUTE_AND_BROADCAST = 29
    AVERAGE_METRICS = 30
    GATHER_FROM_ALL_RANKS = 31
    GATHER_SCALAR_FROM_ALL_RANKS = 32
    AGREE = 33
    ANY_RANK = 34
    ALL_RANKS = 35
    SHARED_SEED = 36
    BROADCAST_TENSORS = 37
    AVERAGE_TENSORS = 38
    SYNC_BUFFERS = 39
    SYNC_GRADIENTS = 40
    SYNC_MODEL = 41
    BROADCAST_MODEL = 42
    WRAP = 43
    EAGER_SYNC_GRADIENTS = 44
    EAGER_SYNC_MODEL = 45
    ZERO_FIRST = 46
    TAKE = 47  # the answer to a SEND that was offered
    NEW_GROUP = 48
    READY = 49  # the receiver of a SEND has memory for members on a device
    START = 50  # the sender begins to send those
    BROADCAST_FILE = 51
    STREAM = 52
    SURVIVORS = 53


#: Names by number: getting one from the member takes ten times as long.
NAMES = {int(operation): operation.name.lower() for operation in Operation}


class Status(IntEnum):
    """What the bytes after the header contain."""

    VALUE = 0  # an object, encoded
    FAILURE = 1  # the texts of one or more RankFailure
    BUNDLE = 2  # the first messages of all ranks, in rank order
    TREE = 3  # nothing: the operands are large and are combined along a tree
    ENDED = 4  # nothing: the sender's part in a stream has ended


class Flag(IntFlag):
    """Properties of a message beyond its status."""

    STAGED = 1  # large members in CPU memory travel over the device link as well
    ACKNOWLEDGEMENT = 2  # of the round that ``confirm=True`` adds
    PACED = 4  # each piece that follows the head has a receipt
    OFFERED = 8  # the sender waits for a TAKE before it sends the rest, or before its call ends
    ON_DEVICE = 16  # large members travel between the two ranks' devices, after a READY
    WHOLE = 32  # body and large buffers come with the header, whatever their size


_WHOLE = int(Flag.WHOLE)  # an IntFlag's ``&`` costs 0.7 µs


#: Creates a header from all its fields, in order; passing them by name takes four times as long.
made = tuple.__new__


class Header(NamedTuple):
    """What a receiver must know before it can allocate memory."""

    status: int = 0
    flags: int = 0  # of ``Flag``
    operation: int = 0
    sender: int = 0  # group rank
    root: int = -1  # group rank of source or destination, -1 if there is none
    lane: int = 0  # fingerprint of the lane's name, 32 bit
    epoch: int = 0  # always 0: a mesh that replaces another has a new name
    group: int = 0  # fingerprint of the mesh
    sequence: int = 0  # number of operations that the sender started before on this lane
    fingerprint: int = 0  # of what else must agree: the call's name, a named op
    codec: str = ""
    call_site: str = ""
    buffer_count: int = 0
    meta_nbytes: int = 0  # the codec's own bytes
    body_nbytes: int = 0  # table, codec's bytes and small buffers
    payload_nbytes: int = 0  # large buffers, which follow one after another
    tag: int = 0  # of a point-to-point message; 0 in collectives
    destination: int = EVERYONE  # the only group rank that may take it; only if signed
    number: int = 0  # number among its sender's messages in this call, from 1; only if signed
    digest: bytes = BLANK  # keyed, of body and payload
    signature: bytes = BLANK  # keyed, of this header
    body_checksum: int = 0  # CRC-32 of the body
    name: str = ""  # the start of the call's name, packed after the call site

    @property
    def position(self) -> Position:
        """Where the sender is, for an error's text."""
        return Position(
            self.sender,
            operation_name(self.operation),
            self.sequence,
            self.root,
            self.call_site,
            name=self.name,
            fingerprint=self.fingerprint,
        )

    @property
    def is_inline(self) -> bool:
        """Whether the body came with the header."""
        return self.body_nbytes <= INLINE_NBYTES or bool(self.flags & _WHOLE)

    @property
    def head_nbytes(self) -> int:
        """Length of the message's first part."""
        nbytes = self.body_nbytes
        if self.flags & _WHOLE:
            return HEADER_NBYTES + nbytes + self.payload_nbytes
        return HEADER_NBYTES + (nbytes if nbytes <= INLINE_NBYTES else 0)

    @property
    def nbytes(self) -> int:
        """Length of everything after the header, in the first part or later."""
        return self.body_nbytes + self.payload_nbytes

    @property
    def is_all_head(self) -> bool:
        """Whether nothing follows the message's first part."""
        is_small = self.body_nbytes <= INLINE_NBYTES and not self.payload_nbytes
        return is_small or bool(self.flags & _WHOLE)

    def pack(self, sign: Callable[[bytes], bytes] | None = None) -> bytes:
        """Return the header as ``HEADER_NBYTES`` bytes.

        Args:
            sign: computes the signature of the bytes with a blank signature; None keeps the
                header's own.
        """
        codec, place = _packed_names(self.codec, self.call_site, self.name)
        packed = _SIGNED.pack(MAGIC, VERSION, *self[:10], codec, place, *self[12:22])
        if sign is not None:
            packed = signed_part(packed)
            packed = packed[:_SIGNATURE_FROM] + sign(packed) + packed[_SIGNATURE_UNTIL:]
        return packed + _CHECKSUM.pack(zlib.crc32(packed))

    @classmethod
    def unpack(cls, raw: bytes | bytearray | memoryview) -> "Header":
        """Read the start of a message.

        Args:
            raw: the message's first bytes, ``HEADER_NBYTES`` or more.

        Raises:
            WireError: another program, or another version of objcomm, wrote them, or they were
                damaged in transit.
        """
        if len(raw) < HEADER_NBYTES:
            raise WireError(f"a message of {len(raw)} bytes is shorter than its header")
        fields = _SIGNED.unpack_from(raw)
        if fields[0] != MAGIC or fields[1] != VERSION:
            magic, version = fields[:2]
            raise WireError(
                f"expected {MAGIC!r} version {VERSION}, got {magic!r} version {version}; "
                "do all ranks run the same objcomm?"
            )
        if zlib.crc32(raw[:_SIGNED_NBYTES]) != _CHECKSUM.unpack_from(raw, _SIGNED_NBYTES)[0]:
            raise WireError("the header's checksum is wrong: the message was damaged")
        codec, call_site, name = _names_in(fields[12], fields[13])
        header = made(cls, (*fields[2:12], codec, call_site, *fields[14:], name))
        if header.buffer_count * ROW_NBYTES + header.meta_nbytes > header.body_nbytes:
            raise WireError(
                f"a table of {header.buffer_count} rows and {header.meta_nbytes} codec bytes do "
                f"not fit in a body of {header.body_nbytes} bytes"
            )
        return header


def signed_part(raw: bytes | bytearray | memoryview) -> bytes:
    """Return the part of a packed header that is signed: all but the signature and the checksum."""
    return b"".join([raw[:_SIGNATURE_FROM], BLANK, raw[_SIGNATURE_UNTIL:_SIGNED_NBYTES]])


class SizeRow(NamedTuple):
    """One row of the size table."""

    nbytes: int
    kind: int  # a ``buffers.BufferKind``

    @property
    def is_packed(self) -> bool:
        """Whether the buffer is part of the body: copying it costs less than a message."""
        return self.nbytes <= WINDOW_NBYTES


def pack_table(rows: Sequence[SizeRow]) -> bytes:
    """Return the size table as bytes, ``ROW_NBYTES`` per row."""
    return b"".join([_ROW.pack(*row) for row in rows])


def unpack_table(header: Header, body: memoryview) -> list[SizeRow]:
    """Read the size table and check it against the header's sums.

    Raises:
        WireError: body and header disagree; nothing has been allocated for the buffers yet.
    """
    table = body[: header.buffer_count * ROW_NBYTES]
    rows = [SizeRow(*fields) for fields in _ROW.iter_unpack(table)]
    packed = sum(row.nbytes for row in rows if row.is_packed)
    if len(table) + header.meta_nbytes + packed != header.body_nbytes:
        raise WireError("the size table does not add up to the body's length")
    if sum(row.nbytes for row in rows if not row.is_packed) != header.payload_nbytes:
        raise WireError("the size table does not add up to the payload's length")
    return rows


def fingerprint(text: str) -> int:
    """Return a 32-bit number for ``text``, the same in every process; 0 for empty text."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) if text else 0


def shown(name: str, nbytes: int = _NAME_MAX_NBYTES) -> str:
    """Return the start of a call's name, as errors show it."""
    return name.encode("utf-8", "replace")[:nbytes].decode("utf-8", "ignore")


# A program's calls come from a few lines, so most headers repeat these: saves 0.5 µs a header.
@functools.lru_cache(maxsize=256)
def _packed_names(codec: str, call_site: str, name: str) -> tuple[bytes, bytes]:
    """Return a codec's name; and the end of a call's line, a zero byte and its name's start."""
    line, named = call_site.encode("utf-8", "replace"), b""
    if name:
        room = max(_NAME_MIN_NBYTES, _PLACE_NBYTES - 1 - len(line))
        named = b"\0" + shown(name, room).encode()
    return codec.encode(), line[len(named) - _PLACE_NBYTES :] + named


@functools.lru_cache(maxsize=256)
def _names_in(codec: bytes, place: bytes) -> tuple[str, str, str]:
    """Return a codec's name, a call's line and its name, given the two packed fields."""
    call_site, _, name = place.rstrip(b"\0").decode("utf-8", "replace").partition("\0")
    return codec.rstrip(b"\0").decode("ascii", "replace"), call_site, name


def operation_name(operation: int) -> str:
    """Return the public name of an operation's number."""
    return NAMES.get(operation) or f"operation {operation}"


def check_same_call(mine: Header, theirs: Header, sender: int) -> None:
    """Compare a received header with the one that this rank would have sent.

    Args:
        mine: this rank's own header.
        theirs: the received header.
        sender: the rank that must have created the message; another rank may have forwarded it.

    Raises:
        DesyncError: the other rank is in another operation or call, or has another root, name or
            options.
        WireError: the message belongs to another group, lane or sender.
    """
    if (theirs.group, theirs.epoch, theirs.lane) != (mine.group, mine.epoch, mine.lane):
        raise WireError(f"a message from another group or lane arrived: {theirs.position}")
    for reason, ours, other in (
        ("different operations", mine.operation, theirs.operation),
        ("different calls", mine.sequence, theirs.sequence),
        ("different roots", mine.root, theirs.root),
        (
            OTHER_OPTIONS if mine.name == theirs.name else "different names",
            *(mine.fingerprint, theirs.fingerprint),
        ),
    ):
        if ours != other:
            raise DesyncError(reason, (mine.position, theirs.position))
    if theirs.sender != sender:
        raise WireError(f"expected a message from rank {sender}, got one from {theirs.position}")
