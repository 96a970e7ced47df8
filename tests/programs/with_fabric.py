"""Train with Lightning Fabric, which starts its second rank itself if no launcher has."""

from typing import Any

import torch
from lightning_fabric import Fabric

from tests.programs import timed, write


def train(fabric: Fabric) -> list[float]:
    """Fit a plane and return the weights."""
    fabric.seed_everything(7)
    inputs = torch.randn(64, 3)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]])
    model = torch.nn.Linear(3, 1)
    parallel, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mine = slice(fabric.global_rank, None, fabric.world_size)
    for _ in range(10):
        optimizer.zero_grad()
        fabric.backward(torch.nn.functional.mse_loss(parallel(inputs[mine]), targets[mine]))
        optimizer.step()
    weights: list[float] = model.weight.flatten().tolist()
    return weights


def main() -> None:
    """Train, then share objects many times, and write both results."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    rank = fabric.global_rank
    weights = train(fabric)
    times: list[float] = []
    settings: dict[str, Any] = {}
    for step in range(30):
        with timed(times):
            mine = {"step": step, "w": torch.full((1000,), float(rank))}
            settings = fabric.broadcast(mine, src=1)
            name = fabric.broadcast(f"run of rank {rank}")
    write([rank, weights, settings["step"], settings["w"].sum().item(), name], times)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
