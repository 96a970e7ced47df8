"""Streams from a stranger that asked for far more than their bytes, or ended the process.

Each is decoded in its own process with little memory and little processor time, because a
defect may end the process.
"""

import json
import struct
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from tests.once import once
from tests.unit.opcodes import PROTO, named, number, text

_ROOT = Path(__file__).parents[2]
_LITTLE_NBYTES = 300 << 20
_LITTLE_SECONDS = 3
_HANG_SECONDS = 600.0


def ext(name: str) -> msgpack.ExtType:
    """Return the head of an extended value."""
    return msgpack.ExtType(1, name.encode())


LONG_RANGE = [ext("range"), 0, 1 << 40, 1]
PICKLED_RANGE = named("builtins", "range") + number(0) + number(1 << 40) + number(1) + b"\x87R"


def fetched(position: int) -> bytes:
    """Return the opcodes that fetch what the stream has stored at this position."""
    return b"j" + struct.pack("<I", position)


def doubled(times: int) -> bytes:
    """Return the opcodes of a tuple that holds another twice, which holds another twice, etc."""
    return (
        b")\x94" + b"".join(b"h" + bytes([at]) + b"\x86\x94" for at in range(times))
        if times
        else b")"
    )


def filled_from_the_top(count: int, *rounds: bytes) -> bytes:
    """Return the opcodes of ``count`` lists, each put into the next while it is still empty."""
    parts = [b"]\x94" * (count + 1)]
    for at in range(count, 0, -1):
        below = b"j" + struct.pack("<I", at - 1)
        parts += [b"(", *[each.replace(b"?", below) for each in rounds], b"e0"]
    return b"".join(parts)


def same_hash(count: int) -> list[int]:
    """Return integers that all have the hash 1."""
    return [1 + turn * ((1 << 61) - 1) for turn in range(count)]


def hexadecimal(value: int) -> list[object]:
    """Return an integer of any size, as msgpack carries it."""
    return [ext("int"), hex(value)]


# Over the only buffer, of 64 bytes; its text alone would take gigabytes.
EXPANDED = [ext("tensor"), 0, "float8_e5m2", [64], None, [1 << 32, 64], "cpu", False, False]


def registered(name: str, state: object) -> list[object]:
    """Return an object of one of the classes that the judge registers."""
    return [ext("object"), name, state]


P = (1 << 61) - 1  # integers that differ by it have the same hash
BEYOND = [7 + P * (16 + each) for each in range(300)]  # more than 64 bits
FIELDS = [[f"{at:x}", "|i1"] for at in range(300)]
WIDE = next(wide for wide in (range(at, at + (1 << 30)) for at in range(99)) if 0 <= hash(wide) < P)


def decimals(value: int, count: int) -> list[object]:
    """Return ``count`` numbers with the same hash as ``value``."""
    return [[ext("decimal"), str(value + each * P)] for each in range(count)]


def exception(name: str, *arguments: object) -> list[object]:
    """Return a builtin exception."""
    return [ext("exception"), name, [ext("tuple"), *arguments], [], ""]


