"""For every public function and parameter, the error names the call, argument and value."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest

import objcomm
from objcomm import UsageError
from tests.cases import case
from tests.group.any_call import called
from tests.group.helpers import assert_group_works
from tests.public_names import FUNCTIONS
from tests.ranks import ranks

A_RANK = ["gloo", 1.5, True, 99]
A_TAG = ["x", -1, 1.5, True]
#: For each parameter, values that no function accepts.
WRONG: dict[str, list[Any]] = {
    "accept": [3, [3], [b"pickle"]],
    "activity": [3],
    "allow": [3, [3], ["no.such_class"]],
    "backend": [3],
    "cls": [3],
    "codec": ["nope", 3, ["pickle"]],
    "device": ["nope", 1.5, True],
    "dst": A_RANK,
    "dtype": ["float32", 3],
    "environment": [3],
    "group": [3, [0, 1], "world"],
    "group_dst": A_RANK,
    "group_rank": A_RANK,
    "group_src": A_RANK,
    "interval": ["30s", math.nan, -1.0, True],
    "key": ["x", 1.5, True],
    "klass": [3],
    "labels": [3],
    "missing": ["nope", 3, ["skip"]],
    "name": [3],
    "nproc": [0, "2", True, 1.5],
    "op": ["nope", 3],
    "path": [3.5],
    "rank": A_RANK,
    "ranks": [3, ["x"]],
    "recv_tag": A_TAG,
    "scope": ["nope", 3],
    "seed": ["x", 1.5],
    "src": A_RANK,
    "tag": A_TAG,
    "tensor": [3],
    "timeout": ["30s", math.nan, -1.0, True],
    "to": [3.5],
    "works": [3, [3]],
}
ELSEWHERE = {
    "init": "a world of one has nothing to choose: tests/unit/test_backends.py, test_start.py",
    "codecs.register_codec": "its codec= is no name; see below",
}
#: These never raise: this process has rank -1 in anything that is not a group.
ANSWERS = {"is_main", "rank", "rank_prefixed_message", "world_size"}
#: Aliases, with the function name that their errors show.
IS = {"ddp_broadcast": "broadcast"}


def _wrong_arguments() -> Iterator[tuple[str, str, Any]]:
    for name, function in FUNCTIONS.items():
        for parameter in inspect.signature(function).parameters:
            if name not in ELSEWHERE and not (parameter == "group" and name in ANSWERS):
                yield from ((name, parameter, given) for given in WRONG.get(parameter, ()))


WRONG_ARGUMENTS = list(_wrong_arguments())


def _check_all() -> None:
    for name, argument, given in WRONG_ARGUMENTS:
        call = name.rpartition(".")[2]
        with case(name, argument, given):
            with pytest.raises(UsageError) as caught:
                called(name, argument, given)
            told = str(caught.value)
            assert told.startswith(f"{IS.get(call, call)}: ")
            assert argument in told
            assert repr(given[0] if isinstance(given, list) else given) in told


@ranks(1)
def test_every_wrong_argument_is_named_with_its_call() -> None:
    _check_all()
    assert_group_works()


@pytest.mark.parametrize("given", [3, type("Nameless", (), {"encode": 1, "decode": 1})()])
def test_what_is_no_codec_is_not_registered(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^register_codec: codec=.* must have a name, encode"):
        objcomm.codecs.register_codec(given)


@ranks(2)
def test_no_wrong_argument_reaches_another_rank() -> None:
    if objcomm.rank() == 1:
        _check_all()
    assert_group_works()


def test_no_parameter_of_the_table_is_out_of_use() -> None:
    assert {argument for _, argument, _ in WRONG_ARGUMENTS} == set(WRONG)
