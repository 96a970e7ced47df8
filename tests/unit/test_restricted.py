"""``allow=``: what a pickle may name, and that there is no way around it."""

import collections
import copyreg
import dataclasses
import enum
import functools
import operator
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import objcomm
from objcomm import DecodeError, ForbiddenTypeError
from objcomm._codecs import restricted
from tests import samples
from tests.same import assert_same
from tests.unit.opcodes import BUILD, EMPTY_DICT, NONE, PROTO, SETITEM, named, number, text

HERE = __name__


@dataclasses.dataclass
class Order:
    """An admitted class."""

    item: str
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """A class whose state is not in ``__dict__``."""

    item: str


class Pair(NamedTuple):
    """A class whose instances are tuples."""

    left: int
    right: int


class Colour(enum.Enum):
    """A class whose instances belong to the process."""

    RED = 1


class Setting(enum.Enum):
    """An enum with values of several types."""

    NUMBERS = (1, (2.5, None), frozenset({"a"}))
    DTYPE = torch.float32
    PLACE = torch.device("cpu")
    OTHER = Pair(1, 2)
    FLAG = b"raw"


class Touches:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def received(obj: object, **options: Any) -> Any:
    return objcomm.from_tensor(objcomm.to_tensor(obj, codec="pickle"), **options)


def loads(stream: bytes, *allow: type) -> Any:
    named = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in allow}
    return restricted.loads(memoryview(stream), [], named, 200)


def test_a_call_of_os_system_is_refused_before_it_runs(tmp_path: Path) -> None:
    bomb = tmp_path / "was run"
    with pytest.raises(ForbiddenTypeError, match=r"posix\.system"):
        received(Touches(bomb), allow=[Order])
    with objcomm.configure(allow=[Order]), pytest.raises(ForbiddenTypeError):
        received({"deep": [Touches(bomb)]})
    assert not bomb.exists()


TEA = Order("tea", 2)


@pytest.mark.parametrize(
    "obj",
    [TEA, Slotted("tea"), Pair(1, 2), Colour.RED, [TEA] * 2, {Pair(1, 2): Slotted("x")}, Order],
    ids=repr,
)
def test_a_listed_class_passes(obj: Any) -> None:
    classes = [Order, Slotted, Pair, Colour]
    assert received(obj, allow=classes) == obj
    assert received(obj, allow=[f"{HERE}.{cls.__qualname__}" for cls in classes]) == obj


@pytest.mark.parametrize("member", Setting, ids=str)
def test_the_values_of_an_enum_may_be_of_several_kinds(member: Setting) -> None:
    assert received(member, allow=[Setting, Pair]) is member


def test_plain_values_need_no_entry() -> None:
    sent = {
        "numbers": [0, -1, 2**70, True, None, 0.5, 1 + 2j, ..., NotImplemented],
        "containers": [{1, "a"}, {frozenset({(1, 2)}): bytearray(b"x")}, range(3), slice(1, None)],
        "numpy scalars": [np.float32(1), np.bool_(1), np.str_("x"), np.datetime64("2020-01-01")],
        "dtypes": [np.dtype(">i2"), np.dtype([("a", "f4", (2,))]), torch.bfloat16],
        "sizes": torch.Size([2]),
    }
    assert_same(received(sent, allow=[]), sent)


def test_tensors_and_arrays_need_no_entry() -> None:
    weight = torch.nn.Parameter(torch.arange(40_000.0).reshape(200, 200))
    sent = collections.OrderedDict(
        weight=weight,
        tied=weight,
        column=torch.eye(3)[:, 1],
        sparse=torch.eye(3).to_sparse(),
        array=np.arange(6, dtype=">i4").reshape(2, 3),
        records=np.zeros(2, [("a", "i4"), ("b", "U3")]),
        blob=bytes(100_000),
    )
    got = received(sent, allow=[])
    assert got["weight"] is got["tied"]
    assert_same(got, sent)


def test_arrays_may_share_memory_thousands_of_times() -> None:
    """The limit on work counts the shared bytes once."""
    array = np.arange(60_000, dtype="u1")
    got = received([array.reshape(60, 1_000) for _ in range(3_000)], allow=[])
    assert len(got) == 3_000
    got[0][0, 0] = 9
    assert got[-1][0, 0] == 9