PLAIN: dict[str, object] = {
    "an error that reads before its text": exception(
        "UnicodeDecodeError", "utf8", b"abc", -(1 << 45), 1 - (1 << 45), "x"
    ),
    "an error with a terabyte of marks": exception(
        "SyntaxError", "m", [ext("tuple"), "f", 1, 1, "text", 1, 1 << 40]
    ),
    "a large integer beside decimals of its hash": [
        ext("set"),
        hexadecimal(5 + (P << 80_000)),
        *([ext("decimal"), str(5 + each * P)] for each in range(999)),
    ],
    "members that are equal for long": [
        ext("set"),
        *(
            [ext("tuple"), *[[ext("fraction"), 1, 1]] * 50, hexadecimal(5 + each * P)]
            for each in range(1000)
        ),
    ],
    "a range of large numbers": [
        ext("range"),
        0,
        hexadecimal((1 << 1_600_000) - 1),
        hexadecimal((1 << 800_000) + 1),
    ],
    "a tensor as a class's name": [ext("object"), EXPANDED, None],
    "a tensor as a buffer's number": [ext("buffer"), EXPANDED],
    "a tensor as an enum's name": registered("Enum", EXPANDED),
    "a tensor as a flag's value": registered("Flag", EXPANDED),
    "members of a named tuple": registered("Tuple", LONG_RANGE),
    "fields of a dataclass": registered("Dataclass", LONG_RANGE),
    "parts of an error of the program's": registered("Error", LONG_RANGE),
    "arguments of an error of the program's": registered("Error", [LONG_RANGE, {}]),
    "a state without names": registered("Class", [ext("dict"), 1, 2]),
    "a state of pairs": registered("Class", [["a", 1]]),
    "a unit of no time": [ext("dtype"), "m8[D/0]"],
    "a scalar of such": [ext("scalar"), "m8[D/0]", bytes(8)],
    "a dtype by numpy's parser": [ext("dtype"), "(99999999,)i4"],
    "arguments of an exception": [ext("exception"), "ValueError", LONG_RANGE, [], ""],
    "members of a group of exceptions": [
        ext("exception"),
        "ExceptionGroup",
        [ext("tuple"), "x", LONG_RANGE],
        [],
        "",
    ],
    "notes of an exception": [ext("exception"), "ValueError", [ext("tuple")], LONG_RANGE, ""],
    "sparse indices": [ext("sparse"), LONG_RANGE, [1.0], [ext("tuple"), 5], False, False],
    "a shape of many sizes": [ext("torch.Size"), *[(1 << 62)] * 60_000],
    "keys of one hash": [
        ext("dict"),
        *[each for value in same_hash(60_000) for each in (hexadecimal(value), None)],
    ],
    "members of one hash": [ext("set"), *map(hexadecimal, same_hash(60_000))],
    "a fraction": [ext("fraction"), hexadecimal(3**1_000_000), hexadecimal(2**1_500_000 + 1)],
    "a large integer before decimals of its hash": [
        ext("set"),
        hexadecimal(5 + (P << 61 * 2_000)),
        *decimals(5, 300),
    ],
    "a large fraction before decimals of its hash": [
        ext("set"),
        [ext("fraction"), hexadecimal(5 + (P << 60_000)), 1],
        *decimals(5, 300),
    ],
    "frozen sets of one hash": [
        ext("set"),
        *(
            [ext("frozenset"), *map(hexadecimal, [7 + P * (16 + each), *BEYOND])]
            for each in range(1_000, 1_020)
        ),
    ],
    "a range beside a scalar of its hash": [
        ext("set"),
        [ext("scalar"), "<i8", struct.pack("<q", hash(WIDE))],
        [ext("range"), WIDE.start, WIDE.stop, 1],
    ],
    "scalars of many fields": [
        ext("set"),
        *(
            # Of bytes with the values -1 and -2, whose hashes are the same.
            [ext("scalar"), FIELDS, bytes(255 - (each >> bit & 1) for bit in range(len(FIELDS)))]
            for each in range(100)
        ),
    ],
    "an array as an array's order": [
        ext("ndarray"),
        0,
        "|u1",
        [64],
        [ext("ndarray"), 1, "|S0", [1 << 31], "C"],
    ],
    "the place of a syntax error": exception("SyntaxError", "m", LONG_RANGE),
    "the place of a syntax error as a list": exception(
        "SyntaxError", "m", ["f", 1, 1, "text", 1, 1 << 40]
    ),
    "members of a group of the program's": registered(
        "Group", [[ext("tuple"), "x", LONG_RANGE], {}]
    ),
    "an address as a state": registered("Class", {"__array_interface__": {}}),
    "an extension alone": ext("tuple"),
    "an extension as a member": [1, ext("tuple")],
    "an extension as a key": {ext("tuple"): 1},
    "too deep": None,
}
for _ in range(201):
    PLAIN["too deep"] = [PLAIN["too deep"]]

EXPANDED_PICKLE = (
    named("objcomm._codecs.pickle5", "_rebuild_tensor")
    + b"(\x8c\x0bfloat8_e5m2K@\x85N"
    + number(1 << 32)
    + b"K@\x86\x8c\x03cpu\x89\x89t\x97\x86R"
)


PICKLED_ARRAY = (
    named("objcomm._codecs.tensors", "rebuild_array")
    + b"(\x97"
    + named("objcomm._codecs.array_dtypes", "array_dtype_named")
    + text("|u1")
    + b"\x85RK\x40\x85"
    + text("C")
    + b"tR"
)

