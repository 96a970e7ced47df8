"""Wrong arguments: the error names the call, the argument, the value and what is accepted."""

import inspect
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

import objcomm
from objcomm import UsageError
from objcomm._training import once
from tests.cases import case
from tests.group.any_call import called
from tests.group.helpers import assert_group_works, error_in, subgroup
from tests.public_names import FUNCTIONS
from tests.ranks import ranks, solo
from tests.workers import here

RANKS = ("dst", "group_dst", "group_rank", "group_src", "rank", "src")
#: For each parameter, values that no function accepts.
WRONG: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("activity", "backend", "cls", "environment", "klass", "labels"), (3,)),
    **dict.fromkeys(("name", "tensor"), (3,)),
    **dict.fromkeys(RANKS, ("gloo", 1.5, True, 99)),
    **dict.fromkeys(("interval", "timeout"), ("30s", math.nan, -1.0, True)),
    **dict.fromkeys(("recv_tag", "tag"), ("x", -1, 1.5, True)),
    "accept": [3, [3], [b"pickle"]],
    "allow": [3, [3], ["no.such_class"]],
    "codec": ["nope", 3, ["pickle"]],
    "device": ["nope", 1.5, True],
    "dtype": ["float32", 3],
    "group": [0, 3, [0, 1], "world"],
    "key": ["x", 1.5, True],
    "missing": ["nope", 3, ["skip"]],
    "nproc": [0, "2", True, 1.5],
    "op": ["nope", "SUM", "", 3, None],
    "path": [3.5],
    "ranks": [3, ["x"]],
    "scope": ["nope", 3],
    "seed": ["x", 1.5],
    "to": [3.5],
    "works": [3, [3]],
}
ELSEWHERE = {
    "init": "a world of one has nothing to choose: tests/unit/test_backends.py, test_start.py",
    "codecs.register_codec": "its codec= is not a name; see below",
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


@ranks(1, 2)
def test_every_wrong_argument_is_named_with_its_call_and_reaches_no_other_rank() -> None:
    for name, argument, given in WRONG_ARGUMENTS if here().rank == here().world_size - 1 else ():
        call = name.rpartition(".")[2]
        with case(name, argument, given):
            text = str(error_in(UsageError, partial(called, name, argument, given)))
            assert text.startswith(f"{IS.get(call, call)}: ")
            assert argument in text
            assert repr(given[0] if isinstance(given, list) else given) in text
    assert_group_works()


@pytest.mark.parametrize("given", [3, type("Nameless", (), {"encode": 1, "decode": 1})()])
def test_an_object_that_is_not_a_codec_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^register_codec: codec=.* must have a name, encode"):
        objcomm.codecs.register_codec(given)


def test_every_parameter_of_the_table_is_in_use() -> None:
    assert {argument for _, argument, _ in WRONG_ARGUMENTS} == set(WRONG)


OR_ONE_OF = (
    "an objcomm.Op or one of all, any, argmax, argmin, concat, counter, max, mean, min, prod, "
    "sum, union"
)
#: For each parameter, a wrong value and what the error says about it.
ACCEPTED: dict[str, tuple[Any, str]] = {
    "group": ([0, 1], "group=[0, 1] must be a process group, a device mesh or None"),
    "timeout": ("30s", "timeout='30s' must be a positive number of seconds, a timedelta or None"),
    "codec": ("json", "codec='json' must be one of msgpack, pickle"),
    "device": ("gpu", "device='gpu' must be a torch.device, its name or number, or None"),
    "op": ("addition", f"op='addition' must be a callable of two objects, {OR_ONE_OF}"),
}
#: Blocks without a public name, and a parameter of each.
BLOCKS: list[tuple[Any, str]] = [
    (once.MainProcessContext, "group"),
    (once.zero_only, "group"),
    (once.zero_only, "timeout"),
]


@ranks(1, 2)
def test_a_wrong_argument_is_named_with_its_call_and_what_is_accepted() -> None:
    if here().rank == here().world_size - 1:  # no other rank needs to know
        for argument, (given, text) in ACCEPTED.items():
            with case(argument):
                call: Any = partial(called, "reduce", argument, given)
                error_in(UsageError, call, f"^reduce: {re.escape(text)}")
        for block, argument in BLOCKS:
            given, text = ACCEPTED[argument]
            with case(block, argument):
                call = block(**{argument: given}).__enter__
                error_in(UsageError, call, f"^{block.__name__}: {re.escape(text)}")
    assert_group_works()


@ranks(2)
def test_a_rank_within_the_group_is_suggested_only_if_the_number_is_one() -> None:
    for src in (-1, 2):
        with pytest.raises(UsageError, match=rf"^broadcast: src={src} .* global ranks are 0-1$"):
            objcomm.broadcast(1, src=src)
    with subgroup(1) as group:
        if here().rank == 1:
            with pytest.raises(UsageError, match=r"ranks are 1; give .* as group_src=$"):
                objcomm.broadcast(1, src=0, group=group)
    assert_group_works()


@solo(environment={"WORLD_SIZE": "2", "RANK": "1"})
def test_the_error_before_the_ranks_have_met_names_the_call() -> None:
    text = "^broadcast: WORLD_SIZE=2 says that there are other ranks.*, and before objcomm.shutdown"
    with pytest.raises(UsageError, match=text):
        objcomm.broadcast(1)
