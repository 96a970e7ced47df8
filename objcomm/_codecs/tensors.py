"""Tensors and arrays as plain attributes and flat memory, for every codec.

Only viewed elements are sent: one row of a large matrix costs one row. Values, dtype, shape, dense
strides, ``requires_grad`` and the device type are preserved. The device index is not, because the
sender's ``cuda:1`` means nothing on the receiver.
"""

import functools
import math
import re
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from objcomm._codecs.array_dtypes import (
    DIMENSIONS_MAX,
    array_dtype_named,  # noqa: F401  # earlier streams name it here
)
from objcomm._codecs.buffers import at_address
from objcomm.errors import DecodeError

if TYPE_CHECKING:
    import numpy as np

#: Received elements: a flat ``uint8`` tensor, or the bytes of a small array, which come in band.
Memory: TypeAlias = torch.Tensor | bytearray

_CPU = torch.device("cpu")


class Landing:
    """Where to place one message's tensors."""

    def __init__(self, device: torch.device | None) -> None:
        """Initialize the landing.

        Args:
            device: the device for all tensors, as in ``Codec.decode``; None keeps the device type
                of each.
        """
        self._device = device
        self._moved: dict[tuple[int, torch.device], tuple[Memory, torch.Tensor]] = {}

    def land(self, memory: Memory, device_type: str) -> torch.Tensor:
        """Move memory to its device, but only once, so that tied tensors stay tied.

        Raises:
            DecodeError: this rank has no such device.
        """
        try:
            device = self._device or torch.device(device_type)
            if isinstance(memory, bytearray):  # the tensor shares the memory of a small array
                flat = torch.frombuffer(memory, dtype=torch.uint8)
            else:
                flat = memory
            if flat.device.type == device.type and device.index in (None, flat.device.index):
                return flat
            key = id(memory), device
            if key not in self._moved:
                self._moved[key] = memory, flat.to(device)
        # torch does not know the type, or a module that it imports on first use is missing.
        except (RuntimeError, AssertionError, ImportError) as error:
            name = str(self._device or device_type)
            reason = f"a tensor belongs on device {name!r}, which this rank cannot use"
            raise DecodeError("tensor", f"{reason} ({error}); pass another device=") from error
        return self._moved[key][1]


class _Decoding(threading.local):
    """The landing of the message that this thread is decoding."""

    # Not a ContextVar, which the garbage collector may find half set; see ``_config``.
    landing: Landing | None = None


_decoding = _Decoding()


class landing:  # noqa: N801  # used as a function, like contextlib's
    """A block in which tensors land on ``device``, even in functions that a pickle calls by name.

    See ``Landing`` for the meaning of None.
    """

    __slots__ = ("_before", "_landing")

    def __init__(self, device: torch.device | None) -> None:
        self._landing = Landing(device)

    def __enter__(self) -> None:
        self._before, _decoding.landing = _decoding.landing, self._landing

    def __exit__(self, *raised: object) -> None:
        _decoding.landing = self._before


#: Dtypes by name. A stream's names are looked up here, so they can name nothing but a dtype.
DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with that name, as from ``dtype_name``.

    Raises:
        DecodeError: this version of torch has no such dtype.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise DecodeError("tensor", f"this torch has no dtype {name!r}")
    return dtype


_NUMEL_MAX = (1 << 63) - 1
_INTEGERS = frozenset({int})
_USUAL_DEVICE_TYPES = frozenset({"cpu", "cuda", "meta", "mps", "xpu"})
_DEVICE_TYPE = re.compile("[a-z][a-z0-9_]{0,31}")


_OWN_CLASSES = (torch.Tensor, torch.nn.Parameter)
_OWN_REDUCTIONS = tuple(kind.__reduce_ex__ for kind in _OWN_CLASSES)