# An address outside of this process's memory.
ADDRESS = (
    b"}("
    + text("data")
    + number(0x1000)
    + b"\x89\x86"
    + text("shape")
    + b"K\x40\x85"
    + text("typestr")
    + text("|u1")
    + text("version")
    + b"K\x03u"
)


def mapping(keys: list[bytes]) -> bytes:
    """Return a msgpack mapping with any keys, including those that msgpack would not write."""
    return b"\xdf" + struct.pack(">I", len(keys)) + b"".join(key + b"\xc0" for key in keys)


PACKED: dict[str, bytes] = {
    **{name: msgpack.packb(each) for name, each in PLAIN.items()},
    "keys of one hash in a mapping of msgpack's": mapping(
        [msgpack.packb(hexadecimal(value)) for value in same_hash(60_000)]
    ),
}

PICKLED: dict[str, bytes] = {
    "a key of a hundred kilobytes in many mappings": number(1 << 1_000_000)
    + b"\x940("
    + b"}h\x00Ns" * 20_000
    + b"t.",
    "memory that is a tensor": EXPANDED_PICKLE[:-3] + EXPANDED_PICKLE + b"\x86R.",
    "a unit of no time": named("objcomm._codecs.array_dtypes", "array_dtype_named")
    + b"\x8c\x07m8[D/0]\x85R.",
    "a range to a queue": named("collections", "deque") + PICKLED_RANGE + b"\x85R.",
    "a range of sizes": named("torch", "Size") + PICKLED_RANGE + b"\x85R.",
    "a key that doubles": b"}" + doubled(60) + b"Ns.",
    "a member that doubles": b"\x8f(" + doubled(60) + b"\x90.",
    "a frozen member that doubles": b"(" + doubled(60) + b"\x91.",
    "a state that doubles": named("collections", "OrderedDict") + b")R" + doubled(60) + b"b.",
    "a dtype that doubles when it is full": filled_from_the_top(
        30, b"\x8c\1a?\x86", b"\x8c\1b?\x86"
    )
    + b"\x8c\1a\x8c\3|u1\x86a0"
    + named("objcomm._codecs.array_dtypes", "array_dtype_named")
    + b"h\x1e\x85R.",
    "lists that are filled from the top": filled_from_the_top(5_000, b"?")
    + b"0j"
    + struct.pack("<I", 5_000)
    + b".",
    "tuples that are equal for long": b"\x8f("
    + b"".join(
        b"M\x2c\x01\x85\x94"
        + b"".join((b"j" + struct.pack("<I", 11 * each + at)) * 2 + b"\x86\x94" for at in range(10))
        + number(5 + each * P)
        + b"\x86"
        for each in range(500)
    )
    + b"\x90.",
    "an enum of a value that doubles": doubled(40)
    + b"\x940"
    + named("a module", "Enum")
    + b"h\x29\x85R.",
    "methods of an ordered mapping": named("collections", "OrderedDict") + b")R}\x8c\5itemsNsb.",
    "members of an expanded tensor": EXPANDED_PICKLE + b"K\x01a.",
    "keys of one hash": b"}("
    + b"".join(number(value) + b"N" for value in same_hash(60_000))
    + b"u.",
    "filled after its place": b"]\x94]\x94h\x00h\x01a0" + b"h\x01]a" + b".",
    "a large argument again and again": b"("
    + b"K\x01" * 60_000
    + b"t\x94(("
    + (named("torch", "Size") + b"h\x00\x85R") * 1_000
    + b"t.",
    "an unknown opcode": b"c",
    "members of an array, from an address": PICKLED_ARRAY
    + named("builtins", "Ellipsis")
    + named("collections", "OrderedDict")
    + b")R}"
    + text("__array_interface__")
    + ADDRESS
    + b"sbs.",
    "members of an array": PICKLED_ARRAY
    + named("builtins", "Ellipsis")
    + named("builtins", "range")
    + number(0)
    + number(1 << 30)
    + number(1)
    + b"\x87Rs.",
    "a slice of a list": b"](K\x01K\x02e"
    + named("builtins", "slice")
    + b"NNN\x87R"
    + PICKLED_RANGE
    + b"s.",
    "an attribute of a tensor that is an address": named(
        "objcomm._codecs.pickle5", "_set_attributes"
    )
    + named("objcomm._codecs.pickle5", "_rebuild_tensor")
    + b"("
    + text("uint8")
    + b"K\x40\x85NN"
    + text("cpu")
    + b"\x89\x89t\x97\x86R}"
    + text("__array_interface__")
    + ADDRESS
    + b"s\x86R.",
    "a member of an enum that is made": doubled(40)
    + b"\x940"
    + named("a module", "Enum")
    + b"h\x29\x85\x81.",
    "a member of an enum of an expanded tensor": named("a module", "Enum")
    + EXPANDED_PICKLE
    + b"\x85R.",
    "a class of an enum": named("a module", "Enum") + text("E") + text("c d") + b"\x86R.",
    # All lists stay on the stack; each is put into a slice, and holds the slice of the next.
    "slices that are filled from the top": named("builtins", "slice")
    + b"\x940"
    + b"]\x94" * 300
    + b"".join(b"h\x00" + fetched(1 + at) + b"NN\x87R\x940" for at in range(300))
    + b"".join(fetched(300 + at) + b"a0" for at in range(299, 0, -1))
    + b"0"
    + fetched(300)
    + b".",
    "slots of an ordered mapping": named("collections", "OrderedDict")
    + b")R(N}"
    + text("items")
    + b"Nstb.",
}

