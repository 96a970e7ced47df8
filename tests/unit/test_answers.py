"""A received result of leaves must fit the operand that this rank gave, whichever rank sent it."""

from typing import Any

import pytest
import torch

from objcomm._collectives.reduction import structures
from objcomm._collectives.reduction.leafwise import Destination, operand, received
from objcomm._collectives.reduction.operators import operator_for
from objcomm.errors import DecodeError

LARGE = torch.zeros(8)
MINE = {"a": 1, "b": LARGE, "c": [2.0]}


def structure_of(obj: Any) -> Any:
    return structures.describe(obj, operator_for("sum"), 1)[0]


PLACE = Destination(
    structure_of(MINE), 1, 3, is_taker=True, may_follow=True, linked="", most_nbytes=1000
)
ALL = (0, 1, 2)
FOLLOWED = (None, (6, 6.0), ((1, ALL),))


@pytest.mark.parametrize(
    "answer",
    [
        (None, (6, 6.0), ((1, ALL),), ""),
        (None, (6, LARGE, 6.0), (), ""),
        (structure_of({"b": LARGE, "c": [2.0], "a": 1}), (6.0, 6), ((0, ALL),), ""),
        (structure_of({**MINE, "d": (LARGE, 1)}), (6, 6.0, 1), ((1, ALL), (3, (0, 2))), ""),
    ],
    ids=["follows", "folded", "another order", "a leaf that this rank lacks"],
)
def test_a_valid_answer_is_taken(answer: Any) -> None:
    assert tuple(received(answer, PLACE)) == answer


