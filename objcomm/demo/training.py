"""A small network and its training, data-parallel by plain torch.

Gradients are tensors of known shape, so they need nothing of objcomm; the first weights, a dict of
tensors, come from rank 0 in one call.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

import objcomm
from objcomm.demo.config import Config
from objcomm.demo.digits import CLASSES, PIXELS, Shard


def train(config: Config, shard: Shard) -> nn.Module:
    """Train one model together; every rank ends with the same weights.

    Every rank must call this, with a shard of the same length. Rank 0 shows a progress bar.
    """
    torch.manual_seed(config.seed)
    model = nn.Sequential(
        nn.Linear(PIXELS, config.hidden), nn.ReLU(), nn.Linear(config.hidden, CLASSES)
    )
    model.load_state_dict(objcomm.broadcast(model.state_dict(), progress=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=0.9)
    steps = tqdm(
        list(_minibatches(config, len(shard.rows))),
        desc=f"training on {objcomm.world_size()} ranks",
        unit="step",
        disable=not objcomm.is_main(),
    )
    for batch in steps:
        loss = nn.functional.cross_entropy(model(shard.images[batch]), shard.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        _average_gradients(model)
        optimizer.step()
        steps.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model


def _minibatches(config: Config, images: int) -> Iterator[torch.Tensor]:
    for _ in range(config.epochs):
        yield from torch.randperm(images).split(config.batch_size)


def _average_gradients(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
