"""What an operand's structure describes, how several are merged, and how a result is built."""

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from objcomm._collectives.reduction import structures
from objcomm._collectives.reduction.operators import operator_for
from objcomm._collectives.reduction.structures import ABSENT
from objcomm._wire.failure_message import DifferenceError
from objcomm.errors import UsageError
from tests.same import assert_same

SUM = operator_for("sum")


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass without a ``__dict__``."""

    a: Any
    b: Any = 0


class Names(list[Any]):
    """A user's subclass of list."""


def structure_of(obj: Any) -> Any:
    return structures.describe(obj, SUM, 0)[0]


def aligned(node: Any, own: Any) -> list[Any]:
    return [leaf for _, _, leaf in structures.walk(node, own)]


OBJECTS: list[Any] = [
    3,
    {"a": [1, (2.5, {"b": Point(1, [])})], 7: Slotted(1, {"c": 2})},
    collections.OrderedDict(z=1, a=2),
    collections.defaultdict(list, {1: [2]}),
    collections.Counter(a=3),
    Names([1, 2]),
    [],
    {},
    [torch.arange(3), np.arange(2.0)],
]


@pytest.mark.parametrize("obj", OBJECTS, ids=repr)
def test_an_object_is_rebuilt_from_its_leaves(obj: Any) -> None:
    structure, leaves = structures.describe(obj, SUM, 0)
    rebuilt = structures.rebuild(structure, obj, leaves)
    assert_same(rebuilt, obj)
    assert rebuilt is not obj or not isinstance(obj, (dict, list))
    assert_same(aligned(structure, obj), leaves)


@pytest.mark.parametrize("obj", OBJECTS, ids=repr)
def test_a_structure_is_plain_data(obj: Any) -> None:
    def check(node: Any) -> None:
        assert type(node) in (tuple, str, int), node
        if isinstance(node, tuple):
            for member in node:
                check(member)

    check(structure_of(obj))


def test_paths_are_written_as_in_python() -> None:
    obj = {"val": [1, Point(Slotted(1, [2.0]), 3)], ("k", 1): 4}
    paths = [structures.text_of(path) for path, _, _ in structures.walk(structure_of(obj))]
    assert paths == [
        "obj['val'][0]",
        "obj['val'][1].x.a",
        "obj['val'][1].x.b[0]",
        "obj['val'][1].y",
        "obj[('k', 1)]",
    ]


def test_merging_keeps_the_order_of_the_lowest_rank() -> None:
    described = [structure_of(each) for each in ({"a": 1, "b": 2}, {"b": 1, "a": 2})]
    merged, leaves = structures.merge(described, may_lack=False)
    assert merged[2] == ("a", "b")
    assert [leaf.places for leaf in leaves] == [{0: 0, 1: 1}, {0: 1, 1: 0}]


def test_merging_with_gaps_records_which_rank_has_what() -> None:
    objs = [{"a": 1}, {"b": {"c": [2, 3]}, "a": 4}, {"b": {}}]
    described = [structure_of(each) for each in objs]
    merged, leaves = structures.merge(described, may_lack=True)
    assert merged[2] == ("a", "b")
    assert [leaf.places for leaf in leaves] == [{0: 0, 1: 2}, {1: 0}, {1: 1}]
    assert aligned(merged, objs[0]) == [1, ABSENT, ABSENT]
    assert aligned(merged, objs[1]) == [4, 2, 3]
    for each in objs:
        assert structures.rebuild(merged, each, [7, 8, 9]) == {"a": 7, "b": {"c": [8, 9]}}


@pytest.mark.parametrize(
    ("objs", "path", "ranks"),
    [
        ([1, 1, [1]], "obj", (0, 2)),
        ([{"a": 1}, {"a": 1, "b": 1}, {"a": 1}], "obj['b']", (0, 1)),
        ([[{"a": Point(1, 2)}], [{"a": Point(1, 2)}], [{"a": (1, 2)}]], "obj[0]['a']", (0, 2)),
        ([torch.ones(2), torch.ones(2), torch.ones(2, 1)], "obj", (0, 2)),
    ],
)
def test_a_difference_names_its_path_and_two_ranks(
    objs: list[Any], path: str, ranks: tuple[int, int]
) -> None:
    with pytest.raises(DifferenceError) as caught:
        structures.merge([structure_of(each) for each in objs], may_lack=False)
    assert (caught.value.path, caught.value.ranks) == (path, ranks)
    assert str(caught.value).startswith(f"{path} differs between rank {ranks[0]} and rank")


@pytest.mark.parametrize(
    ("obj", "path"),
    [({"a": {1}}, "obj['a']"), ([bytearray()], "obj[0]"), ("text", "obj"), (None, "obj")],
)
def test_values_that_cannot_be_combined_are_refused_with_their_path(obj: Any, path: str) -> None:
    with pytest.raises(UsageError) as caught:
        structure_of(obj)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_container_within_itself_is_an_error() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        structure_of(endless)
