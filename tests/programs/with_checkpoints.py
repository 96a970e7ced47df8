"""Save and load distributed checkpoints, synchronously and in the background."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import broadcast_object_list, checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.programs import timed, write


def main() -> None:
    """Save and load a sharded state many times, and a model's state from one rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    broadcast_object_list(folders)
    folder = Path(folders[0])

    def state(fill: float) -> dict[str, Any]:
        weights = torch.arange(40.0).reshape(10, 4) + fill
        sharded = distribute_tensor(weights, mesh, [Shard(0)])
        return {"w": sharded, "bias": torch.full((3,), fill), "step": int(fill), "lr": [fill]}

    times: list[float] = []
    loaded = state(0.0)
    for step in range(10):
        with timed(times):
            checkpoint.save(state(step + 0.5), checkpoint_id=folder / str(step))
            loaded = state(0.0)
            checkpoint.load(loaded, checkpoint_id=folder / str(step))
    saving: Any = checkpoint.async_save(state(20.5), checkpoint_id=folder / "background")
    saving.result()
    later = state(0.0)
    checkpoint.load(later, checkpoint_id=folder / "background")

    model = torch.nn.Linear(3, 2)
    filled: Any = {name: torch.full_like(each, 3.0) for name, each in model.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, filled if rank == 0 else {}, options=options)

    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.distcp"))
    values = [
        [each["w"].full_tensor().tolist(), each["bias"].tolist(), each["step"], each["lr"]]
        for each in (loaded, later)
    ]
    write([rank, values, [each.tolist() for each in model.parameters()], files], times)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
