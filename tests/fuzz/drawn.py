"""Messages drawn from the table of everything that an untrusted message can create.

Each constructor mostly gets valid arguments, so that the code after its first check is reached too,
and now and then anything else: wrong types, huge and negative numbers, members that are shared,
that contain themselves, or that are repeated very often.
"""

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack

from objcomm._codecs import exceptions, tensors, types

_NUMBERS: Final = (0, 1, 2, 3, 7, 8, 16, 31, 64, 127, 128, 255, 256, 32_768, 65_536, 1 << 20)
_LARGE: Final = (2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
EXTREMES: Final = (*_NUMBERS, *_LARGE)
_HUGE: Final = (2**64, -(2**63) - 1, 3**5_000, -(7**40_000), 2 ** (1 << 16))
_FLOATS: Final = (0.0, -0.0, 0.5, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))

# Numbers with one hash, and strings that a constructor might accept.
_MODULUS: Final = (1 << 61) - 1  # of Python's hash of a number
_ONE_HASH: Final = tuple(1 + turn * _MODULUS for turn in range(300))
_WIDE: Final = next(
    wide for wide in (range(at, at + (1 << 28)) for at in range(99)) if 0 <= hash(wide) < _MODULUS
)
_ARRAY_DTYPES: Final = (
    *("<f4", ">i8", "|u1", "|b1", "<c16", "|S0", "|S4", "<U2", "|V8", "<m8[D]", ">M8[25ns]"),
    *("<f16", "|V0", "<U0", "<m8", "|i1"),
)
_ODD_DTYPES: Final = (
    *("m8[D/0]", "<m8[0D]", "<M8[-1s]", "(99999999,)i4", "i4,f8", "|O", "O", "U1000000000"),
    *("S999999999", "<U536870912", "datetime64[as]", "f4:(9,9)", "|V2147483648", "<f3", "=f4"),
)
_DECIMALS: Final = ("1e999999999", "nan", "-1", "1E+5", "sNaN123", "0." + "3" * 50_000)
TEXTS: Final = (
    *("", "a", "float32", "int64", "cpu", "meta", "cuda", "mps", "cpu:7", "C", "F", "A", "-0x7f"),
    *("0x" + "f" * 50_000, "UTC", "../x", "Europe/Berlin", "tests.samples.Run", "é", "\ud800"),
    *("x" * 300, "/" * 5_000, "ValueError", "ExceptionGroup", "OSError", "StopIteration"),
    *("UnicodeDecodeError", "SystemExit", "ImportError", "SyntaxError", "items", "__class__"),
    *("__array_interface__", "__cuda_array_interface__", "__setstate__"),
    *(*_DECIMALS, *_ARRAY_DTYPES, *_ODD_DTYPES),
)
_REPEATED: Final = (1_000, 20_000, 100_000)
_REPEATED_NBYTES: Final = 300_000

_Draw = random.Random


class Made:
    """The result of a table entry for these parts."""

    def __init__(self, name: str, *parts: Any) -> None:
        self.name = name
        self.parts = parts


class Listed(list[Any]):
    """A list that is a tuple in a pickle, and a list in msgpack."""


class Repeated:
    """A member that a list, a tuple, a set or a mapping contains very often."""

    def __init__(self, member: Any, times: int) -> None:
        self.member = member
        self.times = times


def value(chance: _Draw, depth: int = 0) -> Any:
    """Draw any value."""
    draw = chance.random()
    if depth > 5 or draw < 0.35:
        return _scalar(chance)
    if draw < 0.5:
        return _members(chance, depth)
    if draw < 0.55:
        return {chance.choice(TEXTS): value(chance, depth + 1) for _ in range(chance.randrange(4))}
    return made(chance, chance.choice(_NAMES), depth)


def made(chance: _Draw, name: str, depth: int) -> Made:
    """Draw a value of the table, from valid arguments or from similar ones."""
    if name not in PARTS:
        return Made(name, *_members(chance, depth))
    parts = list(PARTS[name](chance, depth))
    draw = chance.random()
    if draw < 0.1 and parts:
        parts[chance.randrange(len(parts))] = value(chance, depth + 1)
    elif draw < 0.13:
        parts.append(value(chance, depth + 1))
    elif draw < 0.16 and parts:
        parts.pop()
    return Made(name, *parts)


