"""Wrong arguments: the error names the call, the argument, the value and what is accepted."""

import re
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import objcomm
from objcomm import NotInGroupError, UsageError
from objcomm._training import once
from tests.cases import case
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks, solo
from tests.workers import here

NO_GROUP: Any = [0, 1]
NO_TIME: Any = "30s"
OF_EVERY_CALL: dict[str, tuple[Any, str]] = {
    "group": (NO_GROUP, "group=[0, 1] must be a process group, a device mesh or None"),
    "timeout": (NO_TIME, "timeout='30s' must be a positive number of seconds, a timedelta or None"),
}
OF_CALLS_WITH_OBJECTS: dict[str, tuple[Any, str]] = {
    **OF_EVERY_CALL,
    "codec": ("json", "codec='json' must be one of msgpack, pickle"),
    "device": ("gpu", "device='gpu' must be a torch.device, its name or number, or None"),
}
NO_OPERATOR: Any = "average"
OF_REDUCTIONS: dict[str, tuple[Any, str]] = {
    **OF_CALLS_WITH_OBJECTS,
    "op": (NO_OPERATOR, "op='average' must be a callable of two objects, an objcomm.Op or one of"),
}
CALLS: dict[str, tuple[Any, dict[str, tuple[Any, str]]]] = {
    "broadcast": (lambda **named: objcomm.broadcast(1, **named), OF_CALLS_WITH_OBJECTS),
    "gather": (lambda **named: objcomm.gather(1, **named), OF_CALLS_WITH_OBJECTS),
    "all_gather": (lambda **named: objcomm.all_gather(1, **named), OF_CALLS_WITH_OBJECTS),
    "scatter": (lambda **named: objcomm.scatter([1], **named), OF_CALLS_WITH_OBJECTS),
    "all_to_all": (lambda **named: objcomm.all_to_all([1], **named), OF_CALLS_WITH_OBJECTS),
    "reduce": (lambda **named: objcomm.reduce(1, **named), OF_REDUCTIONS),
    "all_reduce": (lambda **named: objcomm.all_reduce(1, **named), OF_REDUCTIONS),
    "scan": (lambda **named: objcomm.scan(1, **named), OF_REDUCTIONS),
    "exscan": (lambda **named: objcomm.exscan(1, **named), OF_REDUCTIONS),
    "reduce_scatter": (lambda **named: objcomm.reduce_scatter([1], **named), OF_REDUCTIONS),
    "compute_and_broadcast": (
        lambda **named: objcomm.compute_and_broadcast(int, **named),
        OF_CALLS_WITH_OBJECTS,
    ),
    "send": (
        lambda **named: objcomm.send(1, 0, **named),
        {name: OF_CALLS_WITH_OBJECTS[name] for name in ("group", "timeout", "codec")},
    ),
    "recv": (
        lambda **named: objcomm.recv(0, **named),
        {name: OF_CALLS_WITH_OBJECTS[name] for name in ("group", "timeout", "device")},
    ),
    "barrier": (objcomm.barrier, OF_EVERY_CALL),
    "agree": (lambda **named: objcomm.agree(1, **named), OF_EVERY_CALL),
    "split": (lambda **named: objcomm.split(0, **named), OF_EVERY_CALL),
    "dup": (objcomm.dup, OF_EVERY_CALL),
    "new_group": (lambda **named: objcomm.new_group([0], **named), OF_EVERY_CALL),
    "node_group": (objcomm.node_group, OF_EVERY_CALL),
    "run_on_main": (lambda **named: objcomm.run_on_main(int, **named), OF_EVERY_CALL),
    "run_once_per_node": (lambda **named: objcomm.run_once_per_node(int, **named), OF_EVERY_CALL),
    "main_first": (lambda **named: objcomm.main_first(**named).__enter__(), OF_EVERY_CALL),
    "node_first": (lambda **named: objcomm.node_first(**named).__enter__(), OF_EVERY_CALL),
    "zero_only": (lambda **named: once.zero_only(**named).__enter__(), OF_EVERY_CALL),
}


@ranks(1, 2)
def test_a_wrong_argument_is_named_with_its_call_and_what_is_accepted() -> None:
    if here().rank == here().world_size - 1:  # no other rank needs to know
        for name, (call, arguments) in CALLS.items():
            for argument, (given, told) in arguments.items():
                with (
                    case(name, argument),
                    pytest.raises(UsageError, match=f"^{name}: {re.escape(told)}"),
                ):
                    call(**{argument: given})
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
def test_a_rank_within_the_group_is_proposed_only_where_the_number_is_one() -> None:
    for src in (-1, 2):
        with pytest.raises(UsageError, match=rf"^broadcast: src={src} .* global ranks are 0-1$"):
            objcomm.broadcast(1, src=src)
    with subgroup(1) as group:
        if here().rank == 1:
            with pytest.raises(UsageError, match=r"ranks are 1; give .* as group_src=$"):
                objcomm.broadcast(1, src=0, group=group)
    assert_group_works()


@ranks(2)
def test_a_rank_outside_is_told_in_which_call() -> None:
    with subgroup(1) as group:
        if here().rank == 0:
            with pytest.raises(
                NotInGroupError, match=r"^all_gather: global rank 0 is not a member"
            ):
                objcomm.all_gather(1, group=group)
    assert_group_works()


@solo(environment={"WORLD_SIZE": "2", "RANK": "1"})
def test_a_job_that_has_not_begun_is_told_in_which_call() -> None:
    told = (
        r"^broadcast: WORLD_SIZE=2 says that there are other ranks.*, and before objcomm.shutdown"
    )
    with pytest.raises(UsageError, match=told):
        objcomm.broadcast(1)
