"""Tensors and arrays as plain attributes and flat memory, for every codec.

Only viewed elements travel: one row of a large matrix costs one row. Values, dtype, shape, dense
strides, ``requires_grad`` and the type of device arrive as they were; a device's index does not,
because the sender's ``cuda:1`` means nothing on the receiver.
"""

import math
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from objcomm.errors import DecodeError
from objcomm.memory import at_address

if TYPE_CHECKING:
    import numpy as np

#: Where ``Codec.decode`` wants tensors, for the functions that a pickle calls by name.
target_device: ContextVar[torch.device | None] = ContextVar("objcomm_target_device", default=None)

#: By name, so that a stream can name nothing but a dtype.
DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of ``dtype_name``.

    Raises:
        DecodeError: this torch has no such dtype.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise DecodeError("tensor", f"this torch has no dtype {name!r}")
    return dtype


_PLAIN_FIELDS = frozenset({str, bool, tuple, type(None)})


class Dense(NamedTuple):
    """All of a strided tensor but its elements; every field is plain data."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None  # dimensions by falling stride; None means C order
    expanded: tuple[int, ...] | None  # the shape before stride-0 dimensions were dropped
    device_type: str
    requires_grad: bool
    is_parameter: bool


def is_plain_tensor(obj: object) -> bool:
    """Whether this module carries ``obj`` by itself: strided, no subclass but Parameter."""
    return (
        type(obj) in (torch.Tensor, torch.nn.Parameter)
        and obj.layout is torch.strided  # type: ignore[attr-defined]  # a tensor by its type
        and not obj.is_quantized  # type: ignore[attr-defined]
        and not obj.is_nested  # type: ignore[attr-defined]
    )


def describe(tensor: torch.Tensor, device_type: str | None) -> tuple[Dense, torch.Tensor]:
    """Split a plain tensor into its description and a flat ``uint8`` view of its elements.

    Args:
        tensor: see ``is_plain_tensor``.
        device_type: elements on such a device stay there; all others end on the CPU.

    Returns:
        The description, and the elements in the description's order: the tensor's own memory where
        it is dense, a compact copy where it is not. A meta tensor has no elements.
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
    if tensor.device.type not in ("cpu", device_type):
        elements = elements.cpu()
    # ``as_strided``: a one-element view may have any stride, which ``view`` would keep.
    compact = elements.contiguous().as_strided((elements.numel(),), (1,))
    return about, compact.view(torch.uint8)


def rebuild(about: Dense, flat: torch.Tensor) -> torch.Tensor:
    """The tensor that ``describe`` saw, over the memory ``flat``.

    Raises:
        DecodeError: dtype or sizes make no sense, or its device does not exist here.
    """
    if not _PLAIN_FIELDS.issuperset(map(type, about)):  # a range would be walked to its end
        raise DecodeError("tensor", "its description is no plain data")
    dtype = dtype_named(about.dtype)
    with torch.inference_mode(mode=False):
        if about.device_type == "meta":
            tensor = torch.empty(about.shape, dtype=dtype, device="meta")
        else:
            tensor = _on_device(flat, about.device_type).view(dtype).view(about.shape)
        if about.order is not None:
            inverse = sorted(range(len(about.order)), key=about.order.__getitem__)
            tensor = tensor.permute(inverse)
        if about.expanded is not None:
            tensor = tensor.expand(about.expanded)
        if about.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=about.requires_grad)
        return tensor.requires_grad_(about.requires_grad) if about.requires_grad else tensor


def _on_device(flat: torch.Tensor, device_type: str) -> torch.Tensor:
    device = target_device.get() or torch.device(device_type)
    if flat.device.type == device.type and device.index in (None, flat.device.index):
        return flat
    try:
        return flat.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = f"a tensor belongs on device {str(device)!r}, which this rank cannot use ({error})"
        raise DecodeError("tensor", f"{reason}; pass another device=") from error


def is_coo_tensor(obj: object) -> bool:
    """Whether ``obj`` is a sparse tensor of coordinates, which two plain tensors make up."""
    return type(obj) is torch.Tensor and obj.layout is torch.sparse_coo


def describe_coo(
    tensor: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], bool, bool]:
    """What ``rebuild_coo`` takes; a tensor that was not coalesced stays so."""
    return (
        tensor._indices(),  # noqa: SLF001  # indices() refuses uncoalesced ones
        tensor._values(),  # noqa: SLF001  # likewise
        tuple(tensor.shape),
        tensor.is_coalesced(),
        tensor.requires_grad,
    )


def rebuild_coo(
    indices: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    is_coalesced: bool,  # noqa: FBT001  # positional: a stream calls it
    requires_grad: bool,  # noqa: FBT001  # likewise
) -> torch.Tensor:
    """The tensor that ``describe_coo`` saw.

    Raises:
        DecodeError: the shape is no tuple.
    """
    if type(shape) is not tuple:
        raise DecodeError("tensor", f"{shape!r} is no shape")
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
    """Whether ``obj`` is exactly a ``numpy.ndarray`` of plain memory, without importing numpy."""
    kind = type(obj)
    return (
        kind.__name__ == "ndarray" and kind.__module__ == "numpy" and not obj.dtype.hasobject  # type: ignore[attr-defined]  # an ndarray by its type
    )