@pytest.mark.parametrize("name", samples.names())
def test_no_sample_is_changed(name: str) -> None:
    obj = samples.make(name)
    try:
        got = received(obj, allow=[])
    except ForbiddenTypeError:
        return
    assert_same(got, obj)


@pytest.mark.parametrize(
    "obj",
    [
        pytest.param(functools.partial(os.getpid), id="partial"),
        pytest.param(operator.attrgetter("a"), id="attrgetter"),
        pytest.param(len, id="builtin function"),
        pytest.param(eval, id="eval"),
        pytest.param(torch.load, id="torch.load"),
        pytest.param(int, id="class"),
        pytest.param(type(None), id="NoneType"),
        pytest.param(lambda: 1, id="lambda"),
        pytest.param(os, id="module"),
        pytest.param(TEA, id="dataclass that is not listed"),
        pytest.param(np.array([1], object), id="array of objects"),
        pytest.param(np.ma.masked_array([1]), id="masked array"),
        pytest.param(torch.nn.Linear(1, 1), id="module of layers"),
        pytest.param(ValueError(1), id="exception"),
        pytest.param(np.dtype("O"), id="dtype of objects"),
        pytest.param(np.dtype("i4", align=True, metadata={"a": 1}), id="dtype with metadata"),
    ],
)
def test_all_else_is_refused_by_its_name(obj: object) -> None:
    with pytest.raises(ForbiddenTypeError, match="is not allowed; add it to allow="):
        received(obj, allow=[Pair])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("builtins", "type"),
        (HERE, "os.system"),
        (HERE, "Order.__init__.__globals__"),
        (HERE, "Order.__class__"),
        ("objcomm._codecs", "restricted.io.open"),
        ("objcomm._codecs.tensors", "math.prod"),
        ("copyreg", "__newobj__"),
        ("copyreg", "_reconstructor"),
        ("cloudpickle.cloudpickle", "_make_function"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "dtype"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("objcomm._codecs.pickle5", "_kept_at"),
        ("objcomm._codecs.restricted", "loads"),
        ("", ""),
    ],
)
def test_no_name_leads_further_than_the_list(module: str, name: str) -> None:
    with pytest.raises(ForbiddenTypeError):
        loads(PROTO + named(module, name) + b".", Order)


ORDER, COLOUR = named(HERE, "Order"), named(HERE, "Colour")
KEY = text("item")
STATE = EMPTY_DICT + KEY + text("x") + SETITEM
OTHER_CLASS = EMPTY_DICT + text("__class__") + COLOUR + SETITEM
PICKLE5 = "objcomm._codecs.pickle5"
CHANGES = {
    "state of a class": ORDER + STATE + BUILD,
    "slots of a class": ORDER + NONE + STATE + b"\x86" + BUILD,
    "state of an enum's member": COLOUR + b"K\x01\x85R" + STATE + BUILD,
    "another class": ORDER + b")\x81" + NONE + OTHER_CLASS + b"\x86" + BUILD,
    "call of an instance": ORDER + b")\x81)R",
    "an instance as a class": ORDER + b")\x81)\x81",
    "state of a function": named(PICKLE5, "_same") + STATE + BUILD,
    "attributes of a class": named(PICKLE5, "_set_attributes") + ORDER + EMPTY_DICT + b"\x86R",
    "an item of a class": ORDER + KEY + text("x") + SETITEM,
    "a member of a class": ORDER + KEY + b"a",
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_stream_changes_nothing_of_this_process(case: str) -> None:
    before = dict(vars(Order)), dict(vars(Colour.RED))
    with pytest.raises(DecodeError):
        loads(PROTO + CHANGES[case] + b".", Order, Colour)
    assert (dict(vars(Order)), dict(vars(Colour.RED))) == before


def test_the_extension_registry_is_closed() -> None:
    copyreg.add_extension("os", "system", 240)
    try:
        pickle.loads(PROTO + b"\x82\xf0.")  # noqa: S301  # fills the cache, which no list guards
        for opcode, width in ((b"\x82", 1), (b"\x83", 2), (b"\x84", 4)):
            with pytest.raises(ForbiddenTypeError, match="the opcode EXT"):
                loads(PROTO + opcode + (240).to_bytes(width, "little") + b".", Order)
    finally:
        copyreg.remove_extension("os", "system", 240)


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(b"\x8c\x01xQ.", id="persistent id"),
        pytest.param(b"Pabc\n.", id="persistent id as text"),
        pytest.param(b"cos\nsystem\n.", id="global of protocol 0"),
        pytest.param(b"(ios\nsystem\n.", id="instance of protocol 0"),
        pytest.param(b"(cos\nsystem\nX\x01\x00\x00\x00ao.", id="object of protocol 1"),
    ],
)
def test_opcodes_that_the_pickler_never_writes_are_refused(stream: bytes) -> None:
    with pytest.raises(ForbiddenTypeError, match=r"it contains the opcode [A-Z]+"):
        loads(stream)