def _scalar(chance: _Draw) -> Any:
    draw = chance.random()
    if draw < 0.4:
        return chance.choice(EXTREMES) * chance.choice((1, 1, -1))
    if draw < 0.45:
        return chance.choice(_HUGE)
    if draw < 0.6:
        return chance.choice(TEXTS)
    if draw < 0.7:
        return chance.choice(_FLOATS)
    return chance.choice((None, True, False, b"", b"\0" * 16, b"\xff" * 70_000))


def _integer(chance: _Draw) -> int:
    draw = chance.random()
    if draw < 0.9:
        return chance.choice((0, 1, 1, 1, 1, 2, 7, 59))
    return chance.choice(_HUGE) if draw < 0.92 else chance.choice((-1, 1)) * chance.choice(EXTREMES)


def _size(chance: _Draw) -> int:
    return chance.choice((0, 1, 2, 3, 4, 8)) if chance.random() < 0.9 else chance.choice(EXTREMES)


def _members(chance: _Draw, depth: int) -> list[Any]:
    if chance.random() < 0.05:
        return list(chance.sample(_ONE_HASH, chance.choice((2, 99, 101, 300))))
    if chance.random() < 0.03:
        return _alike(chance)
    found = [value(chance, depth + 1) for _ in range(chance.choice((0, 1, 1, 2, 3, 5, 8)))]
    if found and chance.random() < 0.05:
        times = min(chance.choice(_REPEATED), _REPEATED_NBYTES // len(packed(found[-1])))
        found[-1] = Repeated(found[-1], times)
    return found


def _alike(chance: _Draw) -> list[Any]:
    """Draw values of different kinds with one hash, those that are slow to compare first."""
    hashed = chance.choice((1, hash(_WIDE)))
    large = hashed + (_MODULUS << chance.choice((3, 60_000)))
    members: list[Any] = [
        Made("int", hex(large)),
        Made("fraction", large, 1),
        Made("scalar", "<i8", struct.pack("<q", hashed)),
        Made("range", _WIDE.start, _WIDE.stop, 1),
    ]
    chance.shuffle(members)
    further = range(1, chance.choice((2, 300)))
    kind = chance.choice(("int", "decimal", "frozenset"))
    if kind == "frozenset":
        inner = [Made("int", hex(large + each * _MODULUS)) for each in further]
        return [Made(kind, Made("int", hex(large - each)), *inner) for each in further[:20]]
    text: Callable[[int], str] = hex if kind == "int" else str
    digits_max = 1 << 12  # ``str`` would refuse more
    start = hashed if large.bit_length() > digits_max else large
    return [*members, *(Made(kind, text(start + each * _MODULUS)) for each in further)]


def _shape(chance: _Draw) -> list[int]:
    if chance.random() < 0.03:
        return [chance.choice((0, 1, 1 << 62))] * chance.choice((64, 65, 60_000))
    return [_size(chance) for _ in range(chance.randrange(4))]


def _tensor(chance: _Draw, _: int = 0) -> list[Any]:
    """Draw a tensor's parts over the targets' buffers: the first has 64 bytes, the last none."""
    dtype = chance.choice(("uint8", "float32", "int64", *tensors.DTYPES))
    nbytes = tensors.DTYPES[dtype].itemsize
    at, shape = 4, [0]
    if chance.random() < 0.8:
        at, shape = 0, chance.choice(([64 // nbytes], [2, 32 // nbytes], [64 // nbytes, 1, 1]))
    if chance.random() < 0.1:
        shape = _shape(chance)
    order = chance.choice((None, None, list(range(len(shape)))[::-1], [0, 0], [5], [-1], "ab"))
    wider = [chance.choice((2, 2**31, 2**62)), *shape]
    expanded = chance.choice((None, None, None, shape, wider, _shape(chance)))
    device = chance.choice(("cpu", "cpu", "cpu", "meta", "cuda", "cpu:7", "xpu", ""))
    return [at, dtype, shape, order, expanded, device, chance.random() < 0.1, chance.random() < 0.1]


def _dense(at: int, dtype: str, shape: list[int]) -> Made:
    requires_grad = is_parameter = False
    return Made("tensor", at, dtype, shape, None, None, "cpu", requires_grad, is_parameter)


def _sparse(chance: _Draw, _: int) -> list[Any]:
    if chance.random() < 0.4:  # valid ones
        at, count = chance.choice(((0, 8), (4, 0)))
        indices, values = _dense(at, "int64", [1, count]), _dense(at, "float64", [count])
        shape = chance.choice((2**62, 2**62, 64, 2**63 - 1))
        return [indices, values, Made("tuple", shape), chance.random() < 0.5, False]
    parts = [Made("tensor", *_tensor(chance)), Made("tensor", *_tensor(chance))]
    return [*parts, Made("tuple", *_shape(chance)), chance.random() < 0.5, False]


def _attributes(chance: _Draw, depth: int) -> list[Any]:
    owner = Made("tensor", *_tensor(chance)) if chance.random() < 0.8 else value(chance, depth + 1)
    names = ("label", "label", "data", "__array_interface__")
    return [owner, {chance.choice(names): value(chance, depth + 1)}]


def _array_dtype(chance: _Draw, depth: int = 0) -> Any:
    draw = chance.random()
    if draw < 0.15 and depth < 40:
        names = [chance.choice("abcd") for _ in range(chance.randrange(1, 4))]
        shapes = [chance.choice(([], [_shape(chance)])) for _ in names]
        return [
            [name, _array_dtype(chance, depth + 1), *shape]
            for name, shape in zip(names, shapes, strict=True)
        ]
    return chance.choice(_ARRAY_DTYPES if draw < 0.85 else _ODD_DTYPES)


def _array(chance: _Draw, _: int) -> list[Any]:
    if chance.random() < 0.5:
        return [0, chance.choice(("<f4", "<U1")), [4, 4], chance.choice("CF")]
    return [chance.choice((0, 4)), _array_dtype(chance), _shape(chance), chance.choice("CFA")]


def _numpy_scalar(chance: _Draw, _: int) -> list[Any]:
    dtype = chance.choice(_ARRAY_DTYPES)
    nbytes = chance.choice((0, 1, 4, 8, 16, 32))
    return [dtype if chance.random() < 0.9 else _array_dtype(chance), b"\1" * nbytes]


def _exception(chance: _Draw, depth: int) -> list[Any]:
    name = chance.choice(sorted(exceptions.BUILTIN_ERRORS))
    arguments = Made("tuple", *_members(chance, depth))
    if name in {"SyntaxError", "TabError"} and chance.random() < 0.5:
        place = ["f", chance.choice(EXTREMES), 1, "text", 1, chance.choice(EXTREMES)]
        arguments = Made("tuple", "m", chance.choice((place, Made("tuple", *place))))
    if name.endswith("Group"):
        arguments = Made("tuple", "x", [made(chance, "exception", depth + 1)] if depth < 5 else [])
    notes = [chance.choice(TEXTS) for _ in range(chance.randrange(3))]
    return [name, arguments, notes, chance.choice(TEXTS), *_rest(chance, depth)]


def _rest(chance: _Draw, depth: int) -> list[Any]:
    """Draw an exception's other parts; nothing for most."""
    if chance.random() < 0.6:
        return []
    links: list[Any] = [chance.choice((None, None, -1, 0, 1, 9)) for _ in range(2)]
    if chance.random() < 0.3 and depth < 5:
        links[0] = made(chance, "exception", depth + 1)
    names = ("name", "path", "characters_written", "start", "code", "__notes__", "__array_struct__")
    fields, attributes = (
        {name: value(chance, depth + 1) for name in names if chance.random() < 0.1}
        for _ in range(2)
    )
    args = Made("tuple", *_members(chance, depth)) if chance.random() < 0.2 else None
    return [args, fields, attributes, chance.choice((None, [*links, chance.random() < 0.5]))]


def _pairs(chance: _Draw, depth: int) -> list[Any]:
    members = _members(chance, depth)
    return members if len(members) % 2 == 0 else [*members, None]


def _object(chance: _Draw, depth: int) -> list[Any]:
    if chance.random() < 0.2:
        return ["tests.samples.Colour", chance.choice(("RED", "GREEN"))]
    return [chance.choice(("tests.samples.Run", "tests.samples.Colour")), value(chance, depth + 1)]


def _zone(chance: _Draw, depth: int) -> Any:
    names = ("timezone", "zoneinfo")
    return made(chance, chance.choice(names), depth + 1) if chance.random() < 0.5 else None


#: Values that fit each kind of argument in the table, by the description in errors.
ARGUMENTS: Final[dict[str, Callable[[_Draw, int], Any]]] = {
    "anything": lambda chance, depth: value(chance, depth + 1),
    "an integer": lambda chance, _: _integer(chance),
    "an integer of up to 4096 bits": lambda chance, _: _integer(chance),
    "a float": lambda chance, _: chance.choice(_FLOATS),
    "a text": lambda chance, _: chance.choice(TEXTS),
    "a size": lambda chance, _: _size(chance),
    "None or a time zone": _zone,
    "a hexadecimal number": lambda chance, _: hex(_integer(chance)),
    "16 bytes": lambda chance, _: chance.randbytes(16),
    "a timedelta": lambda chance, _: Made("timedelta", 0, chance.randrange(-90_000, 90_000), 0),
    "a time zone's name": lambda chance, _: chance.choice(("UTC", "Asia/Tokyo", "../x", "a" * 100)),
    "a dtype": lambda chance, _: Made("torch.dtype", chance.choice((*tensors.DTYPES,))),
    "a device's name": lambda chance, _: chance.choice(("cpu", "meta", "cuda:9999", "x_1")),
}


def _of_constructor(name: str) -> Callable[[_Draw, int], list[Any]]:
    constructor = types.CONSTRUCTORS[name]

    def parts(chance: _Draw, depth: int) -> list[Any]:
        arguments = list(constructor.arguments)
        if constructor.rest is not None:
            arguments += [constructor.rest] * chance.choice((0, 1, 2, 64, 65))
        missing = chance.randrange(constructor.optional + 1)
        wanted = arguments[: len(arguments) - missing]
        return [ARGUMENTS[argument.description](chance, depth) for argument in wanted]

    return parts


#: How to draw the parts of each entry in the table.
PARTS: Final[dict[str, Callable[[_Draw, int], list[Any]]]] = {
    **{name: _of_constructor(name) for name in types.CONSTRUCTORS},
    **dict.fromkeys(("tuple", "set", "frozenset"), _members),
    "dict": _pairs,
    "exception": _exception,
    "buffer": lambda chance, _: [chance.choice((0, 1, 2, 3, 4, 5, -1))],
    "tensor": _tensor,
    "attributes": _attributes,
    "sparse": _sparse,
    "ndarray": _array,
    "scalar": _numpy_scalar,
    "dtype": lambda chance, _: [_array_dtype(chance)],
    "object": _object,
}
_NAMES: Final = (*PARTS, "no such thing")


def packed(drawn: Any) -> bytes:
    """Encode it as msgpack, as the plain codec does."""
    if isinstance(drawn, Made):
        return packed([msgpack.ExtType(1, drawn.name.encode()), *drawn.parts])
    if isinstance(drawn, list):
        return _counted(0x90, 0xDC, sum(map(_times, drawn))) + b"".join(map(packed, drawn))
    if isinstance(drawn, dict):
        members = [member for pair in drawn.items() for member in pair]
        return _counted(0x80, 0xDE, len(drawn)) + b"".join(map(packed, members))
    if isinstance(drawn, Repeated):
        return packed(drawn.member) * drawn.times
    if isinstance(drawn, int) and not -(2**63) <= drawn < 2**64:
        return packed(Made("int", hex(drawn)))
    found: bytes = msgpack.packb(drawn, unicode_errors="surrogatepass")
    return found


def _times(member: Any) -> int:
    return member.times if isinstance(member, Repeated) else 1


def _counted(few: int, many: int, count: int) -> bytes:
    return bytes([few + count]) if count < 16 else bytes([many + 1]) + struct.pack(">I", count)


class Pickled:
    """A pickle of a drawn value, as the restricted unpickler may receive it.

    Its members are fetched again at random, even while they are being built.

    Attributes:
        stream: the whole pickle.
    """

    def __init__(self, chance: _Draw, drawn: Any) -> None:
        self._chance = chance
        self._memos = 0
        self._may_keep = True
        self._may_grow = True
        # Buffers can only be taken in order, so each is kept under its number.
        self._parts: list[bytes] = [b"\x80\x05"]
        for _ in range(_BUFFERS):
            self._write(b"\x97\x940")
            self._memos += 1
        self._put(drawn)
        self._write(b".")
        self.stream = b"".join(self._parts)

    def _write(self, *parts: bytes) -> None:
        self._parts += parts

    def _put(self, drawn: Any) -> None:
        draw = self._chance.random()
        if draw < 0.04:
            self._fetch(self._chance.randrange(self._memos))
        elif draw < 0.05:
            self._double()
        elif draw < 0.055:
            self._write(self._chance.randbytes(1))
        elif draw < 0.08 and self._may_grow:
            self._may_grow = False
            self._put(drawn)
            self._grow()
            self._may_grow = True
        elif isinstance(drawn, Made):
            self._make(drawn)
        elif isinstance(drawn, Listed):
            self._fill(b"(", drawn, b"t")
            self._keep()
        elif isinstance(drawn, list):
            self._open(b"]", drawn, b"e", b"a")
        elif isinstance(drawn, dict):
            members = [member for pair in drawn.items() for member in pair]
            self._open(b"}", members, b"u", b"s")
        else:
            self._write(_atom(drawn))

    def _grow(self) -> None:
        """Write members or a state for the last object, whatever it is."""
        kind = self._chance.choice("asbeu")
        width = {"a": 1, "s": 2, "b": 1, "e": 2, "u": 2}[kind]
        self._write(b"(" if kind in "eu" else b"")
        for _ in range(width):
            name = self._chance.choice(TEXTS)
            drawn = self._chance.choice((name, {name: {"data": Listed([4096, False])}}))
            self._put(value(self._chance, 4) if self._chance.random() < 0.5 else drawn)
        self._write(kind.encode())

    def _keep(self) -> None:
        if self._may_keep and self._chance.random() < 0.6:
            self._write(b"\x94")
            self._memos += 1

    def _fetch(self, at: int) -> None:
        self._write(b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<I", at))

    def _double(self) -> None:
        """Write nested tuples, each of which contains the next one twice."""
        self._write(b")")
        if self._may_keep:
            for _ in range(self._chance.choice((2, 60))):
                self._write(b"\x94")
                self._memos += 1
                self._fetch(self._memos - 1)
                self._write(b"\x86")

    def _open(self, opener: bytes, members: Sequence[Any], many: bytes, one: bytes) -> None:
        """Write an object that is filled after it is created, so that it may contain itself."""
        self._write(opener)
        self._keep()
        width = 2 if one == b"s" else 1
        is_repeated = any(isinstance(member, Repeated) for member in members)
        if one and not is_repeated and self._chance.random() < 0.2:
            for at in range(0, len(members) - width + 1, width):
                for member in members[at : at + width]:
                    self._put(member)
                self._write(one)
        elif members:
            self._fill(b"(", members, many)

    def _fill(self, before: bytes, members: Sequence[Any], after: bytes) -> None:
        self._write(before)
        for member in members:
            if isinstance(member, Repeated):
                kept, self._may_keep = self._may_keep, False
                at = len(self._parts)
                self._put(member.member)
                piece = b"".join(self._parts[at:])  # differs from msgpack's, and is often longer
                self._parts[at:] = [piece * min(member.times, 1 + _REPEATED_NBYTES // len(piece))]
                self._may_keep = kept
            else:
                self._put(member)
        self._write(after)

    def _make(self, drawn: Made) -> None:
        name, parts = drawn.name, list(drawn.parts)
        if name in _CONTAINERS:
            opener, many = _CONTAINERS[name]
            if opener == b"(":
                self._fill(opener, parts, many)
            else:
                self._open(opener, parts, many, b"s" if many == b"u" else b"")
            self._keep()
        elif name == "buffer":
            self._fetch(parts[0] if _is_position(parts) else 0)
        elif name == "torch.dtype":
            self._write(
                _named(f"torch.{parts[0]}" if parts and type(parts[0]) is str else "torch.None")
            )
        elif name == "object":
            self._write(_named(self._chance.choice(ADMITTED)))
            self._fill(b"(", self._chance.choice((parts[2:], parts[-1:])), b"t")
            self._write(self._chance.choice((b"\x81", b"R")))
            if parts:
                self._put(parts[-1])
                self._write(b"b")
        elif name not in TOOLS and self._chance.random() < 0.95:
            self._put(Listed(parts))  # a pickle has no name for it
        else:
            self._write(_named(TOOLS.get(name, name)))
            self._arguments(name, parts)
            self._write(b"R")
            self._keep()

    def _arguments(self, name: str, parts: list[Any]) -> None:
        if name == "torch.Size":
            parts = [Listed(parts)]
        elif name in {"tensor", "ndarray"} and _is_position(parts):
            memory, *about = parts
            about = [Listed(each) if isinstance(each, list) else each for each in about]
            if name == "ndarray" and about:
                about[0] = Made("dtype", about[0])
            parts = [Made("buffer", memory), *about]
            parts = [Listed(about), parts[0]] if name == "tensor" else parts
        elif name == "scalar" and parts:
            parts[0] = Made("dtype", parts[0])
        elif name == "sparse" and len(parts) > 2 and isinstance(parts[2], Made):
            parts[2] = Listed(parts[2].parts)
        self._fill(b"(", parts, b"t")


_BUFFERS = 5

_CONTAINERS: Final = {
    "tuple": (b"(", b"t"),
    "frozenset": (b"(", b"\x91"),
    "set": (b"\x8f", b"\x90"),
    "dict": (b"}", b"u"),
}

#: The functions that a stream may name, by what they create.
TOOLS: Final = {
    "complex": "builtins.complex",
    "range": "builtins.range",
    "slice": "builtins.slice",
    "torch.Size": "torch.Size",
    "torch.device": "torch.device",
    "tensor": "objcomm._codecs.pickle5._rebuild_tensor",
    "sparse": "objcomm._codecs.tensors.rebuild_coo",
    "ndarray": "objcomm._codecs.tensors.rebuild_array",
    "scalar": "numpy._core.multiarray.scalar",
    "dtype": "objcomm._codecs.array_dtypes.array_dtype_named",
}

#: Names that a stream also calls, builds or sets the state of: the package's other functions, and
#: classes that the target allows.
ADMITTED: Final = (
    *("collections.deque", "datetime.date", "datetime.timedelta", "tests.samples.Run"),
    "tests.samples.Colour",
    *("collections.OrderedDict", "objcomm._codecs.pickle5._same", "numpy.core.multiarray.scalar"),
    "objcomm._codecs.pickle5._set_state",
    *("objcomm._codecs.pickle5._set_attributes", "objcomm._codecs.tensors.array_dtype_named"),
    *(f"objcomm._codecs.exceptions.{each}" for each in ("make", "complete", "complete_with_state")),
    *("builtins.Ellipsis", "builtins.NotImplemented", "builtins.eval", "os.system"),
)


def _is_position(parts: Sequence[Any]) -> bool:
    return bool(parts) and type(parts[0]) is int and parts[0] in range(_BUFFERS)


def _named(path: str) -> bytes:
    module, _, name = path.rpartition(".")
    return _atom(module) + _atom(name) + b"\x93"


def _atom(drawn: Any) -> bytes:
    if drawn is None or isinstance(drawn, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[drawn]
    if isinstance(drawn, int):
        raw = drawn.to_bytes(drawn.bit_length() // 8 + 1, "little", signed=True)
        if len(raw) < 256:
            return b"\x8a" + bytes([len(raw)]) + raw
        return b"\x8b" + struct.pack("<i", len(raw)) + raw
    if isinstance(drawn, float):
        return b"G" + struct.pack(">d", drawn)
    raw = drawn if isinstance(drawn, bytes) else drawn.encode("utf-8", "surrogatepass")
    return (b"B" if isinstance(drawn, bytes) else b"X") + struct.pack("<I", len(raw)) + raw
