"""Train on with three ranks after the fourth was killed, from the last checkpoint.

When a rank dies, the others agree on which ranks are left, divide the data among these, and read
the checkpoint again. Three ranks that start from that checkpoint end with the same model, to the
last bit.

torchrun ends all ranks when one dies. So this program starts the ranks, and hosts their store:

    python examples/survive_a_death.py
"""

import multiprocessing
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import objcomm

TRAINED = 1200  # images, which three and four ranks can share equally
STEPS, SAVED_EVERY, KILLED_AT = 30, 5, 13
VICTIM = 3  # the rank that is killed


def train(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Train on one rank up to the last step; the last of four ranks dies before."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16), torch.tensor(digits)
    torch.manual_seed(0)
    model = nn.Linear(64, 10).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def latest() -> Any:
        saved = sorted(folder.glob("step-*.pt"))
        return torch.load(saved[-1]) if saved else None

    group: Any = dist.group.WORLD
    step, is_restored = 0, False
    while step < STEPS:
        try:
            if not is_restored:
                saved = objcomm.run_on_main(latest, group=group)
                if saved is not None:
                    step = saved["step"]
                    model.load_state_dict(saved["model"])
                    optimizer.load_state_dict(saved["optimizer"])
                is_restored = True
            if rank == VICTIM and step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            mine = slice(objcomm.rank(group), TRAINED, objcomm.world_size(group))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            objcomm.models.sync_gradients(model.parameters(), group=group)
            optimizer.step()
            step += 1
            if step % SAVED_EVERY == 0 and objcomm.is_main(group):
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"step": step, **states}, folder / f"step-{step:02}.pt")
        except objcomm.TransportError:
            group, is_restored = objcomm.survivors(group, timeout=60), False
    objcomm.shutdown()


def run(world_size: int, folder: Path) -> Any:
    """Start the ranks, wait until they have ended, and return the trained model."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = multiprocessing.get_context("spawn").Process
    ranks = [
        start(target=train, args=(i, world_size, store.port, folder)) for i in range(world_size)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return torch.load(folder / f"step-{STEPS}.pt")["model"]


def main() -> None:
    """Compare the model of three survivors with that of three ranks that begin where they did."""
    with tempfile.TemporaryDirectory() as four, tempfile.TemporaryDirectory() as three:
        survived = run(4, Path(four))
        restored_at = KILLED_AT // SAVED_EVERY * SAVED_EVERY
        shutil.copy(Path(four, f"step-{restored_at}.pt"), three)
        begun = run(3, Path(three))
        is_same = all(torch.equal(survived[name], begun[name]) for name in begun)
        print(f"after step {restored_at}, as with three ranks: {is_same}")


if __name__ == "__main__":
    main()
