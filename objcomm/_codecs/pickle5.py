"""The ``pickle`` codec: anything that Python can pickle, and more.

Uses protocol 5, with the memory of tensors, large arrays and large ``bytes`` out of band. A class
or function is sent by reference if the receiver can import it, and otherwise by value, with
cloudpickle. This is decided for each member, so ``isinstance`` still works for the others.

Decoding runs code that the sender chose, unless ``allow=`` lists what a pickle may name. Read
``docs/guide/security.md`` before using it between processes that do not trust each other.
"""

import abc
import copyreg
import dataclasses
import functools
import importlib
import io
import pickle
import struct
import sys
import threading
import types
import typing
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from objcomm._codecs import array_dtypes, exceptions, places, restricted, tensors
from objcomm._codecs.base import OUT_OF_BAND_FROM_NBYTES, Encoded, blame, reason_of, refusal
from objcomm._codecs.buffers import Buffer, BufferKind, duplicate, view
from objcomm._config import decoding_settings

_NAME = "pickle"

# Arrays up to this size would be copied to a message's body in any case, and a buffer costs more
# than its copy: to encode, send, receive and decode eight of 5 kB took 290 µs, and 110 µs in band.
_IN_BAND_MAX_NBYTES = 32 * 1024

# Opcodes of protocol 5, from pickletools. The pickler writes a large object's opcode and length,
# then passes the object itself to its file, so only the bytes before it must be recognized.
_LARGE_OBJECT: dict[type, tuple[tuple[bytes, struct.Struct], ...]] = {
    bytes: ((b"B", struct.Struct("<I")), (b"\x8e", struct.Struct("<Q"))),
    bytearray: ((b"\x96", struct.Struct("<Q")),),
}
_NEXT_BUFFER = b"\x97"
_FRAME = b"\x95"
_FRAME_LENGTH = struct.Struct("<Q")

# Types that plain pickle rejects and cloudpickle supports, besides functions and classes. Open
# files are omitted on purpose, because cloudpickle would send their content.
_BY_VALUE = frozenset(
    {
        types.ModuleType,
        types.CodeType,
        types.CellType,
        types.MappingProxyType,
        types.GetSetDescriptorType,
        typing.TypeVar,
        type(dataclasses._FIELD),  # type: ignore[attr-defined]  # noqa: SLF001  # known by identity
        property,
        classmethod,
        staticmethod,
        type({}.keys()),
        type({}.values()),
        type({}.items()),
        type(OrderedDict().keys()),
        type(OrderedDict().values()),
        type(OrderedDict().items()),
        abc.abstractclassmethod,
        abc.abstractstaticmethod,
        abc.abstractproperty,
        weakref.WeakSet,
    }
)
# Pickle has its own rule for these three.
_SINGLETON_TYPES = (type(None), type(...), type(NotImplemented))


class PickleCodec:
    """See the module docstring."""

    name = _NAME

    def encode(self, obj: object, *, device_type: str | None = None) -> Encoded:
        """Pickle ``obj``; an error names the path of the member that cannot be pickled."""
        pickler = _pickler()
        pickler.device_type = device_type
        try:
            pickler.dump(obj)
        except Exception as error:
            path, culprit = blame(obj, _can_pickle)
            raise refusal(_NAME, path, culprit, reason_of(error)) from error
        sink = pickler.sink
        # ``Encoded(...)`` would add a Python call, which matters for small objects.
        made = sink[0] if len(sink) == 1 else b"".join(sink), sink.buffers
        return tuple.__new__(Encoded, made)

    def copy(self, obj: object) -> Any:
        """Return an independent copy of ``obj`` for this process itself.

        Members that would be sent by value are shared instead. Rebuilding a class by value in the
        process that has it would overwrite its attributes.
        """
        kept: list[Any] = []
        pickler = _pickler()
        sink, pickler.kept = pickler.sink, kept
        pickler.dump(obj)
        before, _copying.kept = _copying.kept, kept
        try:
            with tensors.landing(None):
                owners = [duplicate(buffer).owner for buffer in sink.buffers]
                return pickle.loads(b"".join(sink), buffers=owners)  # noqa: S301  # written by this process
        finally:
            _copying.kept = before

    def decode(
        self, meta: memoryview, buffers: Sequence[Any], *, device: torch.device | None = None
    ) -> Any:
        """Unpickle; an error in a ``__setstate__`` is raised unchanged."""
        in_force = decoding_settings()
        if in_force.allow is not None:
            with tensors.landing(device):
                return restricted.loads(meta, buffers, in_force.allow, in_force.max_depth)
        if not buffers and device is None:  # so there are no tensors to move
            return pickle.loads(meta)  # noqa: S301  # the purpose of this codec
        with tensors.landing(device):
            return pickle.loads(meta, buffers=buffers)  # noqa: S301  # as above

    def place_of_failure(
        self, meta: memoryview, buffers: Sequence[Any], device: torch.device | None
    ) -> places.Place | None:
        """Find where ``decode`` failed; None with ``allow=``, as this calls what a pickle names."""
        if decoding_settings().allow is not None:
            return None
        with tensors.landing(device):
            return places.place_of_failure(meta, buffers)