class Dense(NamedTuple):
    """A strided tensor without its elements; every field is plain data."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None  # dimensions by decreasing stride; None means C order
    expanded: tuple[int, ...] | None  # the shape before stride-0 dimensions were dropped
    device_type: str
    requires_grad: bool
    is_parameter: bool


def is_plain_tensor(obj: object) -> bool:
    """Return whether ``obj`` is strided, and its class is exactly Tensor or Parameter."""
    return type(obj) in _OWN_CLASSES and _is_strided(obj)


def _is_strided(tensor: Any) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def is_plain_subclass(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is plain except for a class that adds attributes and methods.

    A class that overrides operations, or defines how it is pickled, may consist of anything.
    """
    kind = type(tensor)
    is_plain = (
        kind not in _OWN_CLASSES
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and kind.__reduce_ex__ in _OWN_REDUCTIONS
    )
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # as torch's own functions do
        return is_plain and _is_strided(tensor)


def describe(tensor: torch.Tensor, device_type: str | None) -> tuple[Dense, torch.Tensor]:
    """Split a plain tensor into its description and a flat ``uint8`` view of its elements.

    Args:
        tensor: see ``is_plain_tensor``.
        device_type: elements on a device of this type, or of one of several types joined by
            commas, stay there; all others are moved to the CPU.

    Returns:
        The description, and the elements in the description's order: the tensor's own memory if it
        is dense, otherwise a compact copy. A meta tensor has no elements.
    """
    elements = tensor.detach()
    expanded = None
    if 0 in elements.stride() and elements.numel() > 0:
        expanded = tuple(elements.shape)
        for dim, stride in enumerate(elements.stride()):
            if stride == 0:
                elements = elements.narrow(dim, 0, 1)
    elements = elements.resolve_conj().resolve_neg()
    order = None
    if not elements.is_contiguous():
        by_stride = sorted(range(elements.dim()), key=elements.stride, reverse=True)
        permuted = elements.permute(by_stride)
        if permuted.is_contiguous():
            elements, order = permuted, tuple(by_stride)
    about = Dense(
        dtype_name(tensor.dtype),
        tuple(elements.shape),
        order,
        expanded,
        tensor.device.type,
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
    )
    if tensor.is_meta:
        return about, torch.empty(0, dtype=torch.uint8, device="cpu")
    where = tensor.device.type
    if where != "cpu" and where not in (device_type or "").split(","):
        elements = elements.cpu()
    # ``as_strided``, because a one-element view may have any stride, and ``view`` would keep it.
    compact = elements.contiguous().as_strided((elements.numel(),), (1,))
    return about, compact.view(torch.uint8)


