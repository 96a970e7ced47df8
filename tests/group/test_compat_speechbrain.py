"""SpeechBrain's functions under their own names: what they do, and each defect fixed."""

import json
import os
import pickle
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import UsageError
from objcomm.compat import speechbrain as sb
from tests.cases import case
from tests.group.helpers import assert_group_works, error_in, in_thread
from tests.group.test_start import start_as
from tests.ranks import ranks, solo
from tests.workers import here


def fail() -> Any:
    raise ValueError("no such file")


@ranks(1, 2)
def test_run_on_main_shares_the_result() -> None:
    ran: list[str] = []
    positional: Any = (dict, [[("a", 1)]], {"b": 2}, ran.append, ["post"], None, False)
    got = sb.run_on_main(*positional)
    assert got == {"a": 1, "b": 2}
    assert ran == ["post"] * (here().rank > 0)
    sb.run_on_main(int, post_func=ran.append, post_args=["all"], run_post_on_main=True)
    assert ran[-1:] == ["all"]


RAISES: dict[str, Callable[[], object]] = {
    "func of run_on_main": lambda: sb.run_on_main(fail),
    "post_func of run_on_main": lambda: sb.run_on_main(int, post_func=fail),
    "post_func everywhere": lambda: sb.run_on_main(int, post_func=fail, run_post_on_main=True),
    "a result that cannot be sent": lambda: sb.run_on_main(threading.Lock),
    "func of run_once_per_node": lambda: sb.run_once_per_node(fail),
    "post_func of run_once_per_node": lambda: sb.run_once_per_node(int, post_func=fail),
    "main_process_only": sb.main_process_only(fail),
    "main_process_only with options": sb.main_process_only(timeout=60)(fail),
    "once_per_node": sb.once_per_node(fail),
}


@ranks(2)
def test_an_error_on_one_rank_no_longer_leaves_the_others_waiting() -> None:
    for where, call in RAISES.items():
        with case(where):
            error = error_in(objcomm.CollectiveError, call)
            failures = error.failures
            if where != "post_func everywhere":  # there the faster rank fails first
                assert list(failures) == [int("post_func of" in where)]
            text = "cannot pickle" if "cannot be sent" in where else "ValueError: no such file"
            assert all(text in each.traceback for each in failures.values())
            # SpeechBrain let func's error propagate, and the other ranks got torch's RuntimeError.
            own = TypeError if "cannot be sent" in where else ValueError
            raised_here = here().rank in failures or where == "post_func everywhere"
            assert isinstance(error, own if raised_here else RuntimeError)
            assert pickle.loads(pickle.dumps(error)).failures == failures  # noqa: S301  # pickled here
            assert_group_works()


@ranks(1, 2, disposable=True)
def test_without_rank_in_the_environment_one_rank_is_main() -> None:
    for name in ("RANK", "LOCAL_RANK"):
        for environment in ({}, {name: ""}):
            os.environ.pop(name, None)
            os.environ.update(environment)
            assert sb.get_rank() == here().rank
            assert sb.if_main_process() == (here().rank == 0)
    ran: list[int] = []

    def runs(number: int) -> str:
        ran.append(number)
        return "result"

    assert sb.main_process_only(runs)(1) == "result"
    assert len(ran) == (here().rank == 0)
    assert sb.rank_prefixed_message("text") == f"[rank: {here().rank}] text"
    # The ranks find the first one on this host without environment variables.
    assert sb.run_once_per_node(runs, [2]) == ("result" if here().rank == 0 else None)
    assert sum(ran) == (3 if here().rank == 0 else 0)
    assert sb.is_local_rank_zero() == (here().rank == 0)


@solo()
def test_queries_read_the_launchers_variables_before_the_ranks_have_met() -> None:
    assert sb.get_rank() is sb.get_local_rank() is None
    assert sb.rank_prefixed_message("text") == "text"
    assert sb.if_main_process()
    assert sb.is_local_rank_zero()
    assert sb.infer_device() == ("cuda" if torch.cuda.is_available() else "cpu")
    os.environ["LOCAL_RANK"] = "1"
    assert sb.get_rank() == 1
    os.environ["JSM_NAMESPACE_RANK"] = "8"
    assert sb.get_rank() == 8
    os.environ["SLURM_PROCID"] = "9"  # fixed: a local rank took precedence
    assert (sb.get_rank(), sb.get_local_rank()) == (9, 1)
    os.environ["RANK"] = ""  # fixed: a ValueError
    assert sb.get_rank() == 9
    os.environ["RANK"] = "5"
    assert sb.rank_prefixed_message("text") == "[rank: 5] text"
    del os.environ["LOCAL_RANK"]
    os.environ["SLURM_LOCALID"] = "3"  # fixed: SpeechBrain no longer reads it
    assert sb.get_local_rank() == 3


