"""``standin``: a type of device that is as strict as an accelerator, and needs none.

It is torch's key for devices that torch does not know (PrivateUse1), with kernels in Python. A
tensor on it is a plain ``torch.Tensor`` with an address that no process has mapped. Its bytes are
in CPU memory beside it, which only the kernels here reach: whoever takes the address for the CPU's
ends by SIGSEGV, and whoever reads a value without a copy gets an error.

There are several devices. Each thread has a current one, and on each a current stream, as with
CUDA. Nothing is computed later, but what is queued is noted, and checked: what one stream has
written, no other may use before it has waited.

Torch's device guard for Python knows one device and no streams. So ``torch.accelerator`` and
``Tensor.to`` ask this module instead, which is ``torch.standin``, too. What only C++ decides stays:
``torch.tensor(..., device="standin")`` takes device 0, and ``backward`` works there alone.
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

# Not canonical on x86-64, and beyond what aarch64 maps: no CPU memory can ever lie there.
_FIRST_ADDRESS = 0x00F0_0000_0000_0000
_ADDRESSES_EACH = 1 << 40  # so the memory of one tensor is never taken for another's

_REDISPATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Queued(NamedTuple):
    """One thing that was queued on a stream.

    Attributes:
        device: its index.
        stream: the stream's number there; 0 is the default one.
        name: the operator's, such as ``aten::add.out``, or what the backend calls it.
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
    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_EXTENSION = 12  # kDLExtDev, which torch takes for PrivateUse1
_UNSIGNED = 1  # kDLUInt

_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Memory:
    """One piece of a device's memory.

    Attributes:
        content: its bytes, where the CPU can reach them.
        written: the stream that has last written here, and how far that was then.
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
        """A flat tensor that lies at an address, as torch may know it."""
        self._lent.tensor = _DLTensor(
            address, _EXTENSION, self.index, 1, _UNSIGNED, 8, 1, self._shape, None, 0
        )
        capsule = _new_capsule(ctypes.addressof(self._lent), b"dltensor", None)
        # The one way for Python to make a plain tensor with a device and an address.
        flat: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
        self._storage = StorageWeakRef(flat.untyped_storage())
        return flat

    @property
    def is_free(self) -> bool:
        """Whether no tensor is left there.

        Torch is asked: it could tell by a call, but Python can't be called where an error of C++
        lets tensors go.
        """
        return self._storage is not None and self._storage.expired()


class Stream(torch.Stream):
    """A queue of the device ``index``, of its own; as a context, the current one in a block."""

    def __new__(cls, index: int | None = None, *, number: int | None = None) -> Self:
        devices = _devices()
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
        _devices().here.entered.append(before)
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        index, stream = _devices().here.entered.pop()
        set_stream(stream)
        set_device(index)

    def wait_stream(self, other: torch.Stream) -> None:
        """What is queued here from now on begins after all that ``other`` has."""
        _devices().order(_key(other), _key(self))

    def synchronize(self) -> None:
        """Wait on the CPU for all that is queued here."""
        _devices().finish(_key(self))

    def query(self) -> bool:
        """Whether all of it has been done: it always has."""
        return True


class _Here(threading.local):
    """What is current in a thread; a new one begins with device 0 and its default streams."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, torch.Stream] = {}
        self.entered: list[tuple[int, torch.Stream]] = []