def memory_key(tensor: torch.Tensor, flat: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a key that is equal for tensors whose elements are sent only once, or None.

    Tied weights are such tensors. The address of a copy, made to be compact or to leave a device,
    would not identify the original, so the key has the original's. The caller must keep the tensor
    alive with the key.

    Args:
        tensor: any tensor.
        flat: its elements, from ``describe``.
    """
    at = tensor.data_ptr() if tensor.numel() else 0
    if not at:  # some devices report no addresses, and 0 is never valid
        return None
    if flat.device == tensor.device and flat.data_ptr() == at:
        return flat.device, at, flat.numel()
    seen_as = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, at, *seen_as


def rebuild(about: Dense, flat: Memory) -> torch.Tensor:
    """Rebuild the tensor passed to ``describe``, over the memory ``flat``.

    Raises:
        DecodeError: its dtype or sizes are invalid, or its device does not exist here.
    """
    _check(about)
    dtype = dtype_named(about.dtype)
    with torch.inference_mode(mode=False):
        if about.device_type == "meta":
            tensor = torch.empty(about.shape, dtype=dtype, device="meta")
        else:
            landed = (_decoding.landing or Landing(None)).land(flat, about.device_type)
            tensor = landed.view(dtype).view(about.shape)
        if about.order is not None:
            inverse = sorted(range(len(about.order)), key=about.order.__getitem__)
            tensor = tensor.permute(inverse)
        if about.expanded is not None:
            tensor = tensor.expand(about.expanded)
        if about.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=about.requires_grad)
        return tensor.requires_grad_(about.requires_grad) if about.requires_grad else tensor


def _check(about: Any) -> None:
    """Reject a description whose values torch might iterate over, or multiply, at great cost."""
    is_plain = (
        type(about.dtype) is str
        and type(about.requires_grad) is bool
        and type(about.is_parameter) is bool
        and type(about.device_type) is str
        and (about.device_type in _USUAL_DEVICE_TYPES or _DEVICE_TYPE.fullmatch(about.device_type))
    )
    if not is_plain:
        raise DecodeError("tensor", "its description is not plain data")
    check_shape("tensor", about.shape)
    if about.expanded is not None:
        check_shape("tensor", about.expanded)
    order = about.order
    if order is not None and (
        type(order) is not tuple
        or not all(type(each) is int for each in order)
        or sorted(order) != list(range(len(about.shape)))
    ):
        raise DecodeError("tensor", "its dimension order is not a permutation")


def check_shape(what: str, shape: Any) -> None:
    """Reject an invalid shape.

    Raises:
        DecodeError: it is not a tuple of sizes, or has too many, or they are too large.
    """
    if type(shape) is not tuple or len(shape) > DIMENSIONS_MAX:
        raise DecodeError(what, f"its shape is not a tuple of at most {DIMENSIONS_MAX} sizes")
    if not _INTEGERS.issuperset(map(type, shape)) or min(shape, default=0) < 0:
        raise DecodeError(what, "its shape has impossible sizes")
    # Ignores sizes of 0, because some code multiplies before it checks them.
    if max(shape, default=0) > _NUMEL_MAX or math.prod(filter(None, shape)) > _NUMEL_MAX:
        raise DecodeError(what, "its shape has more elements than possible")


def is_coo_tensor(obj: object) -> bool:
    """Return whether ``obj`` is a sparse tensor in coordinate format, made of two plain tensors."""
    return type(obj) is torch.Tensor and obj.layout is torch.sparse_coo


def numel_of(part: Any) -> int:
    """Return the number of elements of a tensor, and 0 for any other object."""
    return part.numel() if isinstance(part, torch.Tensor) else 0


def describe_coo(
    tensor: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], bool, bool]:
    """Return the arguments of ``rebuild_coo``; an uncoalesced tensor stays uncoalesced."""
    return (
        tensor._indices().contiguous(),  # noqa: SLF001  # indices() refuses uncoalesced ones
        tensor._values().contiguous(),  # noqa: SLF001  # as above
        tuple(tensor.shape),
        tensor.is_coalesced(),
        tensor.requires_grad,
    )


def rebuild_coo(
    indices: Any, values: Any, shape: Any, is_coalesced: Any, requires_grad: Any
) -> torch.Tensor:
    """Rebuild the tensor passed to ``describe_coo``.

    Raises:
        DecodeError: its parts do not form a sparse tensor.
    """
    check_shape("tensor", shape)
    parts = (indices, values)
    # If expanded, a few bytes could be the indices of billions of elements, all checked by torch.
    if not all(is_plain_tensor(part) and part.is_contiguous() for part in parts):
        raise DecodeError("tensor", "a sparse tensor is not built from two dense ones")
    if type(is_coalesced) is not bool or type(requires_grad) is not bool:
        raise DecodeError("tensor", "its description is not plain data")
    if indices.is_meta or values.is_meta:
        raise DecodeError("tensor", "a sparse tensor is not built from tensors without elements")
    tensor = torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        device=values.device,
        is_coalesced=is_coalesced,
        check_invariants=True,
    )
    return tensor.requires_grad_(requires_grad)


def is_plain_array(obj: object) -> bool:
    """Return whether ``obj`` is exactly a ``numpy.ndarray`` of plain memory; imports no numpy."""
    kind = type(obj)
    return (
        kind.__name__ == "ndarray" and kind.__module__ == "numpy" and not obj.dtype.hasobject  # type: ignore[attr-defined]  # an ndarray by its type
    )


def describe_array(array: "np.ndarray[Any, Any]") -> tuple[str, torch.Tensor, Any]:
    """Split an array into its memory order, a flat view of its elements, and their owner.

    Returns:
        ``"C"`` or ``"F"``; the flat view, which is a compact copy if the array was not contiguous;
        and an object that keeps that memory alive.
    """
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    owner = array if array.flags.forc else array.copy(order="C")
    if not owner.nbytes:
        return order, torch.empty(0, dtype=torch.uint8, device="cpu"), owner
    kept = [owner, *resize_locks(owner)]
    if not owner.flags.writeable:  # torch.from_numpy warns about those
        address = owner.__array_interface__["data"][0]
        return order, at_address(address, owner.nbytes, owner), kept
    return order, torch.from_numpy(owner.ravel("K").view("u1")), kept


def resize_locks(owner: Any) -> list[Any]:
    """Return objects that keep numpy from moving an array's memory, or that of the array it views.

    ``ndarray.resize(refcheck=False)`` frees memory even while others use it, for example through
    the buffer protocol. If that memory is being sent, the process crashes. However, it rejects an
    array that has a weak reference.

    Args:
        owner: any object; only arrays have such locks.
    """
    if not _is_array_class(type(owner)):  # type: ignore[arg-type]  # every class has a hash
        return []
    return [weakref.ref(owner), *resize_locks(owner.base)]


@functools.lru_cache(maxsize=64)
def _is_array_class(kind: type) -> bool:
    """Return whether its instances are numpy arrays; works without numpy."""
    return ("numpy", "ndarray") in [(each.__module__, each.__name__) for each in kind.__mro__]


def array_key(array: "np.ndarray[Any, Any]") -> tuple[str, tuple[Any, ...] | None]:
    """Return an array's memory order, ``"C"`` or ``"F"``, and what ``memory_key`` returns for it.

    The order is that of ``tobytes("A")``.
    """
    flags = array.flags
    is_shareable = flags.forc and array.nbytes  # otherwise sent as a compact copy
    key = (_CPU, array.__array_interface__["data"][0], array.nbytes) if is_shareable else None
    return "F" if flags.fnc else "C", key


def rebuild_array(flat: Memory, dtype: Any, shape: Any, order: Any) -> "np.ndarray[Any, Any]":
    """Rebuild an array over ``flat``, writable and aligned.

    Args:
        flat: its elements, as ``describe_array`` or ``tobytes("A")`` returns them.
        dtype: its dtype.
        shape: its sizes.
        order: ``"C"`` or ``"F"``.

    Raises:
        DecodeError: the sizes do not match, or the dtype holds Python objects.
    """
    import numpy as np  # noqa: PLC0415  # numpy is optional

    check_shape("array", shape)
    is_order = type(order) is str and order in {"C", "F"}
    if not is_order or not isinstance(dtype, np.dtype):
        raise DecodeError("array", "it is not built from a dtype and an order")
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(flat):
        raise DecodeError(
            "array", f"{len(flat)} bytes do not make a {dtype} array of shape {shape}"
        )
    if not len(flat) and not dtype.itemsize:
        # As a view, because numpy.empty would widen zero-length strings to one character.
        return np.ndarray(shape, dtype, buffer=b"", order=order)
    if not len(flat):
        return np.empty(shape, dtype, order)
    memory = flat if isinstance(flat, bytearray) else flat.numpy()
    return np.ndarray(shape, dtype, buffer=memory, order=order)


def rebuild_scalar(dtype: "np.dtype[Any]", raw: Any) -> Any:
    """Rebuild a numpy scalar from its ``tobytes()``.

    Raises:
        DecodeError: ``raw`` does not have the dtype's item size, which may be gigabytes.
    """
    import numpy as np  # noqa: PLC0415  # numpy is optional

    if type(raw) is not bytes or dtype.itemsize != len(raw):
        raise DecodeError("array", f"the received value is not a {dtype} scalar")
    # Zero-length strings have no bytes, which frombuffer rejects.
    return np.frombuffer(raw, dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]