@solo(environment={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
def test_before_the_ranks_have_met_none_acts_as_if_it_were_alone() -> None:
    assert sb.ddp_prevent_block()
    calls: list[Callable[[], object]] = [
        sb.ddp_barrier, lambda: sb.ddp_broadcast(1), lambda: sb.run_on_main(int),
        lambda: sb.run_once_per_node(int), sb.main_process_only(int), sb.once_per_node(int),
        lambda: sb.ddp_all_reduce(torch.ones(1), dist.ReduceOp.SUM),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError, match="says that there are other ranks"):
            call()


@solo()
def test_without_torch_distributed_nothing_waits() -> None:
    assert not sb.is_distributed_initialized()
    assert sb.ddp_prevent_block()
    mine = object()
    assert sb.ddp_broadcast(mine) is sb.run_on_main(lambda: mine) is mine
    assert sb.ddp_all_reduce(mine, dist.ReduceOp.SUM) is mine
    assert sb.run_once_per_node(lambda: 1, post_func=fail) == 1
    assert sb.run_once_per_node(lambda: 1, post_func=lambda: 2, run_post_on_all=True) == 2
    assert sb.once_per_node(lambda: mine)() is mine
    sb.ddp_barrier()
    sb.ddp_init_group({"distributed_backend": "gloo"})  # without a launcher it does nothing
    assert not sb.is_distributed_initialized()


@ranks(2)
def test_a_context_prevents_blocking_on_each_rank_that_enters() -> None:
    assert sb.is_distributed_initialized()
    for context in (sb.MainProcessContext, sb.OncePerNodeContext):
        assert not sb.ddp_prevent_block()
        with context():
            assert sb.ddp_prevent_block()
            sb.ddp_barrier()
            assert sb.ddp_broadcast(here().rank, src=1) == here().rank
            tensor = torch.ones(1)
            assert sb.ddp_all_reduce(tensor, dist.ReduceOp.SUM) is tensor
            assert tensor.tolist() == [1]
        assert not sb.ddp_prevent_block()
    assert_group_works()


@ranks(2)
def test_an_error_in_a_context_does_not_silence_later_barriers() -> None:
    with pytest.raises(ValueError, match="no such file"), sb.MainProcessContext():
        fail()
    assert not sb.ddp_prevent_block()
    assert sb.ddp_broadcast(here().rank, src=1) == 1


@ranks(2)
def test_a_context_of_one_thread_does_not_affect_others() -> None:
    answers: list[bool] = []
    with sb.MainProcessContext():
        in_thread(lambda: answers.append(sb.ddp_prevent_block())).join()
    assert answers == [False]


@ranks(2)
def test_a_call_costs_one_collective() -> None:
    log = sb.main_process_only(lambda: None)
    log()
    objcomm.reset_stats()
    log()
    counts = {name: each.calls for name, each in objcomm.stats().items()}
    assert counts == {"main_process_only": 1}
    assert_group_works()


@ranks(4)
def test_main_process_only_within_once_per_node_runs_on_every_node() -> None:
    rank = here().rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("objcomm._collectives.split.machine", lambda: f"host {rank // 2}")
        objcomm.node_group()  # detects the hosts again
        inner = sb.main_process_only(lambda: f"by {rank}")
        assert sb.once_per_node(inner)() == (f"by {rank}" if rank in {0, 2} else None)
    objcomm.node_group()
    assert_group_works()


@ranks(2)
def test_post_functions_of_nodes_return_the_result_of_this_ranks_function() -> None:
    rank = here().rank
    got = sb.run_once_per_node(str, [1], None, str, [2])
    assert got == ("1" if rank == 0 else "2")
    got = sb.run_once_per_node(lambda function: function, kwargs={"function": 3})
    assert got == (3 if rank == 0 else None)
    assert sb.run_once_per_node(threading.Lock, post_func=threading.Lock) is not None


@ranks(2)
def test_ddp_all_reduce_is_in_place_and_accepts_what_it_documents() -> None:
    mine = torch.tensor([1.0, 3.0]) * (here().rank + 1)
    assert sb.ddp_all_reduce(mine, dist.ReduceOp.SUM) is mine
    assert mine.tolist() == [3, 9]
    mine = torch.tensor([float(here().rank)], requires_grad=True)
    assert sb.ddp_all_reduce(mine, dist.ReduceOp.AVG).tolist() == [0.5]  # fixed: Gloo has no AVG
    assert mine.requires_grad
    assert sb.ddp_all_reduce({"seen": 2**70}, dist.ReduceOp.SUM) == {"seen": 2**71}  # fixed
    for op, bits in (("BAND", 4), ("BOR", 7), ("BXOR", 3)):
        mine = torch.tensor([5 + here().rank])
        assert sb.ddp_all_reduce(mine, getattr(dist.ReduceOp, op)).tolist() == [bits]
    mine = torch.tensor([here().rank])
    with pytest.raises(UsageError, match="can't hold the result"):  # fixed: NCCL rounds it down
        sb.ddp_all_reduce(mine, dist.ReduceOp.AVG)
    assert mine.tolist() == [here().rank]


RECIPE = '''
"""A recipe after SpeechBrain's documentation."""

import json
import logging
import sys
from pathlib import Path

import torch
from speechbrain.utils import distributed
from speechbrain.utils.distributed import (
    MainProcessContext, ddp_all_reduce, ddp_barrier, ddp_broadcast, ddp_init_group, get_rank,
    if_main_process, infer_device, is_distributed_initialized, main_process_only, once_per_node,
    rank_prefixed_message, run_on_main, run_once_per_node,
)


def prepare_data(folder, valid_ratio):
    manifest = Path(folder) / "train.json"
    with open(manifest, "x") as file:  # fails where it is done twice
        json.dump({"ratio": valid_ratio, "utterances": ["a", "b", "c"]}, file)


def load(folder, into):
    into.update(json.loads((Path(folder) / "train.json").read_text()))


@main_process_only
def write_log(folder, text):
    with open(Path(folder) / "log.txt", "a") as file:
        file.write(text + "\\n")
    ddp_barrier()  # in a function of main's this does not wait
    return text.upper()


@main_process_only
def fibonacci(number):
    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)


@once_per_node
def unpack():
    return "unpacked"


folder = sys.argv[1]
ddp_init_group({"distributed_backend": "gloo", "device": infer_device()})
data = {}
run_on_main(prepare_data, kwargs={"folder": folder, "valid_ratio": 0.1})
run_on_main(int, post_func=load, post_args=[folder, data], run_post_on_main=True)
if if_main_process():
    with MainProcessContext():
        (Path(folder) / "env.log").write_text(rank_prefixed_message("begun"))
        ddp_barrier()
ddp_barrier()
rank = get_rank() or 0
started = run_once_per_node(lambda: "started")
best = ddp_broadcast({"epoch": 3, "rank": rank})
summed = ddp_all_reduce(torch.ones(2), torch.distributed.ReduceOp.SUM)
result = {
    "utterances": data["utterances"], "log": write_log(folder, "one line"), "best": best,
    "fibonacci": fibonacci(10), "unpack": unpack(), "started": started, "sum": summed.tolist(),
    "env": (Path(folder) / "env.log").read_text(), "module": distributed.if_main_process(),
}
(Path(folder) / f"result{rank}.json").write_text(json.dumps(result))
if is_distributed_initialized():
    torch.distributed.destroy_process_group()
'''


@ranks(1, 2, joined=False)
def test_a_recipe_runs_when_only_its_import_is_changed(tmp_path: Path) -> None:
    rank, world_size = here().rank, here().world_size
    if world_size > 1:  # a world of one has no launcher
        start_as(rank, world_size)
    script = tmp_path / f"train{rank}.py"
    renamed = RECIPE.replace("speechbrain.utils.distributed", "objcomm.compat.speechbrain")
    renamed = renamed.replace("speechbrain.utils", "objcomm.compat")
    script.write_text(renamed.replace("import distributed", "import speechbrain as distributed"))
    with mock.patch.object(sys, "argv", [str(script), str(tmp_path)]):
        runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "log.txt").read_text() == "one line\n"
    assert json.loads((tmp_path / f"result{rank}.json").read_text()) == {
        "utterances": ["a", "b", "c"],
        "log": "ONE LINE",
        "best": {"epoch": 3, "rank": 0},
        "fibonacci": 55,
        "unpack": "unpacked" if rank == 0 else None,
        "started": "started" if rank == 0 else None,
        "sum": [world_size] * 2,
        "env": "[rank: 0] begun" if world_size > 1 else "begun",
        "module": rank == 0,
    }
