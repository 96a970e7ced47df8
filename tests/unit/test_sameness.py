"""When two values are the same, and where they first differ."""

import collections
import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm._collectives.agree import difference, text
from tests import samples


class Plain:
    """Does not define ``==``."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Odd:
    """Its ``==`` returns no bool, like a data frame's."""

    __hash__ = None  # type: ignore[assignment]  # a class that defines == has none

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> Any:
        return [False]


class Unspeakable:
    """Its ``repr`` raises."""

    def __repr__(self) -> str:
        raise LookupError("no words")


class Exits:
    """Its ``repr`` ends the process."""

    def __repr__(self) -> str:
        raise SystemExit(3)


@dataclasses.dataclass
class Config:
    lr: float
    weights: Any = None
    note: str = dataclasses.field(default="", compare=False)


def local_class() -> Any:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    return Local


#: Samples with functions or classes that travel by value, and so arrive as different objects.
BY_VALUE = {"lambda", "lambda beside importable members", "function with closure and default"}


@pytest.mark.parametrize("name", samples.names())
def test_a_sample_is_the_same_as_its_copy(name: str) -> None:
    sent = samples.make(name)
    found = difference(sent, objcomm.from_tensor(objcomm.to_tensor(sent)))
    assert (found is None) == (name not in BY_VALUE), found


SAME: list[tuple[Any, Any]] = [
    (math.nan, float("nan")),
    (complex(0, math.nan), complex(0, math.nan)),
    (0.0, -0.0),
    ({"a": 1, "b": [math.nan]}, {"b": [math.nan], "a": 1}),
    (torch.tensor([1, math.nan]), torch.tensor([1, math.nan])),
    (torch.ones(3, requires_grad=True), torch.ones(3)),
    (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
    (torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to(torch.float8_e4m3fn)),
    (np.array([1.0, np.nan]), np.array([1.0, np.nan])),
    (np.array([{"a": [1]}], dtype=object), np.array([{"a": [1]}], dtype=object)),
    (np.datetime64("NaT"), np.datetime64("NaT")),
    (Plain(torch.ones(2)), Plain(torch.ones(2))),
    (Odd({"a": 1}), Odd({"a": 1})),
    (Config(0.1, torch.ones(2), "mine"), Config(0.1, torch.ones(2), "yours")),
    (local_class()(3), local_class()(3)),
    (collections.deque([1, 2]), collections.deque([1, 2])),
    ({1, 2}, {2, 1}),
    (object(), object()),
    (len, len),
]


def _named(case: tuple[Any, ...]) -> str:
    """Return the test's name, without addresses so that all processes of pytest-xdist agree."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{text(case[0])}-{text(case[1])}")[:60]


@pytest.mark.parametrize("pair", SAME, ids=_named)
def test_equal_values_are_the_same(pair: tuple[Any, Any]) -> None:
    assert difference(*pair) is None


OTHER: list[tuple[Any, Any, str, str]] = [
    (1, 2, "value", "1"),
    (1, True, "value", "1 (int)"),
    (1, 1.0, "value", "1 (int)"),
    (0.1, np.float64(0.1), "value", "0.1 (float)"),
    ({"lr": 0.1}, {"lr": 0.2}, "value['lr']", "0.1"),
    ({"lr": 0.1}, {"wd": 0.1}, "keys of value", "also 'lr'"),
    ([1, [2, 3]], [1, [2, 4]], "value[1][1]", "3"),
    ([1], [1, 2], "len(value)", "1"),
    (torch.ones(3), torch.ones(4), "value", "a tensor of torch.float32 (3,)"),
    (torch.ones(1), torch.ones(1).double(), "value", "tensor([1.])"),
    (torch.zeros(2), torch.tensor([0, math.nan]), "value", "a tensor of torch.float32 (2,)"),
    (np.ones(2), np.zeros(2), "value", "array([1., 1.])"),
    (np.ones(2), np.ones(2, dtype=np.float32), "value", "array([1., 1.])"),
    (Config(0.1), Config(0.2), "value.lr", "0.1"),
    (Plain(1), Plain(2), "value's state['value']", "1"),
    (int, float, "value", "<class 'int'>"),
]


@pytest.mark.parametrize("case", OTHER, ids=_named)
def test_a_difference_is_found_where_it_is(case: tuple[Any, Any, str, str]) -> None:
    left, right, path, mine = case
    found = difference(left, right)
    assert found is not None
    assert (found[0], found[1]) == (path, mine)
    turned = difference(right, left)
    assert turned is not None
    assert turned[2] == mine or path.startswith("keys")


def test_functions_that_are_not_one_object_differ() -> None:
    assert difference(lambda: 0, lambda: 0) is not None


def test_a_value_that_holds_itself_is_compared() -> None:
    mine: list[Any] = [1]
    yours: list[Any] = [1]
    mine.append(mine)
    yours.append(yours)
    assert difference(mine, yours) is None
    yours[0] = 2
    assert difference(mine, yours) == ("value[0]", "1", "2")


def test_a_text_is_short_and_never_raises() -> None:
    assert text(Unspeakable()).startswith("<Unspeakable instance")
    assert text(Exits()) == "a Exits (SystemExit: 3)"
    assert text(10**5000).startswith("a int (ValueError")  # Python writes at most 4300 digits
    assert len(text("x" * 10_000)) < 300
    assert len(text(list(range(10_000)))) < 300
