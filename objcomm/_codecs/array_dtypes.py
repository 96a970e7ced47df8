"""numpy's dtypes as plain data, and back by a grammar of their own.

Never by numpy's parser with a text that a sender chose: it takes far more than numpy prints, and
``m8[D/0]`` ends the process by a division (numpy 2.4).
"""

import functools
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from objcomm.errors import DecodeError

if TYPE_CHECKING:
    import numpy as np


#: As many dimensions as torch's operations and numpy's arrays have at most.
DIMENSIONS_MAX = 64

_NBYTES_MAX = (1 << 31) - 1  # an item's size is a C int to numpy

# What ``dtype.str`` gives for items without fields: the order of their bytes, a kind and a size.
_NUMBER = re.compile(r"([<>|])([biufc])([1-9]\d?)")
_NUMBERS = frozenset(
    "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 f12 f16 c8 c16 c24 c32".split()  # noqa: SIM905  # as a table
)
_TEXT = re.compile(r"([<>|])([SUV])(0|[1-9]\d{0,9})")
_LETTER_NBYTES = {"S": 1, "U": 4, "V": 1}
_TIME = re.compile(r"([<>])([mM])8(?:\[([1-9]\d{0,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")

# Of a dtype within a dtype.
_DEPTH_MAX = 32
_FIELDS_MAX = 100_000


def array_dtype_name(dtype: "np.dtype[Any]") -> Any:
    """Plain data that names a numpy dtype.

    Raises:
        TypeError: its items are Python objects, its fields overlap or lie at odd offsets, its
            items have a type of their own, as those of a ``numpy.recarray``, or it has a shape or
            metadata.
    """
    if not (dtype.hasobject or dtype.subdtype or dtype.metadata):
        name = dtype.str if dtype.names is None else _lists(dtype.descr)
        if _is_told(name, dtype):
            return name
    raise TypeError(f"an array of {dtype} is not plain data; use codec='pickle'")


def _is_told(name: Any, dtype: "np.dtype[Any]") -> bool:
    """Whether ``array_dtype_named`` makes this very dtype of it.

    Equal dtypes may have items of other types; what is printed tells these, too.
    """
    try:
        found = array_dtype_named(name)
    except (DecodeError, TypeError, ValueError):  # a field has metadata
        return False
    return found == dtype and repr(found) == repr(dtype)


def array_dtype_named(name: Any) -> "np.dtype[Any]":
    """The inverse of ``array_dtype_name``.

    Raises:
        DecodeError: that gives no such name, or this numpy has no such dtype.
    """
    try:
        return _dtype(name, 0, Counter())
    except (TypeError, ValueError) as error:  # fields of the same name, a number of another machine
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
        seen["fields"] += 1  # of a list that stands in it twice each time
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

    # What numpy gets is written here, of parts that were checked.
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
