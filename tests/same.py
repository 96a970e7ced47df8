"""`assert_same(got, want)`: equal in value, exact in type, with the same sharing."""

import collections
import dataclasses
import decimal
import math
import struct
import sys
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

_FLOAT = struct.Struct("<d")


def assert_same(got: object, want: object, *, sharing: bool = True) -> None:
    """Fail with the path of the first difference.

    Args:
        got: the received object.
        want: the sent object.
        sharing: whether members that are one object in ``want`` must be one object in ``got``.
    """
    _Comparison(sharing=sharing).compare(got, want, "obj")


class _Comparison:
    def __init__(self, *, sharing: bool) -> None:
        self._sharing = sharing
        # By identity of the wanted member; both are kept alive so that no identity is reused.
        self._seen: dict[int, tuple[Any, Any]] = {}

    def compare(self, got: Any, want: Any, path: str) -> None:
        if isinstance(want, type):
            assert (got.__module__, got.__qualname__) == (want.__module__, want.__qualname__), path
            is_importable = "<locals>" not in want.__qualname__ and want.__module__ in sys.modules
            assert not is_importable or got is want, f"{path}: another class of the same name"
            return
        self.compare(type(got), type(want), f"type({path})")
        if id(want) in self._seen:
            before = self._seen[id(want)][0]
            assert not self._sharing or got is before, f"{path}: one object arrived as two"
            return
        if not isinstance(want, (bool, int, float, complex, str, bytes, type(None))):
            self._seen[id(want)] = (got, want)
        self._compare_content(got, want, path)

    def _compare_content(self, got: Any, want: Any, path: str) -> None:
        if isinstance(want, torch.Tensor):
            _compare_tensors(got, want, path)
            self._compare_attributes(got, want, path)
        elif isinstance(want, (np.ndarray, np.generic)):
            self._compare_arrays(got, want, path)
        elif isinstance(want, float):
            assert _bits(got) == _bits(want), f"{path}: {got!r} is not {want!r}"
        elif isinstance(want, complex):
            self.compare(got.real, want.real, f"{path}.real")
            self.compare(got.imag, want.imag, f"{path}.imag")
        elif isinstance(want, decimal.Decimal):
            assert got.as_tuple() == want.as_tuple(), f"{path}: {got!r} is not {want!r}"
        elif isinstance(want, memoryview):
            facts = [(v.format, v.shape, v.strides, v.readonly) for v in (got, want)]
            assert facts[0] == facts[1], f"{path}: {facts[0]} is not {facts[1]}"
            assert got.tobytes() == want.tobytes(), path
        elif isinstance(want, torch.UntypedStorage):
            flats = [torch.tensor((), dtype=torch.uint8).set_(each) for each in (got, want)]
            assert torch.equal(*flats), path  # bytes() takes 20 s for each MB
        elif isinstance(want, types.FunctionType):
            self._compare_functions(got, want, path)
        elif isinstance(want, BaseException):
            self.compare(got.args, want.args, f"{path}.args")
            self._compare_attributes(got, want, path)
        else:
            self._compare_containers(got, want, path)

    def _compare_containers(self, got: Any, want: Any, path: str) -> None:
        if isinstance(want, dict):
            self._compare_members(list(got), list(want), f"keys of {path}")
            for (key, value), wanted in zip(got.items(), want.values(), strict=True):
                self.compare(value, wanted, f"{path}[{key!r}]")
            assert getattr(got, "default_factory", 0) == getattr(want, "default_factory", 0), path
        elif isinstance(want, (list, tuple, collections.deque)):
            self._compare_members(got, want, path)
            assert getattr(got, "maxlen", 0) == getattr(want, "maxlen", 0), path
        elif isinstance(want, (set, frozenset)):
            self._compare_members(sorted(got, key=_by_text), sorted(want, key=_by_text), path)
        elif dataclasses.is_dataclass(want):
            for field in dataclasses.fields(want):
                self.compare(
                    getattr(got, field.name), getattr(want, field.name), f"{path}.{field.name}"
                )
        elif "__eq__" not in _attributes_of(type(want)) and hasattr(want, "__dict__"):
            self._compare_attributes(got, want, path)
        else:
            assert got == want, f"{path}: {got!r} is not {want!r}"
            assert repr(got) == repr(want), f"{path}: {got!r} is not {want!r}"

    def _compare_members(self, got: Iterable[Any], want: Iterable[Any], path: str) -> None:
        got, want = list(got), list(want)
        assert len(got) == len(want), f"{path}: {len(got)} members, {len(want)} wanted"
        for index, (member, wanted) in enumerate(zip(got, want, strict=True)):
            self.compare(member, wanted, f"{path}[{index}]")

    def _compare_attributes(self, got: Any, want: Any, path: str) -> None:
        self.compare(vars(got), vars(want), f"vars({path})")

    def _compare_functions(self, got: Any, want: Any, path: str) -> None:
        assert got.__code__.co_code == want.__code__.co_code, path
        self.compare(got.__defaults__, want.__defaults__, f"{path}.__defaults__")
        self._compare_members(_closed_over(got), _closed_over(want), f"closure of {path}")

    def _compare_arrays(self, got: Any, want: Any, path: str) -> None:
        assert got.dtype == want.dtype, f"{path}: {got.dtype} is not {want.dtype}"
        assert got.dtype.metadata == want.dtype.metadata, path
        assert got.shape == want.shape, f"{path}: {got.shape} is not {want.shape}"
        if want.dtype.hasobject:
            self._compare_members(got.ravel().tolist(), want.ravel().tolist(), path)
        elif isinstance(want, np.ma.MaskedArray):
            self.compare(got.mask, want.mask, f"{path}.mask")
            self.compare(got.data, want.data, f"{path}.data")
        elif want.dtype.type is np.longdouble:  # has padding bytes without a meaning
            assert np.array_equal(got, want), f"{path}: {got!r} is not {want!r}"
        else:
            assert got.tobytes() == want.tobytes(), f"{path}: {got!r} is not {want!r}"