# Torch is imported once; each stream gets its own child process.
_JUDGE = """
import json, os, resource, sys
import collections, dataclasses, enum, torch, numpy, objcomm
from typing import NamedTuple
from objcomm._codecs import base

Enum = enum.Enum("Enum", "a b", module="a module")
objcomm.register(Enum, name="Enum")
objcomm.register(enum.Flag("F", "a b"), name="Flag")
objcomm.register(NamedTuple("T", [("a", int)]), name="Tuple")
objcomm.register(dataclasses.make_dataclass("D", ["a", "b"]), name="Dataclass")
objcomm.register(type("R", (Exception,), {{}}), name="Error")
objcomm.register(type("C", (), {{}}), name="Class")
objcomm.register(type("G", (ExceptionGroup,), {{}}), name="Group")

def decode(kind, raw):
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in (64, 0)]
    with objcomm.configure(allow=[collections.deque, Enum]):
        return base.decode(kind, raw, buffers)

for codec in ("msgpack", "pickle"):
    objcomm.from_tensor(objcomm.to_tensor([1j, numpy.float32(1), torch.ones(3)], codec=codec))
for line in sys.stdin:
    name, kind, raw = json.loads(line)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + {nbytes},) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, ({seconds},) * 2)
        try:
            decode(kind, memoryview(bytes.fromhex(raw)))
            told = "decoded"
        except objcomm.DecodeError as error:
            lacked = isinstance(error.__cause__, MemoryError) or "allocate memory" in str(error)
            told = "asked for too much" if lacked else f"refused: {{error}}"
        except BaseException as error:
            told = repr(error)
        os.write(writing, told[:1000].encode("utf-8", "replace"))
        os._exit(0)
    os.close(writing)
    told = open(reading, "rb").read().decode()
    print(json.dumps([name, told or f"ended by status {{os.waitpid(child, 0)[1]}}"]), flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what became of each stream."""
    return once(tmp_path_factory, "hostile objects", lambda _: judged())


def judged() -> dict[str, str]:
    """Have each stream decoded in a child process."""
    plain = [(f"plain: {name}", "msgpack", each) for name, each in PACKED.items()]
    pickled = [(f"pickle: {name}", "pickle", PROTO + each) for name, each in PICKLED.items()]
    lines = [json.dumps([name, kind, raw.hex()]) for name, kind, raw in [*plain, *pickled]]
    program = _JUDGE.format(nbytes=_LITTLE_NBYTES, seconds=_LITTLE_SECONDS)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=_ROOT,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=_HANG_SECONDS,
        check=True,
    )
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("name", PACKED)
def test_msgpack_refuses_what_asks_for_more_than_its_bytes(
    name: str, answers: dict[str, str]
) -> None:
    assert answers[f"plain: {name}"].startswith("refused: ")


@pytest.mark.parametrize("name", PICKLED)
def test_a_pickle_under_allow_is_refused_that_asks_for_more(
    name: str, answers: dict[str, str]
) -> None:
    assert answers[f"pickle: {name}"].startswith("refused: ")