class _Copying(threading.local):
    """While this thread makes a copy, the members that the copy shares with the original."""

    kept: Sequence[Any] = ()


_copying = _Copying()


def _kept_at(position: int) -> Any:
    return _copying.kept[position]


class _Sink(list[bytes]):
    """The pickler's file: keeps the parts of the stream, and large objects as separate buffers."""

    __slots__ = ("buffers",)

    buffers: list[Buffer]

    def write(self, chunk: Any) -> None:
        """Append the next part of the stream.

        A frame of the stream is never mistaken for a large object: it is not a ``bytearray``, and
        it begins with its own opcode and length.
        """
        kind = type(chunk)
        if kind not in _LARGE_OBJECT:
            chunk = bytes(chunk)  # a string's encoding, valid only during this call
        elif len(chunk) >= OUT_OF_BAND_FROM_NBYTES and self and not _is_frame(chunk):
            before = self[-1]
            for opcode, length in _LARGE_OBJECT[kind]:
                announced = opcode + length.pack(len(chunk)) if _fits(length, chunk) else None
                if announced and before.endswith(announced):
                    self[-1] = before[: -len(announced)] + _NEXT_BUFFER
                    made = BufferKind.BYTES if kind is bytes else BufferKind.BYTEARRAY
                    locked = memoryview(chunk)  # keeps a bytearray from being resized
                    self.buffers.append(Buffer(made, locked, view(locked)))
                    return
        self.append(chunk)

    def take(self, buffer: pickle.PickleBuffer) -> None:
        """Append the next member that is pickled out of band."""
        owner = memoryview(buffer).obj
        if type(owner) is _Carrier:
            self.buffers.append(owner.buffer)
        else:
            kept = [buffer, *tensors.resize_locks(owner)]
            self.buffers.append(Buffer(BufferKind.MEMORY, kept, view(buffer.raw())))


def _is_frame(chunk: bytes) -> bool:
    header_nbytes = len(_FRAME) + _FRAME_LENGTH.size
    return chunk[:header_nbytes] == _FRAME + _FRAME_LENGTH.pack(len(chunk) - header_nbytes)


def _fits(length: struct.Struct, chunk: bytes) -> bool:
    return len(chunk) < 1 << (8 * length.size)


