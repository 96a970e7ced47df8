"""Memory for bytes: views of existing memory, and fresh memory for received data.

All data to send is viewed as a flat ``uint8`` tensor over memory that belongs to another object. So
the sender copies nothing, and received bytes arrive in their final place. This module knows torch
and Python's buffer protocol, but no codecs, messages or ranks.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch

from objcomm.errors import WireError

T = TypeVar("T")

#: Copying this many bytes costs less than a separate message.
COPIED_MAX_NBYTES = 120 << 10

_ALIGNMENT = 64  # as from torch's own allocator


class BufferKind(IntEnum):
    """What a buffer becomes on the receiver."""

    TENSOR = 0  # memory of a tensor or an array; the decoder gets the flat tensor itself
    MEMORY = 1  # memory of any other object that is pickled out of band; a writable buffer
    BYTES = 2  # a ``bytes`` object, filled before any code can see it
    BYTEARRAY = 3
    # Like TENSOR, on an accelerator. In a size table, 4, 5 and so on select one of the ``devices``
    # of ``allocate``.
    DEVICE = 4


class Buffer(NamedTuple):
    """One buffer of a message.

    Attributes:
        kind: the kind of ``owner``.
        owner: the object passed to a decoder; on the sender, an object that keeps the memory alive.
        flat: one-dimensional ``uint8`` tensor over the same memory.
    """

    kind: BufferKind
    owner: Any
    flat: torch.Tensor


class _PyBuffer(ctypes.Structure):
    # The C struct Py_buffer; its layout is part of the stable ABI since Python 3.11.
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int
)(("PyObject_GetBuffer", ctypes.pythonapi))
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(
    ("PyBuffer_Release", ctypes.pythonapi)
)
# One type for all sizes: ctypes creates a class for each array length, which takes 17 µs and 3 KiB.
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_READABLE, _WRITABLE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def at_address(address: int, nbytes: int, owner: object) -> torch.Tensor:
    """Return a flat view of ``nbytes`` bytes that keeps their owner alive; its slices do not."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = torch.frombuffer(_memory_at(address, nbytes, _WRITABLE), dtype=torch.uint8)
    flat.objcomm_owner = owner  # type: ignore[attr-defined]  # a tensor takes any attribute
    return flat


def view(readable: Any) -> torch.Tensor:
    """Return a flat view of a contiguous buffer, which may be read-only, and keep it alive.

    ``torch.frombuffer`` warns about read-only memory, but objcomm never writes to what it sends.
    """
    raw = _PyBuffer()
    _get_buffer(readable, ctypes.byref(raw), 0)  # PyBUF_SIMPLE
    try:
        return at_address(raw.buf or 0, raw.len, readable)
    finally:
        _release_buffer(ctypes.byref(raw))


def readable(flat: torch.Tensor) -> Any:
    """Return an object with the buffer protocol over a flat tensor, which must outlive it."""
    if not flat.numel():
        return b""
    return _memory_at(flat.data_ptr(), flat.numel(), _READABLE)


def writable(flat: torch.Tensor) -> memoryview:
    """Return a writable view of a flat tensor, which must outlive it; does not use numpy."""
    if not flat.numel():
        return memoryview(bytearray())
    memory: memoryview = _memory_at(flat.data_ptr(), flat.numel(), _WRITABLE)
    return memory


def empty(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Return a fresh flat tensor, 64-byte aligned, on the CPU unless ``device`` is given.

    It is never an inference tensor, because autograd must be able to save received data. It ignores
    ``torch.set_default_device``.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return empty(nbytes, device)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device or "cpu")
    except RuntimeError as error:
        raise WireError(f"no memory for a buffer of {nbytes} bytes") from error


def room(nbytes: int) -> bytearray:
    """Allocate memory for received bytes that objcomm itself reads.

    Raises:
        WireError: there is not enough memory.
    """
    return _allocate_or_wire_error(functools.partial(bytearray, nbytes), nbytes)