GIGABYTES = torch.zeros(1, dtype=torch.int8).expand(2**40)
WRONG: dict[str, Any] = {
    "none": None,
    "short": (None, ()),
    "not a list": (None, {"a": 1}, (), ""),
    "too few results": (None, (1,), (), ""),
    "too many results": (None, (1, 2, 3, 4), (), ""),
    "no such leaf": (None, (1, 2), ((9, ALL),), ""),
    "twice": (None, (1,), ((1, ALL), (1, ALL)), ""),
    "a number follows": (None, (1, 2), ((0, ALL),), ""),
    "without this rank": (None, (1, 2), ((1, (0, 2)),), ""),
    "no such rank": (None, (1, 2), ((1, (0, 1, 7)),), ""),
    "ranks in another order": (None, (6, 6.0), ((1, (1, 0, 2)),), ""),
    "a rank twice": (None, (6, 6.0), ((1, (0, 1, 1)),), ""),
    "from no rank": (None, (6, 6.0), ((1, ()),), ""),
    "another kind": (structure_of([1, LARGE, [2.0]]), (1, 2, 3), (), ""),
    "another shape": (structure_of({**MINE, "b": torch.zeros(9)}), (1, 2, 3), (), ""),
    "a key less": (structure_of({"a": 1, "b": LARGE}), (1, 2), (), ""),
    "a longer list": (structure_of({**MINE, "c": [2.0, 1]}), (1, 2, 3, 4), (), ""),
    "own class": (structure_of({**MINE, "d": structures.Leaf(1, {})}), (1, 2, 3, 4, 5), (), ""),
    "gigabytes": (structure_of({**MINE, "d": GIGABYTES}), (1, 2, 3), ((3, (0, 2)),), ""),
    "another device link": (*FOLLOWED, "cuda"),
    "no device link": (*FOLLOWED, None),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_refused(kind: str) -> None:
    with pytest.raises(DecodeError, match="reduction"):
        received(WRONG[kind], PLACE)


@pytest.mark.parametrize(
    ("answer", "wanted", "reason"),
    [
        ((*FOLLOWED, ""), PLACE._replace(may_follow=False), "already been sent"),
        ((None, (), (), ""), PLACE._replace(structure=None), "gave nothing"),
        ((*FOLLOWED, LARGE), PLACE, "joined"),
        ((*FOLLOWED, []), PLACE, "joined"),
        ((*FOLLOWED, 5), PLACE, "joined"),
    ],
    ids=["sent already", "no operand", "a tensor as a device", "a list as one", "a number as one"],
)
def test_an_answer_that_does_not_fit_is_refused(answer: Any, wanted: Any, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        received(answer, wanted)


def test_an_operand_that_matches_its_structure_is_taken() -> None:
    structure = structure_of(MINE)
    for leaves in ([1, LARGE, 2.0], [1, None, 2.0]):
        assert operand((structure, leaves, "cuda"))[1] is leaves


@pytest.mark.parametrize(
    "leaves", [[1, LARGE], [1, torch.zeros(9), 2.0], [1, b"raw", 2.0], 5, (1, LARGE, 2.0)]
)
def test_an_operand_that_does_not_match_its_structure_is_refused(leaves: Any) -> None:
    with pytest.raises(DecodeError, match="reduction"):
        operand((structure_of(MINE), leaves, ""))


def test_the_type_of_a_device_is_text() -> None:
    structure, leaves, linked = operand((structure_of(MINE), [1, LARGE, 2.0], "cuda"))
    assert (structure, linked) == (structure_of(MINE), "cuda")
    with pytest.raises(DecodeError, match="device"):
        operand((structure, leaves, 5))
    answer = (*FOLLOWED, "cuda")
    assert received(answer, PLACE._replace(linked="cuda")).linked == "cuda"


def of_tensor(*description: Any) -> Any:
    """Return an operand of one leaf with this description."""
    return (0, description), [None], ""


COLLIDING = tuple(7 + turn * ((1 << 61) - 1) for turn in range(5_000))  # all have the same hash

#: Operands that would cost far more than their bytes, or fail with another error.
COSTLY: dict[str, Any] = {
    "a range as a shape": of_tensor("tensor", "float32", range(1 << 40), "cpu"),
    "a shape of huge sizes": of_tensor("tensor", "float32", (1 << 20_000,), "cpu"),
    "no description": of_tensor(),
    "half a description": of_tensor("tensor"),
    "a tensor as a description's kind": of_tensor(LARGE, "float32", (8,), "cpu"),
    "a list as a dtype": of_tensor("tensor", [], (8,), "cpu"),
    "a tensor as a device": of_tensor("tensor", "float32", (8,), LARGE),
    "keys of one hash": (
        ("mapping", "dict", COLLIDING, tuple((at, "number") for at in range(len(COLLIDING)))),
        [0] * len(COLLIDING),
        "",
    ),
    "a range as a key": (("mapping", "dict", (range(1 << 40),), ((0, "number"),)), [0], ""),
    "a range in a key": (("mapping", "dict", ((1, range(1 << 40)),), ((0, "number"),)), [0], ""),
}


@pytest.mark.parametrize("kind", COSTLY)
def test_an_operand_that_costs_more_than_its_bytes_is_refused(kind: str) -> None:
    with pytest.raises(DecodeError):
        operand(COSTLY[kind])


@pytest.mark.parametrize(
    "key",
    [frozenset({1, "a"}), range(3), (1, frozenset({range(3)}))],
    ids=["frozen set", "range", "both in a tuple"],  # the text of a set differs between processes
)
def test_a_key_of_any_plain_type_is_taken(key: Any) -> None:
    structure = structure_of({key: 1})
    assert operand((structure, [1], "")) == (structure, [1], "")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("val", "['val']"),
        ((1, "a"), "[(1, 'a')]"),
        (1 << 20_000, "[a int]"),
        (LARGE, "[a Tensor]"),
        ((LARGE,), "[(a Tensor)]"),
    ],
    ids=["text", "tuple", "huge", "tensor", "tensor in a tuple"],
)
def test_a_key_of_an_attacker_is_shown_short(key: Any, text: str) -> None:
    node = ("mapping", "dict", (key,), ((0, "number"),))
    ((path, description, _),) = structures.walk(node)
    assert (structures.text_of(path), description) == (f"obj{text}", "number")
