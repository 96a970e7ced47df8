"""flashy's, encodec's and demucs' functions under their own names, with their defects fixed."""

import math
import pickle
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import objcomm
from objcomm import CollectiveError, UsageError
from objcomm.compat import flashy as distrib
from tests.group.flashy_program import use_documented
from tests.group.helpers import assert_group_works, error_in
from tests.ranks import ranks, solo

if TYPE_CHECKING:
    from collections.abc import Callable


@ranks(1, 2, long=(4,))
def test_a_program_for_flashy_runs() -> None:
    use_documented(objcomm.rank(), objcomm.world_size())


@solo()
def test_a_program_for_flashy_runs_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    use_documented(0, 1)
    assert distrib.average_metrics({}) == {}
    assert distrib.average_metrics({"loss": torch.tensor(2)}, 0.5) == {"loss": 2.0}
    assert distrib.broadcast_object("config", 0, "cpu") == distrib.share("config") == "config"


@ranks(2, 3)
def test_defects_of_flashy_and_its_ancestors_are_fixed() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    # float32 metrics: an epoch above 2**24 lost its last bit
    assert distrib.average_metrics({"epoch": 2**24 + 1}, count=3.0) == {"epoch": 2.0**24 + 1}
    # metrics were matched by position
    names = ("loss", "accuracy") if rank else ("accuracy", "loss")
    metrics = {name: {"loss": 2.0, "accuracy": 0.5}[name] for name in names}
    assert distrib.average_metrics(metrics) == metrics
    assert list(distrib.average_metrics(metrics)) == list(names)
    with pytest.raises(CollectiveError, match="rare"):
        distrib.average_metrics({"loss": 1.0} | ({"rare": 1.0} if rank else {}))
    # an empty dict made zip raise, on that rank only
    assert distrib.average_metrics({}) == {}
    assert math.isnan(distrib.average_metrics({"loss": 1.0}, count=0)["loss"])
    assert distrib.average([rank, 5], count=1) == [(size - 1) / 2, 5.0]
    assert distrib.average({"loss": rank}) == {"loss": (size - 1) / 2}
    # all_reduce returned nothing
    total = torch.tensor([rank + 1])
    assert distrib.all_reduce(total) is total
    assert total.tolist() == [size * (size + 1) // 2]
    assert distrib.all_reduce(torch.tensor([rank]), dist.ReduceOp.MAX).tolist() == [size - 1]
    # the source also got a copy, because a function was compared with a number
    mine = {"rank": rank}
    for share in (distrib.broadcast_object, distrib.share):
        assert share(mine, 1) == {"rank": 1}
        assert (share(mine, 1) is mine) == (rank == 1)
    # sync_buffer divided by a function; integer and bool buffers were never synchronized
    buffers: list[Any] = [torch.tensor([rank, 0.0]), torch.tensor(rank), torch.tensor(rank == 0)]
    distrib.sync_buffer(buffers)
    assert [each.tolist() for each in buffers] == [[(size - 1) / 2, 0.0], 0, True]
    buffers = [torch.tensor([float(rank)]), torch.tensor(rank)]
    distrib.sync_buffer(buffers, False)  # noqa: FBT003  # encodec accepts it by position
    assert [each.tolist() for each in buffers] == [[0.0], 0]
    numbers = torch.tensor([rank])
    distrib.broadcast_tensors([numbers], 1)
    assert numbers.tolist() == [1]
    # float16 sums overflowed before the division
    halves = torch.full((3,), 60000.0, dtype=torch.float16)
    distrib.average_tensors([halves])
    assert halves.tolist() == [60000.0] * 3
    # the guard itself hung if a rank had no tensors
    with pytest.raises(CollectiveError, match=r"Rank 0 lacks tensor 0"):
        distrib.sync_grad([nn.Parameter(torch.ones(1))] if rank else [])
    assert_group_works()


def _sync_eagerly(model: nn.Module, *, is_bad: bool) -> None:
    with distrib.eager_sync_model(model):
        model(torch.ones(1, 2)).sum().backward()
        if is_bad:
            raise KeyError("of the block itself")


@ranks(3)
def test_a_program_that_catches_flashys_errors_still_catches_them() -> None:
    is_last = objcomm.rank() == 2
    one, two = torch.zeros(1), torch.zeros(1)
    lists = [one, two] if is_last else [one]
    model: Any = nn.Linear(3 if is_last else 2, 1)
    metrics = {"loss": 1.0} | ({"rare": 1.0} if is_last else {})
    # Calls for which flashy's own check, or torch, raised on some or all ranks.
    differs: list[Callable[[], object]] = [
        lambda: distrib.broadcast_tensors(lists),
        lambda: distrib.average_tensors(lists),
        lambda: distrib.broadcast_model(model),
        lambda: distrib.sync_model(model),
        lambda: distrib.wrap(model),
        lambda: distrib.average_metrics(metrics),
    ]
    for call in differs:
        error = error_in(RuntimeError, call)
        assert isinstance(error, CollectiveError)
        assert pickle.loads(pickle.dumps(error)).failures == error.failures  # noqa: S301  # pickled here
    for share in (distrib.broadcast_object, distrib.share):
        kind = TypeError if is_last else RuntimeError
        error = error_in(kind, partial(share, threading.Lock(), 2), "'lock'")
        assert isinstance(error, CollectiveError)
    with pytest.raises(KeyError if is_last else RuntimeError, match="of the block itself"):
        _sync_eagerly(nn.Linear(2, 1), is_bad=is_last)
    broadcast = partial(distrib.broadcast_tensors, [one], 7)
    assert isinstance(error_in(RuntimeError, broadcast, "src=7 is not in this group"), UsageError)
    reduction = partial(distrib.all_reduce, one, dist.ReduceOp.BAND)
    assert isinstance(error_in(TypeError, reduction, "BAND"), UsageError)
    assert_group_works()


@ranks(2)
def test_unsupported_operators_are_refused_before_any_traffic() -> None:
    numbers = torch.tensor([objcomm.rank()])
    if objcomm.rank() == 0:  # no other rank calls
        for op, text in (("BAND", "BAND"), ("AVG", r"torch\.int64 has no mean")):
            with pytest.raises(UsageError, match=text):
                distrib.all_reduce(numbers, getattr(dist.ReduceOp, op))
    assert numbers.tolist() == [objcomm.rank()]
    assert_group_works()
