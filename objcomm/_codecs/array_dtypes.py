"""numpy's dtypes as plain data, parsed by a grammar of objcomm's own.

numpy's parser never sees text that a sender chose. It accepts far more than numpy prints, and
``m8[D/0]`` ends the process with a division by zero (numpy 2.4).
"""

import functools
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from objcomm.errors import DecodeError

if TYPE_CHECKING:
    import numpy as np


#: The maximum number of dimensions of torch operations and numpy arrays.
DIMENSIONS_MAX = 64

_NBYTES_MAX = (1 << 31) - 1  # numpy stores an item's size in a C int

# The forms of ``dtype.str`` for items without fields: byte order, kind and size.
_NUMBER = re.compile(r"([<>|])([biufc])([1-9]\d?)")
_NUMBERS = frozenset(
    "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 f12 f16 c8 c16 c24 c32".split()  # noqa: SIM905  # readable as a table
)
_TEXT = re.compile(r"([<>|])([SUV])(0|[1-9]\d{0,9})")
_LETTER_NBYTES = {"S": 1, "U": 4, "V": 1}
_TIME = re.compile(r"([<>])([mM])8(?:\[([1-9]\d{0,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")

_DEPTH_MAX = 32
_FIELDS_MAX = 100_000


def array_dtype_name(dtype: "np.dtype[Any]") -> Any:
    """Return plain data that names a numpy dtype.

    Raises:
        TypeError: its items are Python objects or have a special type, as in a
            ``numpy.recarray``; its fields overlap or have unusual offsets; or it has a shape or
            metadata.
    """
    import numpy as np  # noqa: PLC0415  # numpy is optional

    kind: Any = dtype.type
    return _name_of_usual(kind) if dtype is np.dtype(kind) else _name(dtype)


@functools.lru_cache(maxsize=64)
def _name_of_usual(kind: type) -> Any:
    """Return the name of an item type's own dtype; finding and checking it takes 20 µs."""
    import numpy as np  # noqa: PLC0415  # numpy is optional

    return _name(np.dtype(kind))


def _name(dtype: "np.dtype[Any]") -> Any:
    if not (dtype.hasobject or dtype.subdtype or dtype.metadata):
        name = dtype.str if dtype.names is None else _lists(dtype.descr)
        if _is_round_trip_exact(name, dtype):
            return name
    raise TypeError(f"an array of {dtype} is not plain data; use codec='pickle'")


def _is_round_trip_exact(name: Any, dtype: "np.dtype[Any]") -> bool:
    """Return whether ``array_dtype_named`` rebuilds exactly this dtype from the name.

    Equal dtypes may have different item types, so their text must be equal, too.
    """
    try:
        found = array_dtype_named(name)
    except (DecodeError, TypeError, ValueError):  # a field has metadata
        return False
    return found == dtype and repr(found) == repr(dtype)


def array_dtype_named(name: Any) -> "np.dtype[Any]":
    """Return the dtype with a name from ``array_dtype_name``.

    Raises:
        DecodeError: it is not such a name, or this version of numpy has no such dtype.
    """
    try:
        return _dtype(name, 0, Counter())
    except (TypeError, ValueError) as error:  # duplicate field names, or a type of another platform
        raise DecodeError("array", f"this numpy has no such dtype ({error})") from error


def _dtype(name: Any, depth: int, seen: Counter[str]) -> "np.dtype[Any]":
    if type(name) is str:
        return _simple(name)
    if type(name) is not list or depth > _DEPTH_MAX:
        raise DecodeError(
            "array", f"a {type(name).__name__} is not a dtype, or is nested too deeply"
        )
    import numpy as np  # noqa: PLC0415  # numpy is optional

    fields: list[Any] = []
    nbytes = 0
    for each in name:
        if type(each) not in (list, tuple) or len(each) not in (2, 3) or type(each[0]) is not str:
            raise DecodeError("array", "a dtype's field is not a name, a format and a shape")
        seen["fields"] += 1  # counts a list each time it occurs
        if seen["fields"] > _FIELDS_MAX:
            raise DecodeError("array", f"a dtype of more than {_FIELDS_MAX} fields")
        inner = _dtype(each[1], depth + 1, seen)
        shape = _shape(each[2]) if len(each) == 3 else None  # noqa: PLR2004  # see above
        nbytes += inner.itemsize * math.prod(shape or ())
        if nbytes > _NBYTES_MAX:
            raise DecodeError("array", f"a dtype of {nbytes} bytes")
        fields.append((each[0], inner) if shape is None else (each[0], inner, shape))
    return np.dtype(fields)


def _shape(sizes: Any) -> tuple[int, ...]:
    if type(sizes) not in (list, tuple) or len(sizes) > DIMENSIONS_MAX:
        raise DecodeError("array", "the shape of a dtype's field is not a tuple")
    if not all(type(size) is int and 0 <= size <= _NBYTES_MAX for size in sizes):
        raise DecodeError("array", "the shape of a dtype's field has impossible sizes")
    return tuple(sizes)


@functools.lru_cache(maxsize=256)
def _simple(name: str) -> "np.dtype[Any]":
    import numpy as np  # noqa: PLC0415  # numpy is optional

    # The text for numpy is built here, from validated parts.
    if found := _NUMBER.fullmatch(name):
        order, kind, size = found.groups()
        if kind + size in _NUMBERS and (order == "|") is (size == "1"):
            return np.dtype(f"{order}{kind}{size}")
    elif found := _TEXT.fullmatch(name):
        order, kind, count = found.groups()
        if int(count) * _LETTER_NBYTES[kind] <= _NBYTES_MAX and (order == "|") is (kind != "U"):
            return np.dtype(f"{order}{kind}{int(count)}")
    elif found := _TIME.fullmatch(name):
        order, kind, count, unit = found.groups()
        if int(count or 1) <= _NBYTES_MAX:
            return np.dtype(f"{order}{kind}8" + (f"[{int(count or 1)}{unit}]" if unit else ""))
    raise DecodeError("array", f"{name[:100]!r} is not the name of a dtype")


def _lists(value: Any) -> Any:
    return [_lists(member) for member in value] if isinstance(value, (list, tuple)) else value