class _Devices:
    """All devices of this process.

    Attributes:
        memories: what is allocated, by address.
        contexts: devices that were made to hold something, or to run something.
        is_initialized: whether anybody has asked which device is current, or changed it.
        room: how many bytes may lie on a device at a time, if not any number.
        allocated: how many pieces of memory were ever taken there.
        queued: the newest of what was queued.
    """

    def __init__(self) -> None:
        self.here = _Here()
        self.memories: dict[int, Memory] = {}
        self.contexts: set[int] = set()
        self.is_initialized = False
        self.room: dict[int, int] = {}
        self.allocated: Counter[int] = Counter()
        self.queued: deque[Queued] = deque(maxlen=10_000)
        self.stream_numbers = itertools.count(1)
        self._addresses = itertools.count(_FIRST_ADDRESS, _ADDRESSES_EACH)
        # Held by whoever looks at, or changes, more than one of these: threads share a stream.
        self._lock = threading.RLock()
        # How far each stream is, how far each has waited for others, and the CPU for each.
        self._reached: Counter[_Key] = Counter()
        self._waited: dict[_Key, Counter[_Key]] = {}
        self._finished: Counter[_Key] = Counter()

    def allocate(self, nbytes: int, index: int) -> torch.Tensor:
        """A flat tensor over fresh memory, with zeros in it."""
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
        """How many bytes of a device some tensor holds."""
        for address, memory in list(self.memories.items()):
            if memory.is_free:
                self.memories.pop(address, None)
        return sum(each.nbytes for each in list(self.memories.values()) if each.index == index)

    def memory(self, tensor: torch.Tensor) -> Memory:
        """Where a tensor of this type of device lies."""
        return self.memories[tensor.untyped_storage().data_ptr()]

    def content(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the CPU over the same bytes."""
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
        """Queue one step on a stream: the current one of the tensors' device if none is named.

        Raises:
            RuntimeError: another stream has written what is used, and this one has not waited.
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
                self.queued.append(Queued(*stream, name))
                self._reached[stream] += 1
            for tensor in writes:
                self.wrote(tensor, on)

    def wrote(self, tensor: torch.Tensor, on: torch.Stream | None = None) -> None:
        """The newest step of a stream has written here."""
        stream = _key(current_stream(tensor.device.index) if on is None else on)
        with self._lock:
            self.memory(tensor).written = stream, self._reached[stream]

    def order(self, first: _Key, then: _Key) -> None:
        """What ``then`` queues from now on comes after all that ``first`` has."""
        with self._lock:
            waited = self._waited.setdefault(then, Counter())
            waited |= self._waited.get(first, Counter())
            waited[first] = self._reached[first]

    def finish_all(self, index: int) -> None:
        """The CPU waits for all that a device has."""
        with self._lock:
            for stream in list(self._reached):
                if stream[0] == index:
                    self.finish(stream)

    def finish(self, stream: _Key) -> None:
        """The CPU waits for all that a stream has."""
        with self._lock:
            self._finished |= self._waited.get(stream, Counter())
            self._finished[stream] = self._reached[stream]


@functools.cache
def _devices() -> _Devices:
    return _Devices()


def _key(stream: torch.Stream) -> _Key:
    return stream.device_index, stream.stream_id


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None,
    index: int | None,
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    """An uninitialized tensor, as far as anybody may know."""
    dtype = dtype or torch.get_default_dtype()
    like = torch.empty_strided(size, stride, dtype=dtype, device="meta") if stride else None
    like = torch.empty(size, dtype=dtype, device="meta") if like is None else like
    nbytes = like.untyped_storage().nbytes()
    flat = _devices().allocate(nbytes, current_device() if index is None else index)
    return _alias(flat.view(dtype), like.size(), like.stride(), 0)


def _alias(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Another view of the same memory: the CPU's kernel for that touches none."""
    made: torch.Tensor = torch.ops.aten.as_strided.default.redispatch(
        _REDISPATCHED, tensor, size, stride, offset
    )
    return made


# The kernels of torch's operators. Those with a signature of their own concern memory; all others
# are the CPU's, on the bytes beside.


def _empty_memory_format(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: object,
) -> torch.Tensor:
    return _empty(size, dtype, device.index if device else None)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: object,
) -> torch.Tensor:
    return _empty(size, dtype, device.index if device else None, stride)


def _copy_from(
    tensor: torch.Tensor,
    into: torch.Tensor,
    non_blocking: bool = False,  # noqa: FBT001, FBT002  # torch's signature
) -> torch.Tensor:
    """An explicit copy: the one way by which bytes leave a device, or come there."""
    devices = _devices()
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
    """Give it other memory, without what was there: torch resizes only what it then fills."""
    tensor.data = _empty(size, tensor.dtype, tensor.device.index)
    return tensor


def _by_the_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any other operator."""
    devices = _devices()
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
            beside[id(each)] = torch.device("cpu")  # type: ignore[assignment]  # no tensor
    lowered = [beside.get(id(each), each) for each in leaves]
    cpu_args, cpu_kwargs = pytree.tree_unflatten(lowered, structure)

    def lift(result: Any) -> Any:
        return _lifted(result, mine, beside, device) if isinstance(result, torch.Tensor) else result

    return pytree.tree_map(lift, op(*cpu_args, **cpu_kwargs))


def _common_device(op: Any, tensors: list[torch.Tensor], leaves: list[Any]) -> torch.device | None:
    """Where the operator's result lies; as on CUDA, a number may come from anywhere."""
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
    """What the CPU's kernel returned: on the device an argument, a view of one, or a new tensor."""
    devices = _devices()
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
    made = _empty(result.size(), result.dtype, device.index if device else None, result.stride())
    devices.content(made).copy_(result)
    devices.wrote(made)
    return made


# What a C++ device guard would tell torch.


def current_device() -> int:
    """The current device's index in this thread; to ask is to initialise, as torch does it."""
    _devices().is_initialized = True
    return _devices().here.index


def set_device(device: torch.device | str | int) -> None:
    """Change it."""
    index = device if isinstance(device, int) else torch.device(device).index
    if not 0 <= index < COUNT:
        raise RuntimeError(f"there is no {NAME}:{index}, only {COUNT} devices")
    _devices().is_initialized = True
    _devices().here.index = index


def current_stream(index: int | None = None) -> torch.Stream:
    """The stream on which this thread queues what concerns a device."""
    devices = _devices()
    at = current_device() if index is None else index
    devices.is_initialized = True
    return devices.here.streams.get(at) or Stream(at, number=0)


def set_stream(stream: torch.Stream) -> None:
    """Make it the current one of its device, and that the current device, as torch does."""
    _devices().here.streams[stream.device_index] = stream
    set_device(stream.device_index)


def stream(stream: Stream | None) -> contextlib.AbstractContextManager[object]:
    """A block in which a stream is the current one; no change for None."""
    return contextlib.nullcontext() if stream is None else stream


def synchronize(index: int | None = None) -> None:
    """Wait for all streams of a device."""
    _devices().finish_all(current_device() if index is None else index)


def is_available() -> bool:
    """Whether there is such a device: always."""
    return True


def device_count() -> int:
    """How many there are."""
    return COUNT


def is_initialized() -> bool:
    """Whether this process has used one, or has asked which is current."""
    return _devices().is_initialized or bool(_devices().contexts)


def memory_allocated(index: int) -> int:
    """How many bytes of a device are in use."""
    return _devices().in_use(index)


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(_seed: int) -> None:
    """Nothing: its random numbers are the CPU's."""


# What only tests ask.


def contexts() -> set[int]:
    """The devices that this process has used, whether for memory or for a stream."""
    return set(_devices().contexts)


def allocations(index: int) -> int:
    """How many pieces of memory were ever taken on a device."""
    return _devices().allocated[index]


def queued() -> list[Queued]:
    """What was queued since this was last asked, oldest first."""
    noted = list(_devices().queued)
    _devices().queued.clear()
    return noted


@contextlib.contextmanager
def room(index: int, nbytes: int) -> Iterator[None]:
    """A block in which only so many bytes more can be allocated on a device."""
    _devices().room[index] = memory_allocated(index) + nbytes
    yield
    del _devices().room[index]


def content(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU over the bytes of one on a device: how its backend reaches them."""
    return _devices().content(tensor)


def launch(
    name: str,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    on: torch.Stream | None = None,
) -> None:
    """Queue a step of the backend's; see ``_Devices.launch``."""
    _devices().launch(name, reads, writes, on)


def wait_for(other: torch.Stream) -> None:
    """The current stream waits for another one of its device."""
    _devices().order(_key(other), _key(current_stream(other.device_index)))


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return index in _devices().contexts


@functools.cache
def set_up() -> None:
    """Make this process know the device; nothing undoes it."""
    # The guard in C++ that torch has for Python answers 0 and the default stream whatever is
    # current, so who asks it from Python is answered here. Nothing in C++ need ask.
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


@functools.cache
def _register_kernels() -> tuple[torch.library.Library, torch.library.Library]:
    """Kept, because a library that is let go takes its kernels along."""
    aten, all_others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for name, kernel in {
        "empty.memory_format": _empty_memory_format,
        "empty_strided": _empty_strided,
        "_copy_from": _copy_from,
        "_copy_from_and_resize": _copy_from,
        "_local_scalar_dense": _refused,
        "equal": _refused,
        "resize_": _resize,
    }.items():
        aten.impl(name, kernel, "PrivateUse1")
    all_others.fallback(_by_the_cpu, "PrivateUse1")
    # Torch would resolve a lazy conjugate by a copy of it, and that by a copy, and so on.
    for lazily in ("Conjugate", "Negative"):
        aten.impl("_copy_from", torch.library.fallthrough_kernel, lazily)
    return aten, all_others


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        set_device(index)
    return before


def _on_the_current_device(to: Any) -> Any:
    """``Tensor.to`` for which a device without an index is the current one."""

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
