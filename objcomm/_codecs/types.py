"""All that an untrusted message may create: builtin types, admitted classes and exceptions.

Both ways to decode safely, ``msgpack`` and pickle with ``allow=``, use this one table. Received
arguments may have any type, so the exact type and the bounds of each are checked before anything is
called. No constructor runs code that a sender chose, or computes for long. Classes that a user
admits have a name that all ranks agree on.

Python itself trusts an exception's arguments too much. A Unicode error reads its text at the
positions it was given, and a negative one crashes the process (CPython 3.11). The traceback of a
syntax error prints as many marks as it was told to. Syntax errors and exception groups iterate over
an argument, which may be a range of any length.
"""

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import threading
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

import torch

from objcomm._codecs import exceptions, tensors
from objcomm._codecs.array_dtypes import DIMENSIONS_MAX
from objcomm._codecs.exceptions import BUILTIN_ERRORS
from objcomm._config import check_name
from objcomm.errors import DecodeError, ForbiddenTypeError, UsageError, shown

_NAME = "msgpack"

#: Reducing a fraction with larger numbers takes seconds; the time grows with their square.
FRACTION_BITS_MAX = 1 << 16

#: Creating a range divides its numbers; the time grows with their square, too.
RANGE_BITS_MAX = 1 << 12

_HEX = re.compile(r"-?0x[0-9a-f]+")
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(:\d{1,4})?")
_ZONE = re.compile(r"[A-Za-z0-9_+./-]{1,100}")
_UUID_NBYTES = 16


class Argument(NamedTuple):
    """The requirement for one argument.

    Attributes:
        description: for error messages.
        fits: returns whether an object meets it.
    """

    description: str
    fits: Callable[[Any], bool]


def _exactly(kind: type, description: str) -> Argument:
    return Argument(description, lambda given: type(given) is kind)


ANYTHING = Argument("anything", lambda _: True)
INTEGER = _exactly(int, "an integer")
MODERATE = Argument(
    f"an integer of up to {RANGE_BITS_MAX} bits",
    lambda given: type(given) is int and given.bit_length() <= RANGE_BITS_MAX,
)
NUMBER = _exactly(float, "a float")
TEXT = _exactly(str, "a text")
DTYPE = _exactly(torch.dtype, "a dtype")
SIZE = Argument("a size", lambda given: type(given) is int and 0 <= given < 1 << 63)
ZONE = Argument(
    "None or a time zone",  # or an instance of a registered class
    lambda given: given is None or issubclass(type(given), datetime.tzinfo),
)


def _matches(description: str, pattern: re.Pattern[str]) -> Argument:
    return Argument(
        description, lambda given: type(given) is str and bool(pattern.fullmatch(given))
    )


@dataclass(frozen=True)
class Constructor:
    """A kind of object that can be created from received arguments.

    Attributes:
        name: its name in msgpack streams and in errors.
        make: creates it.
        arguments: the requirement for each argument of ``make``.
        rest: the requirement for all further arguments; None if there may be none.
        optional: how many of the last ``arguments`` may be missing.
    """

    name: str
    make: Callable[..., Any]
    arguments: tuple[Argument, ...] = ()
    rest: Argument | None = None
    optional: int = 0

    def __call__(self, *given: Any) -> Any:
        """Create the object.

        Raises:
            DecodeError: the arguments do not meet the requirements.
        """
        wanted = self.arguments
        least, most = len(wanted) - self.optional, len(wanted)
        if len(given) < least or (len(given) > most and self.rest is None):
            raise DecodeError(_NAME, f"a {self.name} is not built from {len(given)} parts")
        for number, each in enumerate(given):
            argument = wanted[number] if number < most else self.rest
            if argument is not None and not argument.fits(each):
                kind = type(each).__name__
                raise DecodeError(
                    _NAME, f"part {number} of a {self.name} is a {kind}, not {argument.description}"
                )
        return self.make(*given)


