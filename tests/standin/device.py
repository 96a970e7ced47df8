"""``standin``: a device type that is as strict as an accelerator, and needs none.

It is torch's key for devices that torch does not know (PrivateUse1), with kernels in Python. A
tensor on it is a plain ``torch.Tensor`` whose address no process has mapped. Its bytes are in
separate CPU memory, which only the kernels here reach: using the address as a CPU address ends the
process with SIGSEGV, and reading a value without a copy raises.

There are several devices. Each thread has a current device, and on each device a current stream, as
with CUDA. Nothing is deferred, but all queued operations are recorded and checked: a stream must
wait before it uses what another one has written.

Torch's device guard for Python knows one device and no streams. So ``torch.accelerator`` and
``Tensor.to`` ask this module instead, which is also ``torch.standin``. What only C++ decides cannot
be changed: ``torch.tensor(..., device="standin")`` uses device 0, and ``backward`` works only
there.
"""

import contextlib
import ctypes
import functools
import itertools
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = "standin"
COUNT = 3

_Key = tuple[int, int]  # a stream: its device's index, and its number there

# Not canonical on x86-64, and beyond what aarch64 maps: never an address of CPU memory.
_FIRST_ADDRESS = 0x00F0_0000_0000_0000
_ADDRESSES_EACH = 1 << 40  # so no tensor's memory is mistaken for another's

_REDISPATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Queued(NamedTuple):
    """One operation that was queued on a stream.

    Attributes:
        device: the device's index.
        stream: the stream's number on the device; 0 is the default stream.
        name: the operator's name, such as ``aten::add.out``, or the backend's name for it.
    """

    device: int
    stream: int
    name: str


# DLPack's C structs, version 0: https://dmlc.github.io/dlpack/latest/c_api.html
class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_size_t),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_EXTENSION = 12  # kDLExtDev, which is PrivateUse1 in torch
_UNSIGNED = 1  # kDLUInt

_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Memory:
    """One allocation on a device.

    Attributes:
        content: its bytes, in CPU memory.
        written: the stream that wrote it last, and the stream's position then.
    """

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.nbytes = nbytes
        self.content = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        self.written: tuple[_Key, int] = ((index, 0), 0)
        self._shape = (ctypes.c_int64 * 1)(nbytes)
        self._lent = _DLManagedTensor()
        self._storage: StorageWeakRef | None = None

    def lend(self, address: int) -> torch.Tensor:
        """Return a flat tensor at an address that torch gets to know."""
        self._lent.tensor = _DLTensor(
            address, _EXTENSION, self.index, 1, _UNSIGNED, 8, 1, self._shape, None, 0
        )
        capsule = _new_capsule(ctypes.addressof(self._lent), b"dltensor", None)
        # The only way for Python to create a plain tensor with a device and an address.
        flat: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
        self._storage = StorageWeakRef(flat.untyped_storage())
        return flat

    @property
    def is_free(self) -> bool:
        """Whether no tensor uses it any more.

        This asks torch. A callback from torch would not do, because Python can't be called while a
        C++ exception destroys tensors.
        """
        return self._storage is not None and self._storage.expired()


class Stream(torch.Stream):
    """A new queue of the device ``index``; as a context, the current one in a block."""

    def __new__(cls, index: int | None = None, *, number: int | None = None) -> Self:
        devices = all_devices()
        at = current_device() if index is None else index
        if number is None:
            devices.contexts.add(at)
        return super().__new__(
            cls,
            stream_id=next(devices.stream_numbers) if number is None else number,
            device_index=at,
            device_type=torch._C._autograd.DeviceType.PrivateUse1.value,
        )

    def __enter__(self) -> Self:
        before = (current_device(), current_stream(self.device_index))
        all_devices().here.entered.append(before)
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        index, stream = all_devices().here.entered.pop()
        set_stream(stream)
        set_device(index)

    def wait_stream(self, other: torch.Stream) -> None:
        """Let what is queued here from now on begin after everything queued on ``other``."""
        all_devices().order(_key(other), _key(self))

    def synchronize(self) -> None:
        """Wait on the CPU for everything queued here."""
        all_devices().finish(_key(self))

    def query(self) -> bool:
        """Return True: everything queued is done already."""
        return True


