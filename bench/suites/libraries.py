"""Unchanged code that calls torch's object collectives, with torch's and with objcomm's."""

import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import objcomm
from bench.case import LARGE, Target, case
from bench.peers import Peer

_PEERS = ("torch", "objcomm.compat")
_HALF = (
    Target(
        0.5,
        against="torch",
        peer="objcomm.compat",
        why_missed="The Python of four ranks; see broadcast.",
    ),
)


@case("small dict", peers=_PEERS, worlds=(2, 4), targets=_HALF)
@case("8 MiB array per rank", peers=_PEERS, worlds=(2, 4), samples=LARGE, targets=_HALF)
def all_gather_object(peer: Peer, mine: Any) -> Callable[[], object]:
    """``all_gather_object``."""
    return lambda: peer.all_gather(mine)


@case("small dict", peers=_PEERS, worlds=(2, 4), targets=_HALF)
def gather_object(peer: Peer, mine: Any) -> Callable[[], object]:
    """``gather_object``."""
    return lambda: peer.gather(mine)


@case("small dict", peers=_PEERS, worlds=(2, 4), targets=_HALF)
def broadcast_object_list(peer: Peer, mine: Any) -> Callable[[], object]:
    """``broadcast_object_list`` with one object."""
    return lambda: peer.broadcast(mine)


@case("small dict", peers=_PEERS, worlds=(2, 4), targets=_HALF)
def scatter_object_list(peer: Peer, mine: Any) -> Callable[[], object]:
    """``scatter_object_list``."""
    return lambda: peer.scatter(mine)


@case(
    "small dict",
    peers=_PEERS,
    worlds=(2,),
    targets=(
        Target(
            0.5,
            against="torch",
            world=2,
            peer="objcomm.compat",
            why_missed="The Python of each rank; see there_and_back.",
        ),
    ),
)
def send_object_list(peer: Peer, mine: Any) -> Callable[[], object]:
    """``send_object_list`` from rank 0 to rank 1 and back."""
    return lambda: peer.there_and_back(mine)


@case("small dict", peers=_PEERS, worlds=(2, 4))
def accelerate_gather_object(peer: Peer, mine: Any) -> Callable[[], object]:
    """Accelerate's own ``gather_object``; the time includes ``patch()`` and its end."""
    os.environ.update(LOCAL_RANK=str(peer.rank), OMP_NUM_THREADS="1")
    from accelerate import PartialState  # noqa: PLC0415  # reads the environment
    from accelerate.utils import gather_object as gather  # noqa: PLC0415  # for this case alone

    PartialState(cpu=True)
    return lambda: peer.in_library(lambda: gather([mine]))


@case("nothing", peers=_PEERS, worlds=(2, 4), samples=5 * LARGE)
def checkpoint_save_and_load(peer: Peer, _mine: Any) -> Callable[[], object]:
    """``torch.distributed.checkpoint`` of 16 KiB in shards and two numbers, to disk and back."""
    folder = tempfile.TemporaryDirectory(prefix="objcomm-bench-") if peer.rank == 0 else None
    place = objcomm.broadcast("" if folder is None else folder.name)
    saved, loaded = _state(peer, 2.5), _state(peer, 0.0)
    numbers = itertools.count()  # a folder for each call: torch warns if it replaces files
    call = functools.partial(_save_and_load, place, numbers, saved, loaded, _kept=folder)
    return lambda: peer.in_library(call)


def _state(peer: Peer, fill: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (peer.world,))
    weights = distribute_tensor(torch.full((64, 64), fill), mesh, [Shard(0)])
    return {"w": weights, "step": int(fill), "lr": fill}


def _save_and_load(
    place: str,
    numbers: Iterator[int],
    saved: dict[str, Any],
    loaded: dict[str, Any],
    *,
    _kept: object,
) -> object:
    name = f"{place}/{next(numbers)}"
    checkpoint.save(saved, checkpoint_id=name)
    checkpoint.load(loaded, checkpoint_id=name)
    return float(loaded["w"].to_local().sum()), loaded["step"]