def _fraction(numerator: int, denominator: int) -> fractions.Fraction:
    if max(numerator.bit_length(), denominator.bit_length()) > FRACTION_BITS_MAX:
        raise DecodeError(_NAME, f"a fraction of numbers of more than {FRACTION_BITS_MAX} bits")
    return fractions.Fraction(numerator, denominator)


def _size(*sizes: int) -> torch.Size:
    if len(sizes) > DIMENSIONS_MAX:
        raise DecodeError(_NAME, f"a torch.Size of more than {DIMENSIONS_MAX} sizes")
    return torch.Size(sizes)


_DAY = (INTEGER, INTEGER, INTEGER)
_TIME = (INTEGER, INTEGER, INTEGER, INTEGER, ZONE, INTEGER)

#: By name. Types with large members, or members of any kind, are in ``msgpack`` and ``restricted``.
CONSTRUCTORS = {
    each.name: each
    for each in (
        Constructor("complex", complex, (NUMBER, NUMBER)),
        Constructor("range", range, (MODERATE,) * 3),
        Constructor("slice", slice, (ANYTHING,) * 3),
        Constructor("int", lambda text: int(text, 16), (_matches("a hexadecimal number", _HEX),)),
        Constructor("decimal", decimal.Decimal, (TEXT,)),
        Constructor("fraction", _fraction, (INTEGER, INTEGER)),
        Constructor(
            "uuid",
            lambda raw: uuid.UUID(bytes=raw),
            (
                Argument(
                    f"{_UUID_NBYTES} bytes",
                    lambda raw: type(raw) is bytes and len(raw) == _UUID_NBYTES,
                ),
            ),
        ),
        Constructor("date", datetime.date, _DAY),
        Constructor("time", lambda *fields: datetime.time(*fields[:5], fold=fields[5]), _TIME),
        Constructor(
            "datetime",
            lambda *fields: datetime.datetime(*fields[:8], fold=fields[8]),  # noqa: DTZ001  # as sent
            _DAY + _TIME,
        ),
        Constructor("timedelta", datetime.timedelta, _DAY),
        Constructor(
            "timezone",
            datetime.timezone,
            (_exactly(datetime.timedelta, "a timedelta"), TEXT),
            optional=1,
        ),
        Constructor("zoneinfo", zoneinfo.ZoneInfo, (_matches("a time zone's name", _ZONE),)),
        Constructor("path", pathlib.Path, (TEXT,)),
        Constructor("posix path", pathlib.PurePosixPath, (TEXT,)),
        Constructor("windows path", pathlib.PureWindowsPath, (TEXT,)),
        Constructor("torch.Size", _size, rest=SIZE),
        Constructor(
            "torch.device",
            torch.device,
            (_matches("a device's name", _DEVICE),),
        ),
        Constructor("torch.dtype", tensors.dtype_named, (TEXT,)),
        Constructor("torch.finfo", torch.finfo, (DTYPE,)),
        Constructor("torch.iinfo", torch.iinfo, (DTYPE,)),
    )
}


def _lower_fraction(fraction: fractions.Fraction) -> tuple[int, int]:
    numbers = fraction.as_integer_ratio()
    if max(map(int.bit_length, numbers)) > FRACTION_BITS_MAX:
        raise ValueError(
            f"a fraction of numbers of more than {FRACTION_BITS_MAX} bits takes a receiver long; "
            "send its numerator and denominator"
        )
    return numbers


def _lower_range(numbers: range) -> tuple[int, int, int]:
    parts = numbers.start, numbers.stop, numbers.step
    if max(map(int.bit_length, parts)) > RANGE_BITS_MAX:
        raise ValueError(f"a range of numbers of more than {RANGE_BITS_MAX} bits; send the numbers")
    return parts


def _lower_size(size: torch.Size) -> tuple[int, ...]:
    if len(size) > DIMENSIONS_MAX:
        raise ValueError(f"a torch.Size of more than {DIMENSIONS_MAX} sizes; send a tuple")
    return tuple(size)


