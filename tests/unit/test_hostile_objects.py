"""Streams from an attacker that asked for far more than their bytes, or ended the process.

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
from tests.unit.opcodes import PROTO, called, mapping, named, number, text

_ROOT = Path(__file__).parents[2]
_LITTLE_NBYTES = 300 << 20
_LITTLE_SECONDS = 3
_HANG_SECONDS = 600.0


def ext(name: str) -> msgpack.ExtType:
    """Return the head of an extended value."""
    return msgpack.ExtType(1, name.encode())


LONG_RANGE = [ext("range"), 0, 1 << 40, 1]
PICKLED_RANGE = called("builtins", "range", number(0), number(1 << 40), number(1))


def fetched(position: int) -> bytes:
    """Return the opcodes that fetch what the stream has stored at this position."""
    return b"j" + struct.pack("<I", position)


def doubled(times: int) -> bytes:
    """Return the opcodes of a tuple that holds another twice, which holds another twice, etc."""
    pairs = [b"h" + bytes([at]) + b"\x86\x94" for at in range(times)]
    return b"".join([b")\x94", *pairs])


def filled_from_the_top(count: int, *rounds: bytes) -> bytes:
    """Return the opcodes of ``count`` lists, each put into the next while it is still empty."""
    parts = [b"]\x94" * (count + 1)]
    for at in range(count, 0, -1):
        parts += [b"(", *[each.replace(b"?", fetched(at - 1)) for each in rounds], b"e0"]
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


WIDE_RANGE = [ext("range"), WIDE.start, WIDE.stop, 1]


def decimals(value: int, count: int) -> list[object]:
    """Return ``count`` numbers with the same hash as ``value``."""
    return [[ext("decimal"), str(value + each * P)] for each in range(count)]


def set_of(*members: object) -> list[object]:
    return [ext("set"), *members]


def exception(name: str, *arguments: object) -> list[object]:
    """Return a builtin exception."""
    return [ext("exception"), name, [ext("tuple"), *arguments], [], ""]


PLACE = ("f", 1, 1, "text", 1, 1 << 40)
EMPTY_ITEMS = [ext("ndarray"), 1, "|S0", [1 << 31], "C"]
ONES = [[ext("fraction"), 1, 1]] * 50
LARGE_FRACTION = [ext("fraction"), hexadecimal(5 + (P << 60_000)), 1]
FROZEN = [[7 + P * (16 + each), *BEYOND] for each in range(1_000, 1_020)]
KEYS = [part for value in same_hash(60_000) for part in (hexadecimal(value), None)]
# Of bytes with the values -1 and -2, whose hashes are the same.
SCALARS = [bytes(255 - (each >> bit & 1) for bit in range(len(FIELDS))) for each in range(100)]

PLAIN: dict[str, object] = {
    "an error that reads before its text": exception(
        "UnicodeDecodeError", "utf8", b"abc", -(1 << 45), 1 - (1 << 45), "x"
    ),
    "an error with a terabyte of marks": exception("SyntaxError", "m", [ext("tuple"), *PLACE]),
    "members that are equal for long": set_of(
        *([ext("tuple"), *ONES, hexadecimal(5 + each * P)] for each in range(1000))
    ),
    "a large range": [ext("range"), 0, hexadecimal(2**1_600_000 - 1), hexadecimal(2**800_000 + 1)],
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
    "members of a group of exceptions": exception("ExceptionGroup", "x", LONG_RANGE),
    "notes of an exception": [ext("exception"), "ValueError", [ext("tuple")], LONG_RANGE, ""],
    "sparse indices": [ext("sparse"), LONG_RANGE, [1.0], [ext("tuple"), 5], False, False],
    "a shape of many sizes": [ext("torch.Size"), *[(1 << 62)] * 60_000],
    "keys of one hash": [ext("dict"), *KEYS],
    "members of one hash": [ext("set"), *map(hexadecimal, same_hash(60_000))],
    "a fraction": [ext("fraction"), hexadecimal(3**1_000_000), hexadecimal(2**1_500_000 + 1)],
    "decimals with an integer's hash": set_of(hexadecimal(5 + (P << 122_000)), *decimals(5, 999)),
    "decimals with a large fraction's hash": set_of(LARGE_FRACTION, *decimals(5, 300)),
    "frozensets of one hash": set_of(*([ext("frozenset"), *map(hexadecimal, at)] for at in FROZEN)),
    "a range beside a scalar of its hash": set_of(
        [ext("scalar"), "<i8", struct.pack("<q", hash(WIDE))], WIDE_RANGE
    ),
    "scalars of many fields": set_of(*([ext("scalar"), FIELDS, raw] for raw in SCALARS)),
    "an array as an array's order": [ext("ndarray"), 0, "|u1", [64], EMPTY_ITEMS],
    "the place of a syntax error": exception("SyntaxError", "m", LONG_RANGE),
    "the place of a syntax error as a list": exception("SyntaxError", "m", [*PLACE]),
    "members of the program's group": registered("Group", [[ext("tuple"), "x", LONG_RANGE], {}]),
    "an address as a state": registered("Class", {"__array_interface__": {}}),
    "an extension alone": ext("tuple"),
    "an extension as a member": [1, ext("tuple")],
    "an extension as a key": {ext("tuple"): 1},
    "too deep": None,
}
for _ in range(201):
    PLAIN["too deep"] = [PLAIN["too deep"]]

ENUM = ("a module", "Enum")
DTYPE_NAMED = ("objcomm._codecs.array_dtypes", "array_dtype_named")
ORDERED = named("collections", "OrderedDict") + b")R"
ON_CPU = text("cpu") + b"\x89\x89t\x97\x86R"
TENSOR = named("objcomm._codecs.pickle5", "_rebuild_tensor")
EXPANDED_PICKLE = (
    TENSOR + b"(" + text("float8_e5m2") + b"K@\x85N" + number(1 << 32) + b"K@\x86" + ON_CPU
)
TENSOR_PICKLE = TENSOR + b"(" + text("uint8") + b"K@\x85NN" + ON_CPU
ARRAY = named("objcomm._codecs.tensors", "rebuild_array")
ARRAY_PICKLE = ARRAY + b"(\x97" + called(*DTYPE_NAMED, text("|u1")) + b"K@\x85" + text("C") + b"tR"
MEMBERS_OF_ARRAY = ARRAY_PICKLE + named("builtins", "Ellipsis")
SLICE = called("builtins", "slice", b"N", b"N", b"N")
SIZE = called("torch", "Size", b"h\x00")

# An address outside of this process's memory.
ADDRESS = mapping(
    data=number(0x1000) + b"\x89\x86",
    shape=b"K\x40\x85",
    typestr=text("|u1"),
    version=b"K\x03",
)
INTERFACE = b"}" + text("__array_interface__") + ADDRESS + b"s"


SAME_KEYS = b"".join(msgpack.packb(hexadecimal(value)) + b"\xc0" for value in same_hash(60_000))
PACKED: dict[str, bytes] = {
    **{name: msgpack.packb(each) for name, each in PLAIN.items()},
    "keys of one hash in a mapping of msgpack's": b"\xdf" + struct.pack(">I", 60_000) + SAME_KEYS,
}

PICKLED: dict[str, bytes] = {
    "a large key in mappings": number(1 << 1_000_000) + b"\x940(" + b"}h\x00Ns" * 20_000 + b"t.",
    "memory that is a tensor": EXPANDED_PICKLE[:-3] + EXPANDED_PICKLE + b"\x86R.",
    "a unit of no time": called(*DTYPE_NAMED, text("m8[D/0]")) + b".",
    "a range to a queue": called("collections", "deque", PICKLED_RANGE) + b".",
    "a range of sizes": called("torch", "Size", PICKLED_RANGE) + b".",
    "a key that doubles": b"}" + doubled(60) + b"Ns.",
    "a member that doubles": b"\x8f(" + doubled(60) + b"\x90.",
    "a frozen member that doubles": b"(" + doubled(60) + b"\x91.",
    "a state that doubles": ORDERED + doubled(60) + b"b.",
    "a dtype that doubles when it is full": filled_from_the_top(
        30, text("a") + b"?\x86", text("b") + b"?\x86"
    )
    + b"\x8c\1a\x8c\3|u1\x86a0"
    + called(*DTYPE_NAMED, b"h\x1e")
    + b".",
    "lists filled from the top": filled_from_the_top(5_000, b"?") + b"0" + fetched(5_000) + b".",
    "tuples that are equal for long": b"\x8f("
    + b"".join(
        b"M\x2c\x01\x85\x94"
        + b"".join(fetched(11 * each + at) * 2 + b"\x86\x94" for at in range(10))
        + number(5 + each * P)
        + b"\x86"
        for each in range(500)
    )
    + b"\x90.",
    "an enum of a value that doubles": doubled(40) + b"\x940" + called(*ENUM, b"h\x29") + b".",
    "methods of an ordered mapping": ORDERED + b"}" + text("items") + b"Nsb.",
    "members of an expanded tensor": EXPANDED_PICKLE + b"K\x01a.",
    "keys of one hash": b"}(" + b"".join(number(key) + b"N" for key in same_hash(60_000)) + b"u.",
    "filled after its place": b"]\x94]\x94h\x00h\x01a0h\x01]a.",
    "a large argument, often": b"(" + b"K\x01" * 60_000 + b"t\x94((" + SIZE * 1_000 + b"t.",
    "an unknown opcode": b"c",
    "members of an array at an address": MEMBERS_OF_ARRAY + ORDERED + INTERFACE + b"bs.",
    "members of an array": MEMBERS_OF_ARRAY
    + called("builtins", "range", number(0), number(1 << 30), number(1))
    + b"s.",
    "a slice of a list": b"](K\x01K\x02e" + SLICE + PICKLED_RANGE + b"s.",
    "an attribute of a tensor that is an address": called(
        "objcomm._codecs.pickle5", "_set_attributes", TENSOR_PICKLE, INTERFACE
    )
    + b".",
    "a member of an enum that is made": doubled(40) + b"\x940" + named(*ENUM) + b"h\x29\x85\x81.",
    "a member of an enum of an expanded tensor": called(*ENUM, EXPANDED_PICKLE) + b".",
    "a class of an enum": called(*ENUM, text("E"), text("c d")) + b".",
    # All lists stay on the stack; each is put into a slice, and holds the slice of the next.
    "slices that are filled from the top": named("builtins", "slice")
    + b"\x940"
    + b"]\x94" * 300
    + b"".join(b"h\x00" + fetched(1 + at) + b"NN\x87R\x940" for at in range(300))
    + b"".join(fetched(300 + at) + b"a0" for at in range(299, 0, -1))
    + b"0"
    + fetched(300)
    + b".",
    "slots of an ordered mapping": ORDERED + b"(N}" + text("items") + b"Nstb.",
}

STREAMS = {f"plain: {name}": ("msgpack", raw) for name, raw in PACKED.items()}
STREAMS |= {f"pickle: {name}": ("pickle", PROTO + raw) for name, raw in PICKLED.items()}

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
            outcome = "decoded"
        except objcomm.DecodeError as error:
            lacked = isinstance(error.__cause__, MemoryError) or "allocate memory" in str(error)
            outcome = "asked for too much" if lacked else f"refused: {{error}}"
        except BaseException as error:
            outcome = repr(error)
        os.write(writing, outcome[:1000].encode("utf-8", "replace"))
        os._exit(0)
    os.close(writing)
    outcome = open(reading, "rb").read().decode()
    print(json.dumps([name, outcome or f"ended by status {{os.waitpid(child, 0)[1]}}"]), flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what became of each stream."""
    return once(tmp_path_factory, "hostile objects", lambda _: judged())


def judged() -> dict[str, str]:
    """Have each stream decoded in a child process."""
    lines = [json.dumps([name, codec, raw.hex()]) for name, (codec, raw) in STREAMS.items()]
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


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_asks_for_too_much_is_refused(name: str, answers: dict[str, str]) -> None:
    assert answers[name].startswith("refused: ")