def _compare_tensors(got: torch.Tensor, want: torch.Tensor, path: str) -> None:
    for fact in ("dtype", "shape", "layout", "requires_grad", "is_quantized", "is_sparse"):
        mine, wanted = getattr(got, fact), getattr(want, fact)
        assert mine == wanted, f"{path}.{fact}: {mine} is not {wanted}"
    assert got.device.type == want.device.type, path
    assert not got.is_inference(), f"{path}: autograd cannot save an inference tensor"
    if want.is_meta:
        return
    for name, part in _parts(want).items():
        arrived = _parts(got)[name]
        assert arrived.shape == part.shape, f"{path}.{name}"
        assert torch.equal(_raw(arrived), _raw(part)), f"{path}.{name}: {arrived} is not {part}"


def _parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the strided tensors that make up any tensor."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        scale = torch.tensor([tensor.q_scale(), float(tensor.q_zero_point())])
        return {"int_repr": tensor.int_repr(), "scale": scale}
    if tensor.layout is torch.sparse_coo:
        flag = torch.tensor(tensor.is_coalesced())
        # The public names refuse an uncoalesced tensor.
        indices, values = tensor._indices(), tensor._values()  # noqa: SLF001  # see above
        return {"indices": indices, "values": values, "coalesced": flag}
    if tensor.layout is torch.sparse_csr:
        return {
            "crow": tensor.crow_indices(),
            "col": tensor.col_indices(),
            "values": tensor.values(),
        }
    if tensor.is_nested:
        return {str(index): part for index, part in enumerate(tensor.unbind())}
    return {"elements": tensor}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8) if dense.numel() else dense


def _closed_over(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _attributes_of(cls: type) -> set[str]:
    """Return all that a class and its bases define, except ``object``."""
    return {name for base in cls.__mro__[:-1] for name in vars(base)}


def _bits(number: float) -> bytes:
    return b"nan" if math.isnan(number) else _FLOAT.pack(number)


def _by_text(member: object) -> tuple[str, str]:
    return type(member).__name__, repr(member)
