"""What a rank can find out without other ranks: its host, its addresses, and slow names.

torch's store looks up the name of each client that connects, and answers no rank meanwhile. A
resolver may occasionally lose a query, so a single fast lookup proves little.
"""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from objcomm._bootstrap import init
from objcomm._bootstrap.doctor.facts import SLOW_LOOKUP_SECONDS, UNKNOWN, Lookup, Report
from objcomm._environment import Placement, interface_addresses, machine, placement_in, system
from objcomm._transport.sockets import open_sockets
from objcomm._transport.store import reason_of
from objcomm._transport.threads import done_within
from objcomm.errors import UsageError

_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # only its size is read
_VARIABLES = ("GLOO_", "MASTER_", "NCCL_", "OBJCOMM_PORTS")
# With a name server that never answers, a lookup takes 10 s.
_GLOO_SECONDS = 15.0


def examine(environ: Mapping[str, str]) -> tuple[Report, Placement | None]:
    """Examine this process and its host, before it meets any other rank.

    Args:
        environ: a mapping like ``os.environ``.

    Returns:
        The facts, and the placement of this process by its launcher. The placement is None if there
        is no launcher, or if its variables are wrong, which the facts then say.
    """
    place, problem = None, ""
    try:
        place = placement_in(environ)
    except UsageError as error:
        problem = str(error).removeprefix("init: ")
    if place is not None and not place.host:
        problem = (
            f"{place.named_by} names {place.world_size} ranks, but MASTER_ADDR is not set; "
            "set it to the host of rank 0, the same on every rank"
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    backend = init.default_backend() if dist.is_available() else ""
    address, gloo_problem = gloo_address() if system() == "linux" else ("", "")
    report = Report(
        rank=UNKNOWN if problem else 0,
        machine=machine(),
        address=address,
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        system=system(),
        versions=_versions(backend),
        devices=devices(),
        shm_free_nbytes=_shared_memory(),
        open_files=2**31 if files == resource.RLIM_INFINITY else files,
        interfaces=tuple(
            (name, each) for name, own in interface_addresses().items() for each in own
        ),
        variables=tuple(each for each in environ.items() if each[0].startswith(_VARIABLES)),
        place_problem=problem,
        gloo_problem=gloo_problem,
    )
    if place is None or problem:
        return report, None
    return replace(
        report,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=UNKNOWN if place.local_rank is None else place.local_rank,
        launcher=place.launcher,
        meeting=f"{place.host}:{place.port}",
        device_problem=device_problem(place, backend),
    ), place


def gloo_address() -> tuple[str, str]:
    """Find out where Gloo listens, with a group of one; return the address or the problem."""
    before = open_sockets()
    limit = timedelta(seconds=_GLOO_SECONDS)
    try:
        group = done_within(
            _GLOO_SECONDS, lambda: dist.ProcessGroupGloo(dist.HashStore(), 0, 1, limit)
        )
    except (AttributeError, RuntimeError, TimeoutError) as error:
        return "", reason_of(error).partition("\n")[0].removeprefix("ifa != nullptr. ")
    for inode, descriptor in open_sockets().items():
        if inode not in before:
            with socket.socket(fileno=os.dup(descriptor)) as end:
                return str(end.getsockname()[0]), ""
    return "", f"{group.name()} does not listen"


def _versions(backend: str) -> tuple[tuple[str, str], ...]:
    try:
        own = importlib.metadata.version("objcomm")
    except importlib.metadata.PackageNotFoundError:  # not installed, but run from a folder
        own = "unknown"
    found = {"Python": platform.python_version(), "torch": torch.__version__, "objcomm": own}
    for name in ("cuda", "hip", "xpu"):
        found[name.upper()] = str(getattr(torch.version, name, None) or "")
    if dist.is_available() and dist.is_backend_available("nccl"):
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["init's backend"] = backend
    return tuple((name, version) for name, version in found.items() if version)


def devices() -> tuple[str, ...]:
    """Return the names of this machine's accelerator devices, or their type if they have none."""
    device_type = init.accelerator_type()
    count = init.device_count(device_type) if device_type else 0
    name = getattr(torch.get_device_module(device_type), "get_device_name", None) if count else None
    return tuple(device_type if name is None else str(name(at)) for at in range(count))


def device_problem(place: Placement, backend: str) -> str:
    """Return why this rank would not get its own device with a backend; empty if it would."""
    device_type = init.accelerator_in(backend)
    try:
        if device_type:
            init.device_of(place, device_type, None)
    except UsageError as error:
        return str(error).removeprefix("init: ")
    return ""


def _shared_memory() -> int:
    try:
        return shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:
        return UNKNOWN


_TIMES = 50  # finds 92 % of the resolvers that lose one query in twenty
_LOST_SECONDS = 0.9  # a resolver asks again after a second at the earliest
_ADDRESSES_MAX = 64
_AT_ONCE = 16


def lookups(by: int, callers: Mapping[str, int], seconds: float) -> tuple[Lookup, ...]:
    """Look up the name of each address repeatedly, until one lookup is slow.

    Args:
        by: this rank.
        callers: addresses from which ranks connect to the store, with the lowest rank of each.
        seconds: how long all lookups may take.
    """
    deadline = time.monotonic() + seconds
    chosen = list(callers.items())[:_ADDRESSES_MAX]
    with ThreadPoolExecutor(_AT_ONCE, "objcomm-doctor") as pool:
        return tuple(pool.map(lambda each: _lookup(by, each[1], each[0], deadline), chosen))


def _lookup(by: int, rank: int, address: str, deadline: float) -> Lookup:
    # A store listens on IPv6 and IPv4 if the system has both.
    is_mapped = ":" not in address and socket.has_dualstack_ipv6()
    seen = f"::ffff:{address}" if is_mapped else address
    slowest, count, before = 0.0, 0, 0.0
    while count < _TIMES and slowest < SLOW_LOOKUP_SECONDS and time.monotonic() < deadline:
        began, is_lost = time.monotonic(), False
        try:
            done_within(
                deadline - began, lambda: socket.getnameinfo((seen, 0), socket.NI_NUMERICSERV)
            )
        except TimeoutError:
            is_lost = True
        except OSError:  # the name is unknown, and the store would wait as long
            pass
        took = time.monotonic() - began
        # A busy machine may wake a thread late, but not twice in a row.
        is_lost = is_lost or took >= _LOST_SECONDS
        slowest = max(slowest, took if is_lost else min(before, took))
        before = took
        count += 1
    return Lookup(by, rank, seen, slowest, count)