HUGE = struct.pack("<Q", 1 << 40)
ANNOUNCED = {
    "bytearray": b"\x96" + HUGE,
    "bytes": b"\x8e" + HUGE,
    "text": b"\x8d" + HUGE,
    "frame": b"\x95" + HUGE,
    "memo": b"Nr" + struct.pack("<I", 1 << 31),
    "a range as sizes": named("torch", "Size")
    + named("builtins", "range")
    + number((1 << 40) - 1)
    + b"\x85R\x85R",
}


@pytest.mark.parametrize("case", ANNOUNCED)
def test_an_announced_size_is_not_believed(case: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Exception):  # noqa: B017, PT011  # any of them; the codec converts it
            loads(PROTO + ANNOUNCED[case] + b".")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


DEEP = {
    "tuples": b")" + b"\x85" * 100_000,
    "lists": b"]" * 100_000 + b"a" * 99_999,
    "marks": b"(" * 100_000 + b")" + b"t" * 99_999,
    "a key": b"}" + b")" + b"\x85" * 100_000 + b"Ns",
}


@pytest.mark.parametrize("case", DEEP)
def test_a_stream_that_nests_too_deep_is_refused(case: str) -> None:
    with pytest.raises(DecodeError, match="nested deeper than 200"):
        loads(PROTO + DEEP[case] + b".")


def test_depth_counts_nested_values_and_not_many() -> None:
    sent: Any = [[(n, {"a": [None]}) for n in range(1000)], [Order("x")] * 1000]
    assert received(sent, allow=[Order]) == sent
    for _ in range(195):
        sent = (sent,)
    with objcomm.configure(max_depth=300):
        assert received(sent, allow=[Order]) == sent
    with pytest.raises(DecodeError, match="max_depth"):
        received((((((sent,),),),),), allow=[Order])


def test_what_is_listed_must_exist() -> None:
    for wrong in ("no.such.module", f"{HERE}.Missing", "", 3):
        with pytest.raises(objcomm.UsageError):
            received(1, allow=[wrong])
    assert received(TEA, allow=f"{HERE}.Order") == TEA


def test_a_class_that_builds_objects_from_any_bytes_cannot_be_listed() -> None:
    for kind in (np.ndarray, np.dtype, "numpy.ndarray"):
        with pytest.raises(objcomm.UsageError, match="any message could end this process"):
            received(1, allow=[kind])


class Evaluation(Exception):  # a user's class
    def __init__(self, step: int, *, metric: str) -> None:
        super().__init__(metric)
        self.step = step


def test_an_exception_and_its_cause_are_admitted_by_their_classes() -> None:
    error = Evaluation(3, metric="loss")
    error.__cause__ = OSError(2, "gone", "file")
    error.add_note("on rank 1")
    got = received(error, allow=[Evaluation, FileNotFoundError])
    assert (type(got), got.step, got.__notes__) == (Evaluation, 3, ["on rank 1"])
    assert str(got.__cause__) == str(error.__cause__)
    with pytest.raises(ForbiddenTypeError, match="FileNotFoundError"):
        received(error, allow=[Evaluation])
