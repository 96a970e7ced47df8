"""A flashy program, run on several ranks and in a single process."""

from typing import Any

import torch
from torch import nn

import objcomm
from objcomm.compat import flashy as distrib


def use_documented(rank: int, size: int) -> None:
    """A program as in flashy's documentation; only its import is changed."""
    distrib.init()
    assert (distrib.rank(), distrib.world_size()) == (rank, size)
    assert distrib.is_rank_zero() == (rank == 0)
    assert distrib.is_distributed() == (size > 1)

    @distrib.rank_zero_only
    def log(line: str, *, end: str = "") -> str:
        return line + end

    assert log("epoch 1", end=".") == ("epoch 1." if rank == 0 else None)
    torch.manual_seed(rank)
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    distrib.broadcast_model(model)
    weight = model[0].weight.detach()
    assert all(torch.equal(everyone, weight) for everyone in objcomm.all_gather(weight))
    train = distrib.loader(torch.rand(9, 4), batch_size=3, shuffle=True)
    train.sampler.set_epoch(1)
    for images in train:
        with distrib.eager_sync_model(model):
            model(images).square().mean().backward()
        model(images).square().mean().backward()
        distrib.sync_model(model, True, False)  # noqa: FBT003  # as flashy allows
    distrib.sync_gradients(model.parameters())
    with distrib.eager_sync_gradients(p for p in model.parameters()):
        model(torch.rand(2, 4)).sum().backward()
    gradient = model[0].weight.grad
    assert all(torch.equal(everyone, gradient) for everyone in objcomm.all_gather(gradient))
    tested = [len(batch) for batch in distrib.loader(torch.rand(9, 4), 2)]
    assert sum(objcomm.all_gather(sum(tested))) == 9
    distrib.barrier()
    assert (distrib.wrap(model) is model) == (size == 1)
