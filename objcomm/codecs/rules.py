"""How the ``msgpack`` codec takes the standard library's and torch's own types apart, and back.

The way back gets members of any type a sender likes, so each must be harmless with all of them: it
may raise, but neither run what the sender chose nor compute for long.
"""

import builtins
import datetime
import decimal
import fractions
import pathlib
import uuid
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Any

import torch

from objcomm.codecs import tensors
from objcomm.errors import DecodeError, ForbiddenTypeError

_NAME = "msgpack"


def _raise_fraction(numerator: Any, denominator: Any) -> fractions.Fraction:
    # Fraction("1e9999999999") would be computed.
    if type(numerator) is not int or type(denominator) is not int:
        raise DecodeError(_NAME, "a fraction is not of two integers")
    return fractions.Fraction(numerator, denominator)


# How each further type is taken apart: its name on the wire, its members, and the way back.
_RULES: tuple[tuple[type, str, Callable[[Any], Sequence[Any]], Callable[..., Any]], ...] = (
    (tuple, "tuple", tuple, lambda *members: members),
    (set, "set", tuple, lambda *members: set(members)),
    (frozenset, "frozenset", tuple, lambda *members: frozenset(members)),
    (complex, "complex", lambda z: (z.real, z.imag), complex),
    (range, "range", lambda r: (r.start, r.stop, r.step), range),
    (slice, "slice", lambda s: (s.start, s.stop, s.step), slice),
    (decimal.Decimal, "decimal", lambda d: (str(d),), decimal.Decimal),
    (fractions.Fraction, "fraction", lambda f: f.as_integer_ratio(), _raise_fraction),
    (uuid.UUID, "uuid", lambda u: (u.bytes,), lambda raw: uuid.UUID(bytes=raw)),
    (datetime.date, "date", lambda d: (d.year, d.month, d.day), datetime.date),
    (
        datetime.time,
        "time",
        lambda t: (t.hour, t.minute, t.second, t.microsecond, t.tzinfo, t.fold),
        lambda *fields: datetime.time(*fields[:5], fold=fields[5]),
    ),
    (
        datetime.datetime,
        "datetime",
        lambda t: (*t.timetuple()[:6], t.microsecond, t.tzinfo, t.fold),
        lambda *fields: datetime.datetime(*fields[:8], fold=fields[8]),  # noqa: DTZ001  # as sent
    ),
    (
        datetime.timedelta,
        "timedelta",
        lambda d: (d.days, d.seconds, d.microseconds),
        datetime.timedelta,
    ),
    (
        datetime.timezone,
        "timezone",
        lambda zone: zone.__getinitargs__(),  # as pickle: UTC and unnamed offsets stay so
        datetime.timezone,
    ),
    (zoneinfo.ZoneInfo, "zoneinfo", lambda zone: (zone.key,), zoneinfo.ZoneInfo),
    (pathlib.PosixPath, "path", lambda path: (str(path),), pathlib.Path),
    (pathlib.WindowsPath, "path", lambda path: (str(path),), pathlib.Path),
    (pathlib.PurePosixPath, "posix path", lambda p: (str(p),), pathlib.PurePosixPath),
    (pathlib.PureWindowsPath, "windows path", lambda p: (str(p),), pathlib.PureWindowsPath),
    (torch.Size, "torch.Size", tuple, lambda *sizes: torch.Size(sizes)),
    (torch.device, "torch.device", lambda device: (str(device),), torch.device),
    (torch.dtype, "torch.dtype", lambda dtype: (tensors.dtype_name(dtype),), tensors.dtype_named),
)
LOWER = {cls: (name, members) for cls, name, members, _ in _RULES}
RAISE = {name: rebuild for _, name, _, rebuild in _RULES}


BUILTIN_ERRORS = {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException) and value.__name__ == name
}


def raise_exception(name: Any, args: Any, notes: Any, text: Any) -> BaseException:
    """A builtin exception from its class's name and its arguments.

    Raises:
        ForbiddenTypeError: no builtin exception has that name.
    """
    cls = BUILTIN_ERRORS.get(name)
    if cls is None:
        raise ForbiddenTypeError(_NAME, f"{name!r} is no builtin exception ({text})")
    error: BaseException = cls(*args)
    for note in notes:
        error.add_note(note)
    return error
