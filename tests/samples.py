"""Objects that must arrive unchanged, by name; two more modules add to them.

Each rank creates its own, so that a receiver can compare.
"""

import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import pickle
import struct
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import objcomm


class Colour(enum.Enum):
    """An enum without methods."""

    RED = 1
    GREEN = "green"


class Level(enum.IntEnum):
    """An enum whose members are ints."""

    LOW = 1
    HIGH = 2**70


class Rights(enum.Flag):
    """An enum whose members can be combined."""

    READ = enum.auto()
    WRITE = enum.auto()


class Point(NamedTuple):
    """A tuple with field names."""

    x: int
    y: float


@dataclasses.dataclass
class Run:
    """A dataclass that contains others."""

    name: str
    points: list[Point]
    parent: "Run | None" = None


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """A frozen dataclass without ``__dict__``."""

    lr: float
    betas: tuple[float, float]


class Plain:
    """A class with only attributes."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


class TwoArgumentError(Exception):
    """An exception that cannot be rebuilt from one argument."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class Blob:
    """A class that passes its memory to pickle's protocol 5 itself."""

    def __init__(self, content: Any) -> None:
        self.content = bytearray(content)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        assert protocol >= 5
        return Blob, (pickle.PickleBuffer(self.content),)


for _class in (Colour, Level, Rights, Point, Run, Settings, Plain):
    objcomm.register(_class)


@dataclasses.dataclass(frozen=True)
class Sample:
    """How to create an object, and whether the plain codec encodes it."""

    make: Callable[[], Any]
    is_plain: bool


SAMPLES: dict[str, Sample] = {}


def plain(name: str, make: Callable[[], Any]) -> None:
    """Add an object that every codec encodes."""
    SAMPLES[name] = Sample(make, is_plain=True)


def pickled(name: str, make: Callable[[], Any]) -> None:
    """Add an object that only pickle encodes."""
    SAMPLES[name] = Sample(make, is_plain=False)


def _always(obj: Any) -> Callable[[], Any]:
    return lambda: obj


def names(codec: str = "pickle") -> list[str]:
    """List the samples that a codec encodes."""
    from tests import object_samples, tensor_samples  # noqa: F401, PLC0415  # they add their own

    return [name for name, sample in SAMPLES.items() if codec == "pickle" or sample.is_plain]


def make(name: str) -> Any:
    """Create the sample of that name."""
    from tests import object_samples, tensor_samples  # noqa: F401, PLC0415  # they add their own

    return SAMPLES[name].make()


for _value in (None, True, False, 0, -1, 2**24 + 1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**70):
    plain(f"{_value}", _always(_value))
plain("int of 4000 bits", lambda: -(7**1425))
for _number in ("0.0", "-0.0", "1.0", "0.1", "nan", "inf", "-inf", "5e-324", "16777217.0"):
    plain(f"float {_number}", functools.partial(float, _number))
plain("complex", lambda: complex(-0.0, float("nan")))

for _text in (
    "",
    "a",
    "\0",
    "a\0b\0",
    "é",
    "日本語",
    "\N{GRINNING FACE}",
    "\ud800 alone",
    "\u2028",
):
    plain(f"str {_text!a}", _always(_text))
plain("str of 100 kB", lambda: "ü\0" * 50_000)
plain("bytes that look like a frame", lambda: b"\x95" + struct.pack("<Q", 99_991) + bytes(99_991))
plain("bytes that look like opcodes", lambda: b"\x80\x05B\xff\xff\xff\xff." * 20_000)


def _bytes_that_differ(nbytes: int) -> bytes:
    return bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)


# Around every power of two at which a layer may change its behavior, and in the megabytes.
SIZES = (0, 1, 255, 256, 4096, 32_000, 32_767, 32_768, 32_769, 65_535, 65_536, 65_537, 5_000_000)
for _size in SIZES:
    plain(f"{_size} bytes", functools.partial(_bytes_that_differ, _size))
plain("bytearray", lambda: bytearray(b"ab"))
plain("bytearray of 0", bytearray)
plain("bytearray of 300 kB", lambda: bytearray(b"abc") * 100_000)

plain("list of 0", list)
plain("tuple of 0", tuple)
plain("dict of 0", dict)
plain("set of 0", set)
plain("frozenset", lambda: frozenset({1, "a", (2, None)}))
plain("set of tuples", lambda: {(1, 2), (), (3,), None, "x", 2.5, frozenset({1})})
plain("nested", lambda: {"a": [1, (2.0, {"b": {3}}), [[], ()]], "c": {"d": (None, True)}})
plain("dict with keys of many types", lambda: {1: "a", "1": "b", (1, 2): "c", None: 0, b"k": 1})
plain("dict in its own order", lambda: {"z": 1, "a": 2, "m": 3})
plain("1 and True as values", lambda: [1, True, 1.0, 0, False, 0.0])
plain("list of 10000 ints", lambda: list(range(10_000)))
plain("range", lambda: range(1, 10, 3))

_NAIVE = datetime.datetime(2024, 2, 29, 23, 59, 59, 999_999)  # noqa: DTZ001  # must stay naive
plain("datetime", lambda: _NAIVE)
plain("datetime utc", lambda: datetime.datetime(1, 1, 1, tzinfo=datetime.UTC))
plain(
    "datetime in a zone with fold",
    lambda: datetime.datetime(
        2024, 10, 27, 2, 30, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X"), fold=1
    ),
)
plain("date", lambda: datetime.date(9999, 12, 31))
plain("time", lambda: datetime.time(23, 59, 59, 1, fold=1))
plain("timedelta", lambda: datetime.timedelta(days=-1, seconds=1, microseconds=999_999))
plain("zoneinfo", lambda: zoneinfo.ZoneInfo("UTC"))
plain("decimal", lambda: [decimal.Decimal(text) for text in ("0.10", "-0", "NaN", "1E+400")])
plain("fraction", lambda: fractions.Fraction(-1, 3))
plain("path", lambda: pathlib.Path("/a/é b/../c"))
plain("windows path", lambda: pathlib.PureWindowsPath("C:/a"))
plain("uuid", lambda: uuid.UUID(int=2**127 + 1))

plain("enums", lambda: [Colour.RED, Colour.GREEN, Level.HIGH, Rights.READ | Rights.WRITE])
plain("enum as a key", lambda: {Colour.RED: 1, Point(1, 2.0): 2})
plain("namedtuple", lambda: Point(1, 2.0))
plain("dataclasses", lambda: Run("é", [Point(1, float("nan"))], Run("root", [])))
plain("frozen dataclass with slots", lambda: Settings(0.1, (0.9, 0.999)))
plain("registered class", lambda: Plain(a=1, b=[Plain(c=(2,))]))