class _Memory:
    """A tensor's memory as a separate member, so that tied tensors remain tied."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer


class _Carrier(bytearray):
    """Lets a ``PickleBuffer`` pass a flat tensor, which has no buffer protocol, to the sink."""

    __slots__ = ("buffer",)
    buffer: Buffer


class _Pickler(pickle.Pickler):
    """Chooses for each member how to send it; see the module docstring."""

    sink: _Sink
    memories: dict[tuple[Any, ...], _Memory | bytearray] | None = None
    kept: list[Any] | None = None
    device_type: str | None = None
    _by_value: Any = None

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a member; called for each that is not a builtin container or scalar."""
        kind = type(obj)
        if kind is _Memory:
            carrier = _Carrier()
            carrier.buffer = obj.buffer
            return _same, (pickle.PickleBuffer(carrier),)
        if issubclass(kind, torch.Tensor):
            return self._reduce_tensor(obj)
        if tensors.is_plain_array(obj):
            return self._reduce_array(obj)
        is_named = issubclass(kind, type) or kind is types.FunctionType
        if kind in _BY_VALUE or (is_named and not _is_importable(obj)):
            return self._reduce_by_value(obj)
        if issubclass(kind, BaseException):
            return exceptions.reduced(obj)
        usual = _reduce_by_state if _is_asked_while_empty(kind) else _usual  # type: ignore[arg-type]  # every class has a hash
        return (_REDUCE.get(kind) or _REDUCE_BY_MODULE.get(kind.__module__, usual))(obj)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensors.is_plain_tensor(tensor):
            about, memory = self._described(tensor)
            return _with_attributes(tensor, _rebuild_tensor, (tuple(about), memory))
        if tensors.is_plain_subclass(tensor):
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # as torch's own does
                plain = tensor.as_subclass(torch.Tensor)
                about, memory = self._described(plain)
                state = torch._utils._get_obj_state(tensor)  # noqa: SLF001  # what torch's own writes
            return _rebuild_subclass, (type(tensor), tuple(about), memory, state)
        if tensors.is_coo_tensor(tensor):
            return _with_attributes(tensor, tensors.rebuild_coo, tensors.describe_coo(tensor))
        if hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local"):
            raise TypeError(
                "a DTensor is one shard of a distributed tensor; send its to_local() or "
                "full_tensor()"
            )
        return NotImplemented  # torch's own way: quantized, nested, compressed and other subclasses

    def _described(self, tensor: torch.Tensor) -> tuple[tensors.Dense, _Memory | bytearray]:
        about, flat = tensors.describe(tensor, self.device_type)
        kind = BufferKind.TENSOR if flat.device.type == "cpu" else BufferKind.DEVICE
        return about, self._memory(Buffer(kind, flat, flat), tensor)

    def _reduce_array(self, array: Any) -> Any:
        memory: _Memory | bytearray
        if array.nbytes <= _IN_BAND_MAX_NBYTES:
            order, key = tensors.array_key(array)
            memory = self._shared(key, lambda: bytearray(array.tobytes("A")))
        else:
            order, flat, owner = tensors.describe_array(array)
            memory = self._memory(Buffer(BufferKind.TENSOR, owner, flat), flat)
        return tensors.rebuild_array, (memory, array.dtype, array.shape, order)

    def _memory(self, buffer: Buffer, source: torch.Tensor) -> _Memory | bytearray:
        return self._shared(tensors.memory_key(source, buffer.flat), lambda: _Memory(buffer))

    def _shared(
        self, key: tuple[Any, ...] | None, make: Callable[[], _Memory | bytearray]
    ) -> _Memory | bytearray:
        """Return the same object for all members with exactly the same bytes; pickle keeps it."""
        if key is None:
            return make()
        if self.memories is None:
            self.memories = {}
        found = self.memories.get(key)
        if found is None:
            found = self.memories[key] = make()
        return found

    def _reduce_by_value(self, obj: Any) -> Any:
        if self.kept is not None:
            self.kept.append(obj)
            return _kept_at, (len(self.kept) - 1,)
        if self._by_value is None:
            from objcomm._codecs import by_value  # noqa: PLC0415  # most streams never need it

            self._by_value = by_value.Pickler(self.sink)
        return self._by_value.reduced(obj)


def _pickler() -> _Pickler:
    # Not in an ``__init__``, which would cost as much as pickling a small object.
    sink = _Sink()
    sink.buffers = []
    pickler = _Pickler(sink, 5, buffer_callback=sink.take)
    pickler.sink = sink
    return pickler


def _is_importable(obj: Any) -> bool:
    """Return whether a receiver that imports the same modules finds the same object by its name."""
    if obj in _SINGLETON_TYPES:
        return True
    found: Any = _module(getattr(obj, "__module__", None) or "")
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _module(name: str) -> Any:
    """Return the module with that name, importing it if necessary, as pickle itself does."""
    if name in sys.modules or not name:
        return sys.modules.get(name)
    try:
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001  # there is none, as for generated classes
        return None


def _reduce_dtype(dtype: Any) -> Any:
    """Send a dtype as plain data if that loses nothing; numpy's own state is not validated."""
    try:
        return array_dtypes.array_dtype_named, (array_dtypes.array_dtype_name(dtype),)
    except (TypeError, ValueError):
        return NotImplemented


def _usual(_: Any) -> Any:
    return NotImplemented


def _reduce_of_numpy(obj: Any) -> Any:
    return _reduce_limits(obj) if type(obj).__name__ == "finfo" else NotImplemented


def _reduce_limits(limits: Any) -> Any:
    """Reduce a ``finfo`` or ``iinfo``; torch's give their dtype as a string."""
    dtype = limits.dtype
    return type(limits), (tensors.dtype_named(dtype) if type(dtype) is str else dtype,)