class _Here(threading.local):
    """A thread's current device and streams, at first device 0 and the default streams."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, torch.Stream] = {}
        self.entered: list[tuple[int, torch.Stream]] = []


class _Devices:
    """All devices of this process.

    Attributes:
        memories: the allocations, by address.
        contexts: devices that have held or run something.
        is_initialized: whether the current device has been queried or changed.
        room: limit of the bytes on each device, if there is one.
        allocated: total number of allocations per device.
        queued: the most recent queued operations.
        busy: streams that must be left alone; see ``left_alone``.
    """

    def __init__(self) -> None:
        self.here = _Here()
        self.memories: dict[int, Memory] = {}
        self.contexts: set[int] = set()
        self.is_initialized = False
        self.room: dict[int, int] = {}
        self.allocated: Counter[int] = Counter()
        self.queued: deque[Queued] = deque(maxlen=10_000)
        self.busy: set[_Key] = set()
        self.stream_numbers = itertools.count(1)
        self._addresses = itertools.count(_FIRST_ADDRESS, _ADDRESSES_EACH)
        # Held while more than one of these is read or changed: threads share a stream.
        self._lock = threading.RLock()
        # Each stream's position, the positions it has waited for, and the position the CPU has
        # waited for.
        self._reached: Counter[_Key] = Counter()
        self._waited: dict[_Key, Counter[_Key]] = {}
        self._finished: Counter[_Key] = Counter()

    def allocate(self, nbytes: int, index: int) -> torch.Tensor:
        """Return a flat tensor over new memory, filled with zeros."""
        if not 0 <= index < COUNT:
            raise RuntimeError(f"there is no {NAME}:{index}, only {COUNT} devices")
        with self._lock:
            if self.in_use(index) + nbytes > self.room.get(index, sys.maxsize):
                raise torch.OutOfMemoryError(f"{NAME}:{index} has no room for {nbytes} bytes")
            self.contexts.add(index)
            self.allocated[index] += 1
            address = next(self._addresses)
            self.memories[address] = memory = Memory(index, nbytes)
        return memory.lend(address)

    def in_use(self, index: int) -> int:
        """Return the bytes of a device that tensors hold."""
        for address, memory in list(self.memories.items()):
            if memory.is_free:
                self.memories.pop(address, None)
        return sum(each.nbytes for each in list(self.memories.values()) if each.index == index)

    def memory(self, tensor: torch.Tensor) -> Memory:
        """Return the memory of a tensor on this device type."""
        return self.memories[tensor.untyped_storage().data_ptr()]

    def content(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor over the same bytes."""
        flat = self.memory(tensor).content.untyped_storage()
        like = torch.empty(0, dtype=tensor.dtype, device="cpu")
        like.set_(flat, tensor.storage_offset(), tensor.size(), tensor.stride())
        like = like.conj() if tensor.is_conj() else like
        return torch._neg_view(like) if tensor.is_neg() else like

    def launch(
        self,
        name: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        on: torch.Stream | None = None,
    ) -> None:
        """Queue a step on a stream; the default is the current one of the tensors' device.

        Raises:
            RuntimeError: another stream has written a tensor, and this one has not waited.
        """
        with self._lock:
            for tensor in (*reads, *writes):
                index = tensor.device.index
                stream = _key(current_stream(index) if on is None else on)
                writer, reached = self.memory(tensor).written
                waited = self._waited.get(stream, Counter())[writer]
                if writer != stream and max(waited, self._finished[writer]) < reached:
                    raise RuntimeError(
                        f"{name} on stream {stream[1]} of {NAME}:{stream[0]} uses what stream "
                        f"{writer[1]} of {NAME}:{writer[0]} has written, and has not waited for it"
                    )
            for index in {tensor.device.index for tensor in (*reads, *writes)}:
                self.contexts.add(index)
                stream = _key(current_stream(index) if on is None else on)
                self.leave_alone(stream)
                self.queued.append(Queued(*stream, name))
                self._reached[stream] += 1
            for tensor in writes:
                self.wrote(tensor, on)

    def wrote(self, tensor: torch.Tensor, on: torch.Stream | None = None) -> None:
        """Record that the newest step of a stream has written the tensor."""
        stream = _key(current_stream(tensor.device.index) if on is None else on)
        with self._lock:
            self.memory(tensor).written = stream, self._reached[stream]

    def leave_alone(self, *streams: _Key) -> None:
        """Raise if one of these streams is busy."""
        for number, at in self.busy.intersection(streams):
            raise RuntimeError(f"stream {at} of {NAME}:{number} is busy with other work")

    def order(self, first: _Key, then: _Key) -> None:
        """Let what ``then`` queues from now on come after everything queued on ``first``."""
        with self._lock:
            self.leave_alone(first, then)
            waited = self._waited.setdefault(then, Counter())
            waited |= self._waited.get(first, Counter())
            waited[first] = self._reached[first]

    def finish_all(self, index: int) -> None:
        """Let the CPU wait for everything queued on a device."""
        with self._lock:
            self.leave_alone(*(each for each in self.busy if each[0] == index))
            for stream in list(self._reached):
                if stream[0] == index:
                    self.finish(stream)

    def finish(self, stream: _Key) -> None:
        """Let the CPU wait for everything queued on a stream."""
        with self._lock:
            self.leave_alone(stream)
            self._finished |= self._waited.get(stream, Counter())
            self._finished[stream] = self._reached[stream]


