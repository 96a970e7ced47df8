"""Which backend and which CUDA device a rank uses, if nobody says.

Asks torch what there is; starts nothing.
"""

import os

import torch
import torch.distributed as dist

from objcomm.environment import Place
from objcomm.errors import UsageError
from objcomm.memory import DeviceLike


def default_backend() -> str:
    """Gloo, and NCCL beside it for what lies on CUDA devices, if there are any."""
    has_cuda = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if has_cuda else "gloo"


def backends_in(backend: str) -> dict[str, str]:
    """Backends by type of device, however it is written."""
    parts = {}
    for part in filter(None, backend.lower().split(",")):
        device, _, name = part.rpartition(":")
        for each in [device] if device else ["cpu", "cuda"]:
            parts[each] = name
    return parts


def uses_nccl(backend: str) -> bool:
    """Whether tensors on CUDA devices go over NCCL."""
    return backends_in(backend).get("cuda") == "nccl"


def check_backend(backend: str) -> None:
    """See that this torch has a backend.

    Raises:
        UsageError: it has not.
    """
    known = getattr(dist.Backend, "backend_list", [])
    for name in set(backends_in(backend).values()):
        if name not in known or name == "undefined":
            raise UsageError(f"init: backend={backend!r}: there is no {name!r}, only {known}")
        if not dist.is_backend_available(name):
            raise UsageError(
                f"init: backend={backend!r}, but this torch was built without {name}; "
                "leave backend out, or use 'gloo'"
            )


def cuda_device(place: Place, device: DeviceLike) -> torch.device:
    """Which CUDA device is this rank's.

    Args:
        place: where the rank stands.
        device: what the caller wants, if anything.

    Raises:
        UsageError: nothing tells, or there are too few.
    """
    count = torch.cuda.device_count()
    if device is not None:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.local_rank is None:
        raise UsageError(
            "init: no variable says which of this host's ranks this is; set LOCAL_RANK, counted "
            "from 0 on each host, or give device="
        )
    if place.local_rank < count:
        return torch.device("cuda", place.local_rank)
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return torch.device("cuda", 0)
    raise UsageError(
        f"init: this is rank {place.local_rank} of this host, which has {count} CUDA devices; "
        "start no more ranks than devices on each host (torchrun --nproc-per-node, srun "
        "--ntasks-per-node), check CUDA_VISIBLE_DEVICES, or use backend='gloo'"
    )