#: How to take apart types that msgpack lacks: the name in the stream, and the members.
LOWER: dict[type, tuple[str, Callable[[Any], Sequence[Any]]]] = {
    tuple: ("tuple", tuple),
    set: ("set", tuple),
    frozenset: ("frozenset", tuple),
    complex: ("complex", lambda z: (z.real, z.imag)),
    range: ("range", _lower_range),
    slice: ("slice", lambda s: (s.start, s.stop, s.step)),
    decimal.Decimal: ("decimal", lambda d: (str(d),)),
    fractions.Fraction: ("fraction", _lower_fraction),
    uuid.UUID: ("uuid", lambda u: (u.bytes,)),
    datetime.date: ("date", lambda d: (d.year, d.month, d.day)),
    datetime.time: (
        "time",
        lambda t: (t.hour, t.minute, t.second, t.microsecond, t.tzinfo, t.fold),
    ),
    datetime.datetime: (
        "datetime",
        lambda t: (*t.timetuple()[:6], t.microsecond, t.tzinfo, t.fold),
    ),
    datetime.timedelta: ("timedelta", lambda d: (d.days, d.seconds, d.microseconds)),
    # As in pickle, which preserves UTC and unnamed offsets.
    datetime.timezone: ("timezone", lambda zone: zone.__getinitargs__()),
    zoneinfo.ZoneInfo: ("zoneinfo", lambda zone: (zone.key,)),
    pathlib.PosixPath: ("path", lambda path: (str(path),)),
    pathlib.WindowsPath: ("path", lambda path: (str(path),)),
    pathlib.PurePosixPath: ("posix path", lambda p: (str(p),)),
    pathlib.PureWindowsPath: ("windows path", lambda p: (str(p),)),
    torch.Size: ("torch.Size", _lower_size),
    torch.device: ("torch.device", lambda device: (str(device),)),
    torch.dtype: ("torch.dtype", lambda dtype: (tensors.dtype_name(dtype),)),
    torch.finfo: ("torch.finfo", lambda limits: (tensors.dtype_named(limits.dtype),)),
    torch.iinfo: ("torch.iinfo", lambda limits: (tensors.dtype_named(limits.dtype),)),
}

# Attributes that numpy and torch read from any object as addresses in this process's memory.
_ADDRESSES = frozenset({"__array_interface__", "__array_struct__", "__cuda_array_interface__"})


def check_attributes(names: Iterable[str]) -> None:
    """Reject attributes that a received object must not have, whatever its class.

    Raises:
        ForbiddenTypeError: one names an address in memory.
    """
    if found := _ADDRESSES.intersection(names):
        raise ForbiddenTypeError(_NAME, f"the attribute {min(found)!r} is set")


def set_attributes(tensor: Any, attributes: Any) -> torch.Tensor:
    """Set on a received tensor the attributes that the sender's program had set on it.

    Raises:
        DecodeError: it is not a tensor, or the attributes are not a mapping.
        ForbiddenTypeError: one of them would hide an attribute that every tensor has.
    """
    if not isinstance(tensor, torch.Tensor) or type(attributes) is not dict:
        raise DecodeError(_NAME, "attributes are set on an object that is not a tensor")
    for name in attributes:
        if type(name) is not str or hasattr(torch.Tensor, name):
            raise ForbiddenTypeError(_NAME, f"a tensor's own {shown(name)} is set")
    check_attributes(attributes)
    vars(tensor).update(attributes)
    return tensor


def member_of(cls: enum.EnumMeta, value: Any) -> Any:
    """Return the enum member with a value, without keeping flags that the class did not know.

    Python's own lookup keeps them, so a series of messages could fill the memory.
    """
    known = cls._value2member_map_
    if not issubclass(cls, enum.IntFlag) or value in known:
        return cls(value)
    member = cls(value)
    if cls.__members__.get(member.name or "") is not member:
        known.pop(member.value, None)  # an equal value may be another object
    return member