def describe_array(array: "np.ndarray[Any, Any]") -> tuple[str, torch.Tensor, Any]:
    """Split an array into its memory order, a flat view of its elements, and their owner.

    Returns:
        ``"C"`` or ``"F"``; the flat view, a compact copy where the array was not contiguous; and
        what keeps that memory alive.
    """
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    owner = array if array.flags.forc else array.copy(order="C")
    if not owner.nbytes:
        return order, torch.empty(0, dtype=torch.uint8, device="cpu"), owner
    kept = [owner, *resize_locks(owner)]
    if not owner.flags.writeable:  # torch.from_numpy warns of those
        address = owner.__array_interface__["data"][0]
        return order, at_address(address, owner.nbytes, owner), kept
    return order, torch.from_numpy(owner.ravel("K").view("u1")), kept


def resize_locks(owner: Any) -> list[Any]:
    """What keeps numpy from moving an array's memory, and that of the array that it views.

    ``ndarray.resize(refcheck=False)`` frees memory that others hold, buffer exports included, which
    ends the process if it travels just then; but it refuses an array with a weak reference.

    Args:
        owner: any object; only arrays have such locks.
    """
    locks = []
    while ("numpy", "ndarray") in [
        (each.__module__, each.__name__) for each in type(owner).__mro__
    ]:
        locks.append(weakref.ref(owner))
        owner = owner.base
    return locks


def rebuild_array(
    flat: torch.Tensor, dtype: "np.dtype[Any]", shape: tuple[int, ...], order: Any
) -> "np.ndarray[Any, Any]":
    """The array that ``describe_array`` saw, over the memory ``flat``: writable and aligned.

    Raises:
        DecodeError: the sizes do not agree, or the dtype holds Python objects.
    """
    import numpy as np  # noqa: PLC0415  # numpy is optional

    # A text among the sizes would be repeated as often as the others say, to gigabytes.
    is_shape = type(shape) is tuple and all(type(size) is int for size in shape)
    if not is_shape or not isinstance(dtype, np.dtype):
        raise DecodeError("array", f"{shape!r} is no shape, or {dtype!r} no dtype")
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != flat.numel():
        raise DecodeError("array", f"{flat.numel()} bytes are no {dtype} array of shape {shape}")
    if flat.numel() == 0 and not dtype.itemsize:
        # As a view, because numpy would give texts of no length room for one letter each.
        return np.ndarray(shape, dtype, buffer=b"", order=order)
    if flat.numel() == 0:
        return np.empty(shape, dtype, order)
    return np.ndarray(shape, dtype, buffer=flat.numpy(), order=order)


def rebuild_scalar(dtype: Any, raw: bytes) -> Any:
    """A numpy scalar from its ``tobytes()``.

    Raises:
        DecodeError: the bytes are not as many as the dtype has, which might be gigabytes.
    """
    import numpy as np  # noqa: PLC0415  # numpy is optional

    named = array_dtype_named(dtype)
    if named.itemsize != len(raw):
        raise DecodeError("array", f"{len(raw)} bytes are no {named} scalar")
    # Empty text has items of no bytes, which frombuffer refuses.
    return np.frombuffer(raw, named)[0] if named.itemsize else np.zeros((), named)[()]


def array_dtype_name(dtype: "np.dtype[Any]") -> Any:
    """Plain data that names a numpy dtype.

    Raises:
        TypeError: its items are Python objects, its fields overlap or lie at odd offsets, or its
            items have a type of their own, as those of a ``numpy.recarray``.
    """
    if dtype.names is None and not dtype.hasobject:
        return dtype.str
    fields = [] if dtype.hasobject else _lists(dtype.descr)
    # Equal dtypes may have items of other types; what is printed tells these, too.
    if dtype.hasobject or not is_told(fields, dtype):
        raise TypeError(f"an array of {dtype} is no plain data; use codec='pickle'")
    return fields


def is_told(name: Any, dtype: "np.dtype[Any]") -> bool:
    """Whether plain data that ``array_dtype_named`` takes gives this very dtype."""
    try:
        found = array_dtype_named(name)
    except (DecodeError, TypeError, ValueError):  # a field has metadata
        return False
    return found == dtype and repr(found) == repr(dtype)


def array_dtype_named(name: Any) -> "np.dtype[Any]":
    """The inverse of ``array_dtype_name``."""
    import numpy as np  # noqa: PLC0415  # numpy is optional

    if isinstance(name, str):
        return np.dtype(name)
    if type(name) is not list:
        raise DecodeError("array", f"{name!r} is no dtype")
    fields = []
    for field_name, form, *shape in name:
        inner = form if isinstance(form, str) else array_dtype_named(form)
        if any(type(sizes) not in (list, tuple) for sizes in shape):
            raise DecodeError("array", f"{shape!r} is no shape")
        fields.append((field_name, inner, *(tuple(sizes) for sizes in shape)))
    return np.dtype(fields)


def _lists(value: Any) -> Any:
    return [_lists(member) for member in value] if isinstance(value, (list, tuple)) else value
