"""Libraries that call torch's object collectives, unchanged, with and without ``patch()``.

Each test runs a library's own code both ways, compares the results, and lists its objcomm calls.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import objcomm
from objcomm.compat.torch import patch
from tests.group.helpers import assert_group_works
from tests.ranks import ranks
from tests.same import assert_same
from tests.workers import here

R = TypeVar("R")


def both_ways(run: Callable[[], R]) -> dict[str, int]:
    """Count a function's objcomm calls under the patch; its results must not change."""
    plain = run()
    objcomm.reset_stats()
    with patch():
        patched = run()
    assert_same(patched, plain, sharing=False)
    made = {name: figures.calls for name, figures in objcomm.stats().items()}
    objcomm.reset_stats()
    assert_same(run(), plain, sharing=False)
    assert not objcomm.stats()
    assert_group_works()
    return made


@pytest.mark.long  # its imports take seconds
@ranks(2, disposable=True)
def test_accelerate_gathers_and_broadcasts_objects() -> None:
    rank = here().rank
    os.environ.update(LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    from accelerate import Accelerator, PartialState  # noqa: PLC0415  # reads the environment
    from accelerate.utils import broadcast_object_list, gather_object  # noqa: PLC0415  # for these tests alone

    assert PartialState(cpu=True).num_processes == 2

    def run() -> list[Any]:
        box = [{"rank": rank, "w": torch.full((3,), float(rank))}, "x" * rank]
        given = broadcast_object_list(box, from_process=1)
        assert given is box
        return [gather_object([{"rank": rank}] * (rank + 1)), given]

    assert both_ways(run) == {"all_gather_object": 1, "broadcast_object_list": 1}

    def metrics() -> Any:
        return Accelerator(cpu=True).gather_for_metrics([f"text of {rank}"], use_gather_object=True)

    assert both_ways(metrics) == {"all_gather_object": 1}


@pytest.mark.long  # likewise
@ranks(2, disposable=True)
def test_torchmetrics_metrics_agree() -> None:
    from torchmetrics import CatMetric  # noqa: PLC0415  # two seconds
    from torchmetrics.classification import MulticlassAccuracy  # noqa: PLC0415  # for these tests alone
    from torchmetrics.detection.mean_ap import MeanAveragePrecision  # noqa: PLC0415  # for these tests alone

    rank = here().rank
    masks = [((4, 4), b"run-length" * (rank + 1)), ((2, 3), b"")]

    def run() -> list[Any]:
        accuracy = MulticlassAccuracy(num_classes=3)
        accuracy.update(torch.tensor([0, 1, 2, rank]), torch.tensor([0, 1, 1, 1]))
        values = CatMetric()
        values.update(torch.arange(3.0 * (rank + 1)))
        # The metric's own sync of masks; a complete metric needs COCO's tools.
        gathered = MeanAveragePrecision._gather_tuple_list(masks)  # noqa: SLF001  # see above
        return [accuracy.compute(), values.compute(), gathered]

    # Tensor states use torch's tensor collectives, which the patch leaves alone.
    assert both_ways(run) == {"all_gather_object": 1}


def saved_and_loaded(folder: Path, name: str, *, in_background: bool = False) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))

    def state(fill: float) -> dict[str, Any]:
        weights = torch.arange(40.0).reshape(10, 4) + fill
        sharded = distribute_tensor(weights, mesh, [Shard(0)])
        return {"w": sharded, "b": torch.full((3,), fill), "step": int(fill), "opt": {"lr": fill}}

    place = folder / name
    if in_background:
        saving: Any = checkpoint.async_save(state(2.5), checkpoint_id=place)
        for turn in range(20):  # on the main thread, on the same group
            boxes: list[Any] = [None, None]
            dist.all_gather_object(boxes, (turn, here().rank))
            assert boxes == [(turn, 0), (turn, 1)]
        saving.result()
    else:
        checkpoint.save(state(2.5), checkpoint_id=place)
    loaded = state(0.0)
    checkpoint.load(loaded, checkpoint_id=place)
    loaded["w"] = loaded["w"].full_tensor()
    files = sorted(path.name for path in place.iterdir())
    dist.barrier()
    if here().rank == 0:
        shutil.rmtree(place)
    dist.barrier()
    return [loaded, files]


@ranks(2)
def test_distributed_checkpoints_are_saved_and_loaded(tmp_path: Path) -> None:
    loaded, _ = saved_and_loaded(tmp_path, "first")
    assert (loaded["step"], loaded["opt"], loaded["w"][9, 3].item()) == (2, {"lr": 2.5}, 41.5)
    made = both_ways(lambda: saved_and_loaded(tmp_path, "checkpoint"))
    assert made == {
        "gather_object": 3,
        "scatter_object_list": 2,
        "broadcast_object_list": 1,
        "all_gather_object": 1,
    }


@ranks(2)
def test_a_checkpoint_may_be_saved_in_the_background(tmp_path: Path) -> None:
    with patch():
        for turn in range(3):  # each save has its own thread
            loaded, _ = saved_and_loaded(tmp_path, f"checkpoint {turn}", in_background=True)
            assert loaded["opt"] == {"lr": 2.5}
    assert objcomm.stats()["gather_object"].calls >= 9
    assert_group_works()


class FailingPlanner(checkpoint.DefaultSavePlanner):
    """Fails on rank 1."""

    def create_local_plan(self) -> checkpoint.SavePlan:
        if here().rank == 1:
            raise OSError("no space left")
        return super().create_local_plan()


@ranks(2)
def test_a_failed_checkpoint_raises_the_same_error(tmp_path: Path) -> None:
    def run() -> list[str]:
        with pytest.raises(checkpoint.CheckpointException) as caught:
            checkpoint.save({"b": torch.ones(3)}, checkpoint_id=tmp_path, planner=FailingPlanner())
        failures = caught.value.failures
        return [f"{rank}: {type(each[0]).__name__}: {each[0]}" for rank, each in failures.items()]

    assert run() == ["1: OSError: no space left"]
    assert both_ways(run) == {"gather_object": 1, "scatter_object_list": 1}


@ranks(2)
def test_a_state_dict_is_loaded_from_one_rank() -> None:
    def run() -> list[list[float]]:
        model = torch.nn.Linear(3, 2)
        filled = {name: torch.full_like(each, 3.0) for name, each in model.state_dict().items()}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        given: Any = filled if here().rank == 0 else {}
        set_model_state_dict(model, given, options=options)
        return [parameter.flatten().tolist() for parameter in model.parameters()]

    assert both_ways(run) == {"broadcast_object_list": 1}
