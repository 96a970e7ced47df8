"""Objects that travel by value: cloudpickle's rules, and nothing of the sender's is overwritten."""

import dataclasses
import io
import logging
import pickle
import traceback
import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import cloudpickle
import pytest
import torch

import objcomm
from objcomm._codecs import codec_named, copy
from objcomm._codecs.by_value import dumps
from objcomm._codecs.pickle5 import _BY_VALUE

# Cloudpickle has rules for these as well. Open files are refused on purpose, because cloudpickle
# would send their content. The codec has its own rule for memory views; pickle handles the rest.
LOGGERS = {logging.Logger, logging.RootLogger}
LEFT_TO_PICKLE = {io.TextIOWrapper, memoryview, types.MethodType} | LOGGERS


def test_every_rule_of_cloudpickle_is_known() -> None:
    rules = {rule for rule in cloudpickle.Pickler._dispatch_table if isinstance(rule, type)}  # noqa: SLF001
    assert rules - LEFT_TO_PICKLE == set(_BY_VALUE)


@pytest.mark.usefixtures("constant_file_names")
def test_functions_keep_the_names_of_their_files() -> None:
    def make() -> Any:
        def fail() -> None:
            raise NotImplementedError

        return fail

    got = objcomm.from_tensor(objcomm.to_tensor(make))
    assert got.__code__.co_filename == __file__
    with pytest.raises(NotImplementedError) as caught:
        got()()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == "raise NotImplementedError"


def local_dataclass() -> Any:
    @dataclasses.dataclass
    class Conf:
        lr: float
        tags: list[str]

    return Conf


def test_a_frozen_local_dataclass_with_slots_keeps_its_attributes() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Conf:
        lr: float

    assert objcomm.from_tensor(objcomm.to_tensor(Conf(0.5))).lr == 0.5


def test_a_local_generic_class_arrives() -> None:
    item = TypeVar("item")

    class Box(Generic[item]):
        content = 3

    assert objcomm.from_tensor(objcomm.to_tensor(Box())).content == 3


def test_a_copy_within_a_process_keeps_its_classes() -> None:
    class Registry:
        known: list[str] = []  # noqa: RUF012  # shared on purpose: it must stay the same list

    known = Registry.known
    duplicate = copy(codec_named("pickle"), Registry())
    assert type(duplicate) is Registry
    assert Registry.known is known


@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
def test_nothing_is_placed_on_the_default_device(codec: str) -> None:
    with torch.device("meta"):
        small = objcomm.from_tensor(objcomm.to_tensor(torch.ones(3, device="cpu"), codec=codec))
        large = objcomm.from_tensor(objcomm.to_tensor(torch.ones(9999, device="cpu"), codec=codec))
    assert small.tolist() == [1.0] * 3
    assert large.device.type == "cpu"
    assert float(large.sum()) == 9999.0


def test_a_bytearray_cannot_be_resized_while_it_is_encoded() -> None:
    content = bytearray(100_000)

    class Clears:
        def __reduce__(self) -> Any:
            content.clear()
            return int, ()

    with pytest.raises(objcomm.EncodeError, match="BufferError"):
        objcomm.to_tensor([content, Clears()])
    content.clear()  # nothing holds a buffer of it any longer


def counter(start: int) -> tuple[Callable[[], None], Callable[[], int], list[types.CellType]]:
    count = start

    def increment() -> None:
        nonlocal count
        count += 1

    def get() -> int:
        return count

    return increment, get, list(get.__closure__ or ())


Carry = Callable[[Any], Any]


@pytest.fixture(params=["codec", "launch"])
def carried(request: pytest.FixtureRequest) -> Carry:
    if request.param == "codec":
        return lambda obj: objcomm.from_tensor(objcomm.to_tensor(obj))
    return lambda obj: pickle.loads(dumps(obj))  # noqa: S301  # its own bytes


def test_a_local_dataclass_is_still_one_on_both_sides(carried: Carry) -> None:
    cls = local_dataclass()
    obj = cls(0.5, ["a"])
    for got in (carried(obj), copy(codec_named("pickle"), obj)):
        assert dataclasses.asdict(got) == {"lr": 0.5, "tags": ["a"]}
        assert dataclasses.replace(got, lr=1.0).lr == 1.0
        assert [field.name for field in dataclasses.fields(cls)] == ["lr", "tags"]


def test_functions_that_share_a_variable_still_share_it_when_they_arrive(carried: Carry) -> None:
    (increment, get, (cell,)), (_, other, _) = carried([counter(0), counter(5)])
    increment()
    increment()
    assert (get(), cell.cell_contents, other()) == (2, 2, 5)
    (cell,), increment = carried([counter(0)[2], counter(0)[0]])  # the cell before its function
    increment()
    assert cell.cell_contents == 0
    increment, _, cells = counter(0)
    (cell,), increment = carried([cells, increment])
    increment()
    assert cell.cell_contents == 1


def test_functions_that_call_each_other_still_do_when_they_arrive(carried: Carry) -> None:
    def is_even(number: int) -> bool:
        return number == 0 or is_odd(number - 1)

    def is_odd(number: int) -> bool:
        return number != 0 and is_even(number - 1)

    even, odd = carried([is_even, is_odd])
    assert even(10)
    assert not odd(10)
    assert even.__closure__[0].cell_contents is odd
    (cell,) = carried(is_even.__closure__)
    assert cell.cell_contents.__closure__[0].cell_contents.__closure__[0] is cell


def test_a_variable_without_a_value_arrives_without_one(carried: Carry) -> None:
    def get() -> int:
        return later

    got, cell = carried([get, get.__closure__[0]])  # type: ignore[index]  # it has one
    later = 3
    with pytest.raises(ValueError, match="empty"):
        cell.cell_contents  # noqa: B018  # reading it is the test
    cell.cell_contents = later
    assert got() == 3


def test_a_class_whose_methods_use_super_is_the_class_that_they_find(carried: Carry) -> None:
    class Own:
        def cls(self) -> Any:
            return __class__  # type: ignore[name-defined]  # a cell of the compiler's

    got = carried(Own)
    assert got().cls() is got


def test_a_local_class_and_a_type_variable_keep_their_names(carried: Carry) -> None:
    item = TypeVar("item")
    got, variable = carried([local_dataclass(), item])
    assert got.__qualname__ == "local_dataclass.<locals>.Conf"
    assert (variable.__name__, variable.__module__) == ("item", __name__)


def test_an_exception_of_a_local_class_arrives_whole(carried: Carry) -> None:
    class EvaluationError(Exception):
        def __init__(self, step: int, *, metric: str) -> None:
            super().__init__(f"{metric} at {step}")
            self.step = step

    error = EvaluationError(3, metric="loss")
    error.__cause__ = KeyError("loss")
    error.add_note("on rank 1")
    got = carried([error])[0]
    assert (str(got), got.step, got.__notes__) == ("loss at 3", 3, ["on rank 1"])
    assert repr(got.__cause__) == "KeyError('loss')"
