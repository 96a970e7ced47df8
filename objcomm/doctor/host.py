"""What a rank can tell of itself and of its host without any other rank."""

import importlib
import os
import platform
import resource
import shutil
import socket
import uuid
from collections.abc import Mapping

import torch
import torch.distributed as dist

from objcomm.backends import cuda_device, default_backend, uses_nccl
from objcomm.doctor.address import own_address
from objcomm.doctor.facts import UNKNOWN, Rendezvous, Report
from objcomm.doctor.interfaces import gloo_choice, interfaces, nccl_choice
from objcomm.environment import Place, place_in
from objcomm.errors import UsageError
from objcomm.transport.liveness import machine

_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # its size is asked for, nothing is written there
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
_TELLING = (
    "GLOO_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def examine(environ: Mapping[str, str]) -> tuple[Report, Place | None]:
    """This process and its host, before it meets anybody.

    Args:
        environ: as ``os.environ``.

    Returns:
        What was found, and where the launcher has put this process: None if there is no launcher,
        or if its variables are wrong, which the report says.
    """
    place, place_problem = _place(environ)
    host = socket.gethostname()
    there = interfaces()
    size, free = _shared_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    backend = default_backend() if dist.is_available() else ""
    local_rank = None if place is None else place.local_rank
    report = Report(
        rank=_rank(place, place_problem),
        world_size=1 if place is None else place.world_size,
        local_rank=UNKNOWN if local_rank is None else local_rank,
        launcher="" if place is None else place.launcher,
        host=host,
        machine=machine(),
        pid=os.getpid(),
        versions=_versions(),
        backends=tuple(name for name in _BACKENDS if _is_there(name)),
        devices=_devices(),
        backend=backend,
        place_problem=place_problem,
        device_problem=_device_problem(place, backend),
        shm_nbytes=size,
        shm_free_nbytes=free,
        open_files=_files(soft),
        open_files_most=_files(hard),
        interfaces=there,
        gloo=gloo_choice(environ, there, own_address(host)),
        nccl=nccl_choice(environ, there),
        rendezvous=Rendezvous() if place is None else Rendezvous(place.host, place.port),
        token=uuid.uuid4().hex,
        environment={name: environ[name] for name in _TELLING if name in environ},
    )
    return report, place


def _place(environ: Mapping[str, str]) -> tuple[Place | None, str]:
    try:
        place = place_in(environ)
    except UsageError as error:
        return None, str(error).removeprefix("init: ")
    if place is not None and not place.host:
        return None, (
            f"{place.launcher} has started {place.world_size} ranks, but MASTER_ADDR is not set; "
            "set it to the host of rank 0, the same on every rank"
        )
    return place, ""


def _rank(place: Place | None, problem: str) -> int:
    if place is not None:
        return place.rank
    return UNKNOWN if problem else 0


def _versions() -> dict[str, str]:
    # The package's own name, which stands above this one.
    version = importlib.import_module("objcomm").__version__
    found = {"python": platform.python_version(), "torch": torch.__version__, "objcomm": version}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if _is_there("nccl"):
        nccl = torch.cuda.nccl.version()
        found["nccl"] = ".".join(map(str, nccl))
    return found


def _is_there(backend: str) -> bool:
    return dist.is_available() and dist.is_backend_available(backend)


def _devices() -> tuple[str, ...]:
    return tuple(torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count()))


def _device_problem(place: Place | None, backend: str) -> str:
    if place is None or not uses_nccl(backend):
        return ""
    try:
        cuda_device(place, None)
    except UsageError as error:
        return str(error).removeprefix("init: ")
    return ""


def _shared_memory() -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return UNKNOWN, UNKNOWN
    return usage.total, usage.free


def _files(limit: int) -> int:
    """A limit as a number, where the kernel may say that there is none."""
    return 2**31 if limit == resource.RLIM_INFINITY else limit