def _reduce_view(view: memoryview) -> Any:
    made = view.format, view.shape
    try:
        _as_shaped(view, *made)  # as on the receiver
    except (TypeError, ValueError) as error:
        raise TypeError(
            "a memoryview can be sent only if it is contiguous, in C order and of a native format "
            f"({error}); send bytes(view)"
        ) from error
    return _as_shaped, (pickle.PickleBuffer(view), *made)


def _as_shaped(memory: Any, form: Any, shape: Any) -> memoryview:
    flat = memoryview(memory).cast("B")
    return flat if (form, shape) == ("B", flat.shape) else flat.cast(form, shape)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """Send a storage as a tensor; torch cannot read what its own reduction writes."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return _storage_of, (flat.set_(storage),)


def _storage_of(flat: torch.Tensor) -> torch.UntypedStorage:
    storage = flat.untyped_storage()
    is_whole = storage.nbytes() == flat.numel()
    return storage if is_whole else flat.clone().untyped_storage()


def _reduce_exported(obj: Any) -> Any:
    """Use torch's functions for files, because it cannot read its own pickle of such a program."""
    if type(obj).__name__ != "ExportedProgram":
        return NotImplemented
    with io.BytesIO() as file:
        torch.export.save(obj, file)
        return _load_exported, (file.getvalue(),)


def _load_exported(saved: bytes) -> Any:
    return torch.export.load(io.BytesIO(saved))


_REDUCE: dict[type, Callable[[Any], Any]] = {
    torch.finfo: _reduce_limits,
    torch.iinfo: _reduce_limits,
    torch.UntypedStorage: _reduce_storage,
    memoryview: _reduce_view,
}
# Classes in modules that may not have been imported.
_REDUCE_BY_MODULE: dict[str, Callable[[Any], Any]] = {
    "numpy": _reduce_of_numpy,
    "numpy.dtypes": _reduce_dtype,
    "torch.export.exported_program": _reduce_exported,
}


@functools.lru_cache(maxsize=256)
def _is_asked_while_empty(kind: Any) -> bool:
    """Return whether unpickling calls ``__getattr__`` for ``__setstate__`` on an empty object."""
    names = {name for base in kind.__mro__ for name in vars(base)}  # not those of its metaclass
    return "__getattr__" in names and "__setstate__" not in names and not issubclass(kind, type)


def _reduce_by_state(obj: Any) -> Any:
    """Reduce as Python does, without looking up ``__setstate__`` on an object without attributes.

    If its ``__getattr__`` is ``dict.get``, the lookup returns None. If it uses an attribute, the
    lookup never ends.
    """
    if type(obj) in copyreg.dispatch_table:
        return NotImplemented
    reduced = obj.__reduce_ex__(5)
    if type(reduced) is not tuple or len(reduced) < 3 or reduced[2] is None:  # noqa: PLR2004  # the state
        return reduced
    *parts, set_state = (*reduced, *[None] * 3)[:6]
    return *parts, set_state or _set_state


def _set_state(obj: Any, state: Any) -> None:
    """Set an object's state as pickle does for classes without ``__setstate__``."""
    state, slots = state if type(state) is tuple and len(state) == 2 else (state, None)  # noqa: PLR2004  # as pickle
    if state:
        obj.__dict__.update(state)
    for name, value in (slots or {}).items():
        object.__setattr__(obj, name, value)


def _same(buffer: Any) -> Any:
    # Pickle memoizes the result of a call, but not the buffer itself.
    return buffer


def _rebuild_tensor(about: tuple[Any, ...], flat: tensors.Memory) -> torch.Tensor:
    return tensors.rebuild(tensors.Dense(*about), flat)


def _rebuild_subclass(
    kind: type[torch.Tensor], about: tuple[Any, ...], flat: tensors.Memory, state: Any
) -> Any:
    dense = tensors.Dense(*about)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # as torch's own does
        made = tensors.rebuild(dense._replace(requires_grad=False), flat).as_subclass(kind)
        made.requires_grad_(dense.requires_grad)  # only now: it is a leaf, not derived from one
    return torch._tensor._rebuild_from_type_v2(_same, kind, (made,), state)  # noqa: SLF001  # sets it


def _with_attributes(tensor: torch.Tensor, *rebuilt: Any) -> Any:
    attributes = vars(tensor)
    return (*rebuilt, attributes, None, None, _set_attributes) if attributes else rebuilt


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    # Tensor.__setstate__ expects something else.
    vars(tensor).update(attributes)


def _can_pickle(obj: object) -> bool:
    try:
        _pickler().dump(obj)
    except Exception:  # noqa: BLE001  # the question is only whether; the caller reports it
        return False
    return True