@functools.cache
def all_devices() -> _Devices:
    """Return the devices of this process."""
    return _Devices()


def _key(stream: torch.Stream) -> _Key:
    return stream.device_index, stream.stream_id


# The kernels of torch's operators. Those with their own signature concern memory; all others are
# the CPU's, applied to the bytes in CPU memory.


def _empty(
    size: Sequence[int],
    stride: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: object,
) -> torch.Tensor:
    """Return a tensor that callers must treat as uninitialized."""
    dtype = dtype or torch.get_default_dtype()
    if stride:
        like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    else:
        like = torch.empty(size, dtype=dtype, device="meta")
    index = None if device is None else device.index
    nbytes = like.untyped_storage().nbytes()
    flat = all_devices().allocate(nbytes, current_device() if index is None else index)
    return _alias(flat.view(dtype), like.size(), like.stride(), 0)


def _alias(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Return another view of the same memory; the CPU's kernel for it accesses none."""
    made: torch.Tensor = torch.ops.aten.as_strided.default.redispatch(
        _REDISPATCHED, tensor, size, stride, offset
    )
    return made


def _copy_from(
    tensor: torch.Tensor,
    into: torch.Tensor,
    non_blocking: bool = False,  # noqa: FBT001, FBT002  # torch's signature
) -> torch.Tensor:
    """Copy explicitly: the only way for bytes to leave a device or get there."""
    devices = all_devices()
    there = [each for each in (tensor, into) if each.device.type == NAME]
    reads = [tensor] if tensor.device.type == NAME else []
    name = f"copy from {tensor.device.type} to {into.device.type}"
    devices.launch(name, reads, there[len(reads) :])
    source, target = (
        devices.content(each) if each.device.type == NAME else each for each in (tensor, into)
    )
    target.copy_(source)
    if into.device.type == "cpu" and not non_blocking:
        devices.finish(_key(current_stream(tensor.device.index)))
    return into


def _refused(tensor: torch.Tensor, *_: object) -> Any:
    raise RuntimeError(f"the CPU would read memory of {tensor.device}: copy it first, by .cpu()")


def _resize(tensor: torch.Tensor, size: Sequence[int], **_: object) -> torch.Tensor:
    """Give it new memory without the old content: torch resizes only what it then fills."""
    tensor.data = _empty(size, dtype=tensor.dtype, device=tensor.device)
    return tensor


def _by_the_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any other operator."""
    devices = all_devices()
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    mine = [each for each in tensors if each.device.type == NAME]
    device = _common_device(op, tensors, leaves)
    if not op.is_view:
        written = [
            args[at] if at < len(args) else kwargs.get(argument.name)
            for at, argument in enumerate(op._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        devices.launch(op.name(), mine, pytree.tree_leaves(written))
    beside = {id(each): devices.content(each) for each in mine}
    for each in leaves:
        if isinstance(each, torch.device):
            beside[id(each)] = torch.device("cpu")  # type: ignore[assignment]  # not a tensor
    lowered = [beside.get(id(each), each) for each in leaves]
    cpu_args, cpu_kwargs = pytree.tree_unflatten(lowered, structure)

    def lift(result: Any) -> Any:
        return _lifted(result, mine, beside, device) if isinstance(result, torch.Tensor) else result

    return pytree.tree_map(lift, op(*cpu_args, **cpu_kwargs))


def _common_device(op: Any, tensors: list[torch.Tensor], leaves: list[Any]) -> torch.device | None:
    """Return the result's device; as on CUDA, a number may be on any device."""
    where = {each.device for each in tensors if each.dim() or each.device.type == NAME}
    if len(where) > 1:
        raise RuntimeError(f"{op}: expected all tensors to be on the same device, not on {where}")
    asked_for = (each for each in leaves if isinstance(each, torch.device))
    return next(iter(where), None) or next(asked_for, None)


def _lifted(
    result: torch.Tensor,
    mine: list[torch.Tensor],
    beside: dict[int, torch.Tensor],
    device: torch.device | None,
) -> torch.Tensor:
    """Move a CPU kernel's result to the device: an argument, a view of one, or a new tensor."""
    devices = all_devices()
    for original in mine:
        if beside[id(original)] is result:
            if result.size() != original.size():
                _resize(original, result.size())
                devices.content(original).copy_(result)
            return original
    for original in mine:
        content = devices.memory(original).content
        if content.numel() and content.data_ptr() == result.untyped_storage().data_ptr():
            whole = original
            if result.dtype != original.dtype:
                whole = _alias(original, (content.numel() // original.itemsize,), (1,), 0)
                whole = whole.view(result.dtype)
            return _alias(whole, result.size(), result.stride(), int(result.storage_offset()))
    made = _empty(result.size(), result.stride(), dtype=result.dtype, device=device)
    devices.content(made).copy_(result)
    devices.wrote(made)
    return made


# What a device guard in C++ would answer to torch.


def current_device() -> int:
    """Return this thread's current device index; initializes the device, as in torch."""
    all_devices().is_initialized = True
    return all_devices().here.index


def set_device(device: torch.device | str | int) -> None:
    """Change the current device."""
    index = device if isinstance(device, int) else torch.device(device).index
    if not 0 <= index < COUNT:
        raise RuntimeError(f"there is no {NAME}:{index}, only {COUNT} devices")
    all_devices().is_initialized = True
    all_devices().here.index = index


def current_stream(index: int | None = None) -> torch.Stream:
    """Return the stream on which this thread queues operations of a device."""
    devices = all_devices()
    at = current_device() if index is None else index
    devices.is_initialized = True
    return devices.here.streams.get(at) or Stream(at, number=0)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream current on its device, and that device current, as torch does."""
    all_devices().here.streams[stream.device_index] = stream
    set_device(stream.device_index)


def stream(stream: Stream | None) -> contextlib.AbstractContextManager[object]:
    """Make a stream current in a block; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream


def synchronize(index: int | None = None) -> None:
    """Wait for all streams of a device."""
    all_devices().finish_all(current_device() if index is None else index)


def is_available() -> bool:
    """Return True."""
    return True


def device_count() -> int:
    """Return the number of devices."""
    return COUNT


def is_initialized() -> bool:
    """Return whether this process has used a device, or asked which is current."""
    return all_devices().is_initialized or bool(all_devices().contexts)


def memory_allocated(index: int) -> int:
    """Return the bytes in use on a device."""
    return all_devices().in_use(index)


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(_seed: int) -> None:
    """Do nothing: its random numbers are the CPU's."""


# For tests only.


def contexts() -> set[int]:
    """Return the devices that this process has used, whether for memory or for a stream."""
    return set(all_devices().contexts)


def allocations(index: int) -> int:
    """Return the total number of allocations on a device."""
    return all_devices().allocated[index]


def queued() -> list[Queued]:
    """Return what was queued since the last call, oldest first."""
    noted = list(all_devices().queued)
    all_devices().queued.clear()
    return noted


@contextlib.contextmanager
def left_alone(stream: torch.Stream) -> Iterator[None]:
    """Fail whatever queues on a stream in the block, waits for it, or lets it wait."""
    all_devices().busy.add(_key(stream))
    yield
    all_devices().busy.discard(_key(stream))


@contextlib.contextmanager
def room(index: int, nbytes: int) -> Iterator[None]:
    """Let a device allocate only this many bytes more in the block."""
    all_devices().room[index] = memory_allocated(index) + nbytes
    yield
    del all_devices().room[index]


def content(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over a device tensor's bytes, as the backend uses it."""
    return all_devices().content(tensor)


def wait_for(other: torch.Stream) -> None:
    """Let the current stream wait for another one of its device."""
    all_devices().order(_key(other), _key(current_stream(other.device_index)))


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return index in all_devices().contexts


@functools.cache
def set_up() -> None:
    """Register the device in this process, permanently."""
    # torch's guard for Python is in C++ and always answers 0 and the default stream, so these
    # functions answer calls from Python instead. Nothing in C++ needs to ask.
    accelerator: Any = torch._C
    accelerator._accelerator_getDeviceIndex = current_device
    accelerator._accelerator_setDeviceIndex = lambda index: (
        set_device(index) if index >= 0 else None
    )
    accelerator._accelerator_exchangeDevice = _exchange_device
    accelerator._accelerator_maybeExchangeDevice = _exchange_device
    accelerator._accelerator_getStream = current_stream
    accelerator._accelerator_setStream = set_stream
    accelerator._accelerator_synchronizeDevice = synchronize
    torch.Tensor.to = _on_the_current_device(torch.Tensor.to)  # type: ignore[method-assign]
    backend_registration._setup_privateuseone_for_python_backend(
        NAME, sys.modules[__name__], _Hooks(), _Guard()
    )
    _register_kernels()
    # Torch creates the Python object of an operator at its first use. Two threads that do so may
    # free the one that the other uses (torch 2.13): of 300 processes in which six threads began by
    # calling ``record_stream``, 44 crashed, and none after this.
    for name in _USED_BY_THREADS:
        operator = getattr(torch.ops.aten, name)
        for overload in operator.overloads():
            getattr(operator, overload)


_USED_BY_THREADS = ("record_stream", "slice", "view", "narrow", "detach", "as_strided", "select")


@functools.cache
def _register_kernels() -> tuple[torch.library.Library, torch.library.Library]:
    """Return the libraries to keep, because deleting a library removes its kernels."""
    aten, all_others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for name, kernel in {
        "empty.memory_format": _empty,
        "empty_strided": _empty,
        "_copy_from": _copy_from,
        "_copy_from_and_resize": _copy_from,
        "_local_scalar_dense": _refused,
        "equal": _refused,
        "resize_": _resize,
    }.items():
        aten.impl(name, kernel, "PrivateUse1")
    all_others.fallback(_by_the_cpu, "PrivateUse1")
    # Torch would resolve a lazy conjugate by copying it, which copies it again, and so on.
    for lazily in ("Conjugate", "Negative"):
        aten.impl("_copy_from", torch.library.fallthrough_kernel, lazily)
    return aten, all_others


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        set_device(index)
    return before


def _on_the_current_device(to: Any) -> Any:
    """Return a ``Tensor.to`` for which a device without an index is the current one."""

    def indexed(argument: Any) -> Any:
        is_device = isinstance(argument, (str, torch.device))
        device = torch.device(argument) if is_device else None
        is_open = device is not None and device.type == NAME and device.index is None
        return torch.device(NAME, current_device()) if is_open else argument

    @functools.wraps(to)
    def converted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return to(
            tensor,
            *(indexed(each) for each in args),
            **{name: indexed(each) for name, each in kwargs.items()},
        )

    return converted