def raise_exception(name: Any, args: Any, notes: Any, text: Any) -> BaseException:
    """Create a builtin exception from the name of its class and its arguments.

    Raises:
        ForbiddenTypeError: no builtin exception has that name.
        DecodeError: it cannot be created from these arguments.
    """
    if type(name) is not str or type(text) is not str:
        raise DecodeError(_NAME, "an exception is not built from a name, arguments and a text")
    cls = BUILTIN_ERRORS.get(name)
    if cls is None:
        raise ForbiddenTypeError(_NAME, f"{name!r} is not a built-in exception ({text})")
    is_plain = type(args) is tuple and type(notes) is list
    if not is_plain or not all(type(note) is str for note in notes):  # a range could be huge
        raise DecodeError(
            _NAME, "an exception's arguments are not a tuple, or its notes are not strings"
        )
    check_arguments(cls, args)
    error: BaseException = cls(*args)
    for note in notes:
        error.add_note(note)
    return error


C = TypeVar("C", bound=type)


# Size of an object with all its state in __dict__; a builtin base class makes it larger.
_PLAIN_BASICSIZE = 32


class ClassEntry(NamedTuple):
    """How to take apart and rebuild one class."""

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    is_derived: bool  # from the class, not passed to ``register``


class _Classes:
    """Entries by class and by name, replaced together so that readers need no lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: tuple[dict[type, ClassEntry], dict[str, tuple[type, ClassEntry]]] = ({}, {})

    def add(self, cls: type, entry: ClassEntry) -> None:
        with self._lock:
            by_class, by_name = self._entries
            other = by_name.get(entry.name, (cls, entry))[0]
            same_source = (other.__module__, other.__qualname__) == (
                cls.__module__,
                cls.__qualname__,
            )
            if other is not cls and not same_source:
                raise UsageError(
                    f"{entry.name!r} is already registered for {other!r}; register {cls!r} "
                    "with name="
                )
            self._entries = (
                {**by_class, cls: entry},
                {**by_name, entry.name: (cls, entry)},
            )

    def by_class(self, cls: type) -> ClassEntry | None:
        return self._entries[0].get(cls)

    def by_name(self, name: str) -> ClassEntry | None:
        found = self._entries[1].get(name)
        return found and found[1]


classes = _Classes()


@overload
def register(
    cls: C,
    *,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    name: str | None = None,
) -> C: ...


@overload
def register(
    *,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    name: str | None = None,
) -> Callable[[C], C]: ...


def register(
    cls: Any = None,
    *,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    name: str | None = None,
) -> Any:
    """Register a class for ``codec="msgpack"``, on every rank; also works as a decorator.

    Dataclasses, named tuples, enums, exceptions and classes that keep their state in ``__dict__``
    do not need ``encode`` and ``decode``. Their members are encoded one by one, and they are
    rebuilt as pickle does it, without calling ``__init__``.

    Args:
        cls: the class; subclasses are not included.
        encode: converts an instance to plain data or instances of other registered classes.
        decode: converts that data to an instance; pass both functions or neither.
        name: name of the class in messages, the same on every rank; by default
            ``module.qualname``.

    Returns:
        ``cls``.

    Raises:
        UsageError: only one of the functions was passed, the class's state cannot be found without
            them, or another class has the name.

    Examples:
        >>> import dataclasses, objcomm
        >>> @objcomm.register
        ... @dataclasses.dataclass
        ... class Metrics:
        ...     loss: float
        ...     shape: tuple[int, ...]
        >>> objcomm.from_tensor(objcomm.to_tensor(Metrics(0.5, (2, 3)), codec="msgpack"))
        Metrics(loss=0.5, shape=(2, 3))
    """
    if name is not None:
        check_name(name, "register")
    if cls is None:
        return lambda decorated: register(decorated, encode=encode, decode=decode, name=name)
    if not isinstance(cls, type):
        raise UsageError(f"register: cls={cls!r} must be a class")
    if (encode is None) != (decode is None):
        raise UsageError("register needs both encode= and decode=, or neither")
    is_derived = encode is None or decode is None
    if encode is None or decode is None:
        encode, decode = _derived(cls)
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    classes.add(cls, ClassEntry(name, encode, decode, is_derived))
    return cls


def _derived(cls: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if issubclass(cls, enum.Flag):
        return (lambda member: member.value), lambda value: member_of(
            cls, _checked(cls, value, int)
        )
    if issubclass(cls, enum.Enum):
        return (lambda member: member.name), lambda name: cls[_checked(cls, name, str)]
    if issubclass(cls, tuple) and hasattr(cls, "_make"):
        return list, lambda members: cls._make(_checked(cls, members, list))
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        return (
            lambda obj: [getattr(obj, name) for name in _all_of(obj, names)],
            lambda values: _filled(cls, dict(zip(names, _checked(cls, values, list), strict=True))),
        )
    if issubclass(cls, BaseException):
        return _lower_exception, lambda parts: _raised(cls, parts)
    has_slots = any("__slots__" in vars(base) for base in cls.__mro__[:-1])
    if has_slots or cls.__basicsize__ > _PLAIN_BASICSIZE:
        raise UsageError(
            f"{cls!r} keeps state outside of __dict__; register it with encode= and decode="
        )
    return (lambda obj: dict(vars(obj))), (lambda state: _with_state(cls.__new__(cls), state))


def _checked(cls: Any, received: Any, kind: type) -> Any:
    """Return what was received for an instance, if it has exactly the type that was sent."""
    if type(received) is not kind:
        raise DecodeError(_NAME, f"a {cls.__qualname__} is not built from {shown(received)}")
    return received


def _lower_exception(error: BaseException) -> list[Any]:
    parts = exceptions.take_apart(error)
    return [parts.made_of, parts.attributes]


def _raised(cls: Any, parts: Any) -> Any:
    """Rebuild an exception without calling its ``__init__``."""
    args, state = _checked(cls, parts, list)
    check_arguments(cls, _checked(cls, args, tuple))
    return _with_state(exceptions.make(cls, args), state)


def _with_state(obj: Any, state: Any) -> Any:
    for name in _checked(type(obj), state, dict):
        _checked(type(obj), name, str)
    check_attributes(state)
    # Not with setattr, because a name chosen by the sender may be that of a property.
    vars(obj).update(state)
    return obj


def _filled(cls: Any, state: dict[str, Any]) -> Any:
    obj: Any = object.__new__(cls)
    for name, value in state.items():
        object.__setattr__(obj, name, value)  # works for frozen classes, too
    return obj


def _all_of(obj: Any, names: list[str]) -> list[str]:
    """Return the fields of a dataclass instance, if it has no other attributes.

    Raises:
        TypeError: it has other attributes, which would be lost.
    """
    if further := getattr(obj, "__dict__", {}).keys() - set(names):
        raise TypeError(f"attributes {sorted(further)} are not fields; register with encode=")
    return names


_UNICODE_ERRORS = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
_COLUMN_MAX = 1 << 20
_LISTS = frozenset({list, tuple})


def check_arguments(cls: type, args: tuple[Any, ...]) -> None:
    """Reject an exception that would be disproportionately expensive to create or print.

    Args:
        cls: its class.
        args: its arguments.

    Raises:
        DecodeError: its positions are outside its text, or an argument to iterate over is not a
            list.
    """
    if issubclass(cls, _UNICODE_ERRORS):
        text, start, end = args[-4:-1] if len(args) >= 4 else ("", 0, -1)  # noqa: PLR2004  # if there are as many
        is_right = type(start) is type(end) is int and type(text) in {str, bytes, bytearray}
        if not (is_right and 0 <= start <= end <= len(text)):
            raise DecodeError(_NAME, "the positions of a UnicodeError are outside its text")
    elif issubclass(cls, SyntaxError):
        parts = args[1] if len(args) > 1 else ()
        if type(parts) not in {*_LISTS, str}:
            raise DecodeError(_NAME, "the location of a SyntaxError is not a list")
        if any(type(part) is int and not -1 <= part <= _COLUMN_MAX for part in parts):
            raise DecodeError(_NAME, f"the column of a SyntaxError is beyond {_COLUMN_MAX}")
    elif issubclass(cls, BaseExceptionGroup) and type(args[-1] if args else None) not in _LISTS:
        raise DecodeError(_NAME, "an exception group is not built from a list")