def allocate(kind: int, nbytes: int, devices: Sequence[torch.device] = ()) -> Buffer:
    """Allocate memory for one buffer to receive.

    Args:
        kind: the buffer's kind.
        nbytes: its exact size.
        devices: where to put ``BufferKind.DEVICE`` buffers: the first device for that kind, the
            second for the next number, and so on.

    Raises:
        WireError: the kind is unknown, or there is not enough memory or no device for it.
    """
    if kind == BufferKind.TENSOR:
        flat = empty(nbytes)
        return Buffer(BufferKind.TENSOR, flat, flat)
    if kind == BufferKind.BYTES:
        # The C API allows filling a new bytes object before it is published.
        filled = _allocate_or_wire_error(functools.partial(_new_bytes, None, nbytes), nbytes)
        start = id(filled) + bytes.__basicsize__ - 1
        return Buffer(BufferKind.BYTES, filled, at_address(start, nbytes, filled))
    if kind == BufferKind.BYTEARRAY:
        array = room(nbytes)
        return Buffer(BufferKind.BYTEARRAY, array, view(array))
    if kind == BufferKind.MEMORY:
        exposed = _allocate_or_wire_error(functools.partial(_aligned_bytearray, nbytes), nbytes)
        return Buffer(BufferKind.MEMORY, exposed, view(exposed))
    place = kind - BufferKind.DEVICE
    if 0 <= place < len(devices):
        flat = empty(nbytes, devices[place])
        return Buffer(BufferKind.DEVICE, flat, flat)
    raise WireError(f"a buffer of kind {kind} cannot be received here")


def without_memory(kind: int, nbytes: int) -> Buffer:
    """Return a buffer for content that arrives with its own memory; see ``over``."""
    flat = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    return Buffer(BufferKind(kind), None, flat)


def over(kind: int, memory: Any) -> Buffer:
    """Return a buffer for content that is already in memory.

    Args:
        kind: ``BufferKind.TENSOR`` or ``BufferKind.MEMORY``.
        memory: writable, 64-byte aligned, and not used elsewhere; it lives as long as the buffer.
    """
    if kind == BufferKind.MEMORY:
        return Buffer(BufferKind.MEMORY, memoryview(memory), view(memory))
    with torch.inference_mode(mode=False):  # as ``empty``
        flat = torch.frombuffer(memory, dtype=torch.uint8)
    return Buffer(BufferKind.TENSOR, flat, flat)


def from_bytes(
    kind: int,
    packed: memoryview,
    devices: Sequence[torch.device],
    to_device: list[tuple[torch.Tensor, memoryview]],
) -> Buffer:
    """Copy bytes in a message's body to a separate buffer.

    Args:
        kind: the buffer's kind.
        packed: the bytes.
        devices: as for ``allocate``.
        to_device: gets the memory of a buffer on a device, and its bytes, for ``fill``.
    """
    buffer = allocate(kind, len(packed), devices)
    if buffer.kind is BufferKind.DEVICE:
        to_device.append((buffer.flat, packed))
    else:
        writable(buffer.flat)[:] = packed  # takes half as long as ``copy_``
    return buffer


def fill(to_device: Sequence[tuple[torch.Tensor, memoryview]]) -> None:
    """Copy bytes to flat tensors on devices, one copy per device: each copy waits for it."""
    for device in {flat.device for flat, _ in to_device}:
        here = [each for each in to_device if each[0].device == device]
        flats = [flat for flat, _ in here]
        if len(here) == 1:
            flats[0].copy_(view(here[0][1]))
            continue
        packed = view(bytearray().join(raw for _, raw in here)).to(device)
        torch.split_with_sizes_copy(packed, [flat.numel() for flat in flats], out=flats)


def on_host(flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat tensors in CPU memory, with one copy per device: each copy waits for it."""
    found = list(flats)
    for device in {flat.device for flat in flats if flat.device.type != "cpu"}:
        places = [at for at, flat in enumerate(flats) if flat.device == device]
        own = [flats[at] for at in places]
        parts = (torch.cat(own) if len(own) > 1 else own[0]).cpu().split([*map(len, own)])
        for at, part in zip(places, parts, strict=True):
            found[at] = part
    return found


def duplicate(buffer: Buffer) -> Buffer:
    """Copy a buffer to one of the same kind with its own memory."""
    copied = allocate(buffer.kind, buffer.flat.numel(), [buffer.flat.device])
    copied.flat.copy_(buffer.flat)
    return copied


def _allocate_or_wire_error(make: Callable[[], T], nbytes: int) -> T:
    try:
        return make()
    except (MemoryError, OverflowError) as error:
        raise WireError(f"no memory for a buffer of {nbytes} bytes") from error


def _aligned_bytearray(nbytes: int) -> memoryview:
    """Return a writable buffer, aligned like a tensor's memory, without using numpy."""
    array = bytearray(nbytes + _ALIGNMENT)
    start = -view(array).data_ptr() % _ALIGNMENT
    return memoryview(array)[start : start + nbytes]
