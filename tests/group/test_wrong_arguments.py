"""Wrong arguments: the error names the call, the argument, the value and what is accepted."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import objcomm
from objcomm import NotInGroupError, UsageError
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
    "op": ["nope", 3],
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


NO_GROUP: Any = [0, 1]
OF_EVERY_CALL: dict[str, tuple[Any, str]] = {
    "group": (NO_GROUP, "group=[0, 1] must be a process group, a device mesh or None"),
    "timeout": ("30s", "timeout='30s' must be a positive number of seconds, a timedelta or None"),
}
CODEC = ("json", "codec='json' must be one of msgpack, pickle")
DEVICE = ("gpu", "device='gpu' must be a torch.device, its name or number, or None")
OF_CALLS_WITH_OBJECTS = OF_EVERY_CALL | {"codec": CODEC, "device": DEVICE}
OP = ("average", "op='average' must be a callable of two objects, an objcomm.Op or one of")
#: Blocks, which check their arguments when they are entered.
BLOCKS: dict[str, Any] = {
    "main_first": objcomm.main_first,
    "node_first": objcomm.node_first,
    "zero_only": once.zero_only,
}
#: For each call, wrong arguments and what the error says about them.
CALLS: dict[str, dict[str, tuple[Any, str]]] = {
    **dict.fromkeys(("broadcast", "gather", "all_gather"), OF_CALLS_WITH_OBJECTS),
    **dict.fromkeys(("scatter", "all_to_all", "compute_and_broadcast"), OF_CALLS_WITH_OBJECTS),
    **dict.fromkeys(("reduce", "all_reduce", "scan"), OF_CALLS_WITH_OBJECTS | {"op": OP}),
    **dict.fromkeys(("exscan", "reduce_scatter"), OF_CALLS_WITH_OBJECTS | {"op": OP}),
    "send": OF_EVERY_CALL | {"codec": CODEC},
    "recv": OF_EVERY_CALL | {"device": DEVICE},
    **dict.fromkeys(("barrier", "agree", "split", "dup", "new_group", "node_group"), OF_EVERY_CALL),
    **dict.fromkeys(("run_on_main", "run_once_per_node", *BLOCKS), OF_EVERY_CALL),
}


@ranks(1, 2)
def test_a_wrong_argument_is_named_with_its_call_and_what_is_accepted() -> None:
    if here().rank == here().world_size - 1:  # no other rank needs to know
        for name, arguments in CALLS.items():
            for argument, (given, text) in arguments.items():
                call: Callable[[], object] = partial(called, name, argument, given)
                if name in BLOCKS:
                    call = BLOCKS[name](**{argument: given}).__enter__
                with case(name, argument):
                    error_in(UsageError, call, f"^{name}: {re.escape(text)}")
    assert_group_works()


@ranks(2)
def test_errors_of_calls_without_traffic_name_the_call() -> None:
    calls: dict[str, Any] = {
        "stats": objcomm.stats,
        "reset_stats": objcomm.reset_stats,
        "dump": lambda group: objcomm.recorder.dump(group=group),
        "loader": lambda group: objcomm.loader([1], group=group),
        "MainProcessContext": lambda group: once.MainProcessContext(group=group).__enter__(),
    }
    for name, call in calls.items():
        with case(name), pytest.raises(UsageError, match=rf"^{name}: group=\[0, 1\] must be a"):
            call(NO_GROUP)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(UsageError, match=r"^barrier: group= must be a mesh of one dim.* not of 2"):
        objcomm.barrier(group=mesh)
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


@ranks(2)
def test_a_rank_outside_the_group_gets_an_error_that_names_the_call() -> None:
    with subgroup(1) as group:
        if here().rank == 0:
            text = "^all_gather: global rank 0 is not a member"
            with pytest.raises(NotInGroupError, match=text):
                objcomm.all_gather(1, group=group)
    assert_group_works()


@solo(environment={"WORLD_SIZE": "2", "RANK": "1"})
def test_the_error_before_the_ranks_have_met_names_the_call() -> None:
    text = "^broadcast: WORLD_SIZE=2 says that there are other ranks.*, and before objcomm.shutdown"
    with pytest.raises(UsageError, match=text):
        objcomm.broadcast(1)
