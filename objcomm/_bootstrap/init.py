"""Join the ranks of a job, and leave them.

Knows the calls that start and end torch.distributed, and the default backend and device of a rank.
``_environment`` knows the variables of launchers.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from objcomm._algorithms.device import own_types
from objcomm._calls.group import resolve
from objcomm._config import DeviceLike, Timeout, environment_check, seconds_of, settings
from objcomm._environment import (
    EXAMPLE,
    WITH_ADDRESS,
    Placement,
    has_agent_store,
    local_rank_in,
    placement_in,
    system,
)
from objcomm._failures.watchdog import audited
from objcomm._observe.history import call_site
from objcomm._observe.log import log
from objcomm._transport.rendezvous import (
    REPORTED_AFTER_SECONDS,
    GivenUpError,
    MeetingState,
    await_all,
    call_the_roll,
    meet,
)
from objcomm._transport.threads import done_within
from objcomm._wire.signing import environment_secret
from objcomm._world import is_initialized, is_reachable, refuse_worker, store_of, timeout_of
from objcomm.errors import StartError, UsageError, ranks_text


def accelerator_type() -> str:
    """Return torch's name for this machine's accelerator, such as ``"cuda"``; empty if none."""
    try:
        found = torch.accelerator.current_accelerator(check_available=True)
    except (AttributeError, RuntimeError):  # its module was not imported, or can't answer
        return ""
    return "" if found is None else found.type


def default_backend() -> str:
    """Return Gloo, plus torch's backend for this machine's accelerator if there is one."""
    device_type = accelerator_type()
    name = dist.Backend.default_device_backend_map.get(device_type, "gloo")
    # "fake" moves nothing; torch's own tests use it in place of an absent backend.
    is_own = name not in {"gloo", "fake"} and dist.is_backend_available(name)
    return f"cpu:gloo,{device_type}:{name}" if is_own else "gloo"


def backends_in(backend: str) -> dict[str, str]:
    """Parse a backend argument, in any notation, into backends by type of device."""
    parts: dict[str, str] = {}
    for part in filter(None, backend.lower().split(",")):
        device, _, name = part.rpartition(":")
        # Torch has the same default for a backend that it does not know.
        served = dist.Backend.backend_capability.get(name, ["cpu", "cuda"])
        parts |= dict.fromkeys([device] if device else served, name)
    return parts


def accelerator_in(backend: str) -> str:
    """Return the type of device whose tensors use a separate backend; empty if there is none.

    If there are several, this machine's accelerator, or else the first by name.
    """
    own = own_types(backends_in(backend))
    here = accelerator_type()
    return here if here in own else next(iter(own), "")


def check_backend(backend: str) -> None:
    """Check that this torch has a backend and can use it on this system.

    Raises:
        UsageError: it does not have it, or can't use it.
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
        if name == "gloo" and system() != "linux":
            try:
                dist.ProcessGroupGloo.create_default_device()
            except RuntimeError as error:
                raise UsageError(
                    f"init: backend={backend!r}, but torch's Gloo can't be used on this system "
                    f"({system()!r}: {error}); run several ranks on Linux, or start the program "
                    "without a launcher: a world of one needs no backend"
                ) from error


#: Variables with which a launcher restricts each process to its own devices.
SHOWN_BY = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "hpu": ("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "xpu": ("ZE_AFFINITY_MASK",),
}


def device_count(device_type: str) -> int:
    """Return how many devices of a type this process sees; 0 if torch has no such type."""
    try:
        return int(torch.get_device_module(device_type).device_count())
    except (AttributeError, RuntimeError):  # its module was not imported, or can't count
        return 0


def device_of(place: Placement, device_type: str, device: DeviceLike) -> torch.device:
    """Return this rank's device of a type.

    Args:
        place: the placement of this rank.
        device_type: such as ``"cuda"``.
        device: the caller's choice, if any.

    Raises:
        UsageError: the local rank is unknown, or there are too few devices.
    """
    count = device_count(device_type)
    if device is not None:
        if isinstance(device, int):
            return torch.device(device_type, device)
        return torch.device(device)
    if place.local_rank is None:
        raise UsageError(
            "init: no variable says which of this host's ranks this is; set LOCAL_RANK, counted "
            "from 0 on each host, or give device="
        )
    if place.local_rank < count:
        return torch.device(device_type, place.local_rank)
    shown_by = SHOWN_BY.get(device_type, (f"{device_type.upper()}_VISIBLE_DEVICES",))
    if count == 1 and any(map(os.environ.get, shown_by)):
        return torch.device(device_type, 0)
    raise UsageError(
        f"init: this is rank {place.local_rank} of this host, which has {count} {device_type} "
        "devices; start no more ranks than devices on each host (torchrun --nproc-per-node, srun "
        f"--ntasks-per-node), check {' and '.join(shown_by)}, or use backend='gloo'"
    )


def make_current(device: torch.device) -> None:
    """Make a device the current one of its type on this thread."""
    if device.index is None:
        return
    if device.type == accelerator_type():
        torch.accelerator.set_device_index(device.index)
    else:  # torch's generic functions support only one accelerator
        torch.get_device_module(device).set_device(device.index)


def current_device(device_type: str) -> torch.device:
    """Return the current device of a type on this thread."""
    if device_type == accelerator_type():
        return torch.device(device_type, torch.accelerator.current_device_index())
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


_SPEECHBRAIN_TIMEOUT_SECONDS = 7200.0

# By what factor torch may exceed its timeout before we give up on it; its own error is more
# informative than ours.
_LONGER = 1.2
# How often a rank tries to reach the store.
_KNOCK_SECONDS = 0.05
# torch stores timeouts in milliseconds.
_STORED_SECONDS = 1e-3

# The part of the store in which ranks meet, as init_process_group names it.
_OF_TORCH = "default_pg"

# A key in torchrun's store, set once all ranks have joined.
_HAVE_JOINED = "objcomm/have joined"


@dataclass(frozen=True)
class Start:
    """What ``init`` found and chose.

    Attributes:
        launcher: the launcher whose variables were read: ``"torchrun"``, ``"Open MPI"``, ``"PMI"``,
            ``"SLURM"`` or ``"jsrun"``; ``"program"`` if torch.distributed was already initialized;
            empty if there is no launcher, and so nothing was initialized.
        rank: this process's rank.
        world_size: number of ranks.
        local_rank: rank on this host; None if no variable gives it.
        backend: the backend as passed to torch; empty if nothing was initialized.
        device: this rank's device: the accelerator that was made current, or the CPU.
        address: ``host:port`` where the ranks met; empty if they met elsewhere or not at all.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    backend: str
    device: torch.device
    address: str

    def __str__(self) -> str:
        if not self.launcher:
            return (
                "no launcher: a world of one, torch.distributed stays uninitialized; to start "
                f"several ranks: {EXAMPLE}"
            )
        local = "" if self.local_rank is None else f" (local rank {self.local_rank})"
        place = f", meeting at {self.address}" if self.address else ""
        return (
            f"rank {self.rank} of {self.world_size}{local} by {self.launcher}, "
            f"backend {self.backend}, device {self.device}{place}"
        )


def init(
    backend: str | None = None,
    *,
    timeout: Timeout = None,
    device: DeviceLike = None,
) -> Start:
    """Join the ranks that a launcher has started, and initialize torch.distributed.

    Every rank of the job must call this. It returns when all ranks have joined and have established
    objcomm's own connections, which from then on detect the death of a rank. It reads the variables
    of torchrun, Open MPI, PMI (MPICH, Intel MPI), SLURM and jsrun, in this order, and does not
    change them. Ranks meet at ``MASTER_ADDR`` and ``MASTER_PORT``. The default address is the first
    host of SLURM's list, or this host if it has all ranks. The default port is derived from SLURM's
    job and step; without SLURM it is 29500.

    Without any launcher's variables, nothing is initialized: the program is a world of one, in
    which every function of objcomm works. If torch.distributed is already initialized, nothing
    changes, and the arguments must match its settings.

    Args:
        backend: as for ``init_process_group``. Defaults to Gloo together with torch's backend for
            this machine's accelerator, such as ``cpu:gloo,cuda:nccl`` or ``cpu:gloo,xpu:xccl``, or
            to ``gloo`` if there is no accelerator.
        timeout: seconds or timedelta for the ranks to meet, and for operations of the group;
            defaults to torch's own.
        device: this rank's accelerator; it becomes the current device if the backend includes a
            separate one for devices of this type. Defaults to the device whose index is this rank's
            local rank, or to the only visible one if ``CUDA_VISIBLE_DEVICES`` or a similar variable
            shows each rank its own.

    Returns:
        What was found and chosen. This is also logged as INFO. If a script runs alone in a
        terminal, it is logged as WARNING, which Python shows by default, because it says how to
        start several ranks.

    Raises:
        UsageError: a variable is missing or wrong, and the error names it; a backend is not
            available; there are too few devices; the program has initialized torch.distributed with
            another backend, timeout or current device; or this process is a DataLoader worker.
            Raised in the process concerned, before it meets other ranks.
        StartError: the ranks could not meet. Raised on every rank that tried.

    Examples:
        >>> import objcomm
        >>> objcomm.init().world_size
        1
    """
    limit = None if timeout is None else timedelta(seconds=seconds_of("init", timeout))
    if is_initialized():
        refuse_worker("init", dist.get_rank())
        start = _as_it_is(backend, limit, device)
    else:
        place = placement_in(os.environ)
        if place is not None:
            refuse_worker("init", place.rank)
        alone = Start("", 0, 1, 0, "", torch.device("cpu"), "")
        start = alone if place is None else _joined(place, backend, limit, device)
    is_news = not start.launcher and _is_a_script_at_a_terminal()
    log.log(logging.WARNING if is_news else logging.INFO, "%s", start)
    return start


def _is_a_script_at_a_terminal() -> bool:
    """Whether a user has run ``python train.py`` in a terminal; not in a notebook, test or job."""
    is_read = sys.stderr is not None and sys.stderr.isatty()
    return is_read and hasattr(sys.modules["__main__"], "__file__")


def _connect(limit: timedelta | None) -> None:
    """Establish objcomm's own connections from the start, because they detect ranks that die."""
    whole = resolve(None)
    if whole.size > 1:
        whole.join("init", whole.deadline("init", limit), call_site())


def shutdown() -> None:
    """Leave the other ranks: close objcomm's connections and destroy torch.distributed's groups.

    This does not wait for other ranks, so it may be called in a ``finally`` block, and a rank may
    leave after an error while others still compute. It does nothing if called twice or if nothing
    was initialized. Afterwards, ``init`` may be called again if all ranks do so. In a process that
    a rank has forked, it leaves that rank's groups alone.

    Raises:
        DesyncError: another rank made different calls than this one, which becomes apparent only
            now that there are no more calls. Raised on this rank, unless another error is
            propagating; the rank has left in any case.

    Examples:
        >>> import objcomm
        >>> objcomm.shutdown()
    """
    # A forked process lacks the threads of torch's groups; destroying the groups there crashes.
    if is_initialized() and not resolve(None).is_of_the_parent:
        with audited(f"objcomm.shutdown at {call_site()}"):
            dist.destroy_process_group()


def ddp_init_group(run_opts: Mapping[str, Any]) -> Start:
    """Call ``init`` with the arguments of SpeechBrain's function of this name.

    Every rank of the job must call this. It works with any launcher, whereas SpeechBrain's function
    needs ``RANK`` and ``LOCAL_RANK`` and otherwise returns silently.

    Args:
        run_opts: SpeechBrain's run options. ``distributed_backend`` is used, and ``device`` if it
            is an accelerator with an index; others are ignored.

    Returns:
        As in ``init``.

    Raises:
        UsageError: as in ``init``, on the same ranks.
        StartError: as in ``init``, on the same ranks.

    Examples:
        >>> from objcomm.compat.speechbrain import ddp_init_group
        >>> ddp_init_group({"distributed_backend": "gloo"}).world_size
        1
    """
    device = torch.device(run_opts.get("device") or "cpu")
    return init(
        run_opts.get("distributed_backend"),
        timeout=None if is_initialized() else _SPEECHBRAIN_TIMEOUT_SECONDS,
        device=device if device.type != "cpu" and device.index is not None else None,
    )


def _as_it_is(backend: str | None, limit: timedelta | None, device: DeviceLike) -> Start:
    """Check the arguments against torch.distributed as the program has initialized it."""
    current = str(dist.get_backend_config())
    wanted, there = backends_in(backend or ""), backends_in(current)
    if any(there.get(each, name) != name for each, name in wanted.items()):
        raise UsageError(
            f"init: backend={backend!r}, but torch.distributed is initialized with {current!r}; "
            "leave backend out"
        )
    own_seconds = timeout_of(dist.group.WORLD)
    if limit is not None and abs(limit.total_seconds() - own_seconds) >= _STORED_SECONDS:
        raise UsageError(
            f"init: timeout={limit.total_seconds():g} s, but torch.distributed is initialized with "
            f"{own_seconds:g} s; set it there, or pass timeout= to the calls"
        )
    device_type = accelerator_in(current)
    own = current_device(device_type) if device_type else torch.device("cpu")
    if device is not None:
        asked = torch.device(own.type, device) if isinstance(device, int) else torch.device(device)
        if asked.type != own.type or asked.index not in {None, own.index}:
            raise UsageError(
                f"init: device={device!r}, but torch.distributed is initialized and the current "
                f"device is {str(own)!r}; leave device out"
            )
    local_rank = local_rank_in(os.environ)
    return Start("program", dist.get_rank(), dist.get_world_size(), local_rank, current, own, "")


def _joined(
    place: Placement,
    backend: str | None,
    limit: timedelta | None,
    device: DeviceLike,
) -> Start:
    if not place.host:
        raise UsageError(
            f"init: {place.named_by} names {place.world_size} ranks, but MASTER_ADDR is not "
            "set; set it to the host of rank 0, the same on every rank: "
            f"{WITH_ADDRESS[place.launcher]}"
        )
    if not dist.is_available():
        raise UsageError(f"init: {place.world_size} ranks, but this torch has no distributed")
    chosen = backend or default_backend()
    check_backend(chosen)
    device_type = accelerator_in(chosen)
    own = device_of(place, device_type, device) if device_type else torch.device("cpu")
    if own.type != "cpu":
        make_current(own)
    chosen_now = settings()  # a wrong variable must fail here, before this rank meets others
    _ = chosen_now.chosen_transport, chosen_now.chosen_ports, environment_check()
    environment_secret()
    try:
        agents = has_agent_store(os.environ)
        store = _store(place, limit, is_agents=agents)
        fresh = _fresh_part(store, place) if agents else dist.PrefixStore(_OF_TORCH, store)
        _call_the_roll(fresh, place, store.timeout.total_seconds())  # type: ignore[attr-defined]  # not in torch's stub
        dist.init_process_group(
            chosen, store=fresh, timeout=limit, rank=place.rank, world_size=place.world_size
        )
        world = dist.group.WORLD
        if world is not None and is_reachable(None):
            _connect(limit)
            # A rank that left earlier would close connections that others are still establishing.
            await_all(store_of(world), place.world_size)
        if agents:
            store.set(_HAVE_JOINED, "")
    except (RuntimeError, ValueError, TimeoutError) as error:
        shutdown()
        if isinstance(error, StartError):
            raise
        raise StartError(place.rank, place.world_size, place.address, str(error)) from error
    return Start(
        place.launcher, place.rank, place.world_size, place.local_rank, chosen, own, place.address
    )


# The return type is quoted for a torch that was built without distributed.
def _store(place: Placement, limit: timedelta | None, *, is_agents: bool) -> "dist.Store":
    """Connect to the store where ranks meet: torchrun's, which serves all attempts, or rank 0's.

    Raises:
        StartError: the store is on rank 0, which can't be reached.
    """
    from torch.distributed.constants import default_pg_timeout  # noqa: PLC0415  # needs distributed

    timeout = limit or default_pg_timeout
    is_host = place.rank == 0 and not is_agents

    def make() -> dist.Store:
        return dist.TCPStore(
            place.host,
            place.port,
            place.world_size,
            is_master=is_host,
            timeout=timeout,
            wait_for_workers=False,  # torch only counts workers; the roll call names them
            multi_tenant=not is_agents,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )

    try:
        _await_host(place, timeout.total_seconds(), is_host=is_host)
        # Torch (2.13) waits forever for another program that listens there and never answers.
        return done_within(_LONGER * timeout.total_seconds(), make)
    except (RuntimeError, TimeoutError) as error:
        if place.rank == 0 or is_agents:
            raise
        reason = f"rank 0, where all ranks meet, has not started or can't be reached ({error})"
        raise StartError(place.rank, place.world_size, place.address, reason, (0,)) from error


def _await_host(place: Placement, seconds: float, *, is_host: bool) -> None:
    """Wait until the store's address accepts connections; on its host, only resolve the name.

    Torch's store would wait in C++, where Ctrl-C does not end it, and its error is a page of
    frames.

    Raises:
        TimeoutError: the address does not accept connections.
    """
    began = time.monotonic()
    is_reported = False
    while True:
        left = began + seconds - time.monotonic()
        try:
            if is_host:  # torch connects to its own store by this name
                socket.getaddrinfo(place.host, place.port)
            else:
                limit = min(max(left, 0.1), 1.0)
                socket.create_connection((place.host, place.port), limit).close()
        except socket.gaierror as error:
            why = f"the name {place.host!r} can't be resolved: {error.strerror}"
        except OSError as error:
            why = f"nothing answers there: {error.strerror or error}"
        else:
            return
        if left <= 0:
            raise TimeoutError(why)
        if not is_reported and time.monotonic() > began + REPORTED_AFTER_SECONDS:
            is_reported = True
            log.warning(
                "init: rank %d is still waiting for rank 0 at %s:%d; %s",
                *(place.rank, place.host, place.port, why),
            )
        time.sleep(min(max(left, 0), _KNOCK_SECONDS))


def _call_the_roll(part: "dist.Store", place: Placement, seconds: float) -> None:
    """Wait until all ranks have arrived at a part of the store.

    Raises:
        StartError: some have not arrived.
    """
    turn = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    missing = call_the_roll(part, place.rank, place.world_size, seconds, turn)
    if missing:
        here = [rank for rank in range(place.world_size) if rank not in missing]
        come = f"{ranks_text(here)} {'has' if len(here) == 1 else 'have'}"
        have = "has" if len(missing) == 1 else "have"
        reason = f"{ranks_text(missing)} {have} not arrived within {seconds:g} s, {come}"
        # The error that the program may be handling while it calls ``init`` is not the reason.
        raise StartError(place.rank, place.world_size, place.address, reason, missing) from None


def _fresh_part(store: "dist.Store", place: Placement) -> "dist.Store":
    """Return the part of the store in which torch's ranks meet, or a new one if they met before.

    Gloo stores the addresses of ranks there and never removes them, so ranks that join again would
    connect to old addresses.

    Raises:
        TimeoutError: some ranks have not arrived.
    """
    if place.world_size == 1 or not store.check([_HAVE_JOINED]):
        return dist.PrefixStore(_OF_TORCH, store)
    meeting = MeetingState(place.rank, tuple(range(place.world_size)))
    seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]  # not in torch's stub
    timer = threading.Timer(seconds, setattr, (meeting, "is_over", True))
    timer.daemon = True
    timer.start()
    try:
        meet(dist.PrefixStore(_HAVE_JOINED, store), place.rank, place.world_size, meeting)
    except GivenUpError:
        raise TimeoutError(f"not all ranks have arrived within {seconds:g} s") from None
    finally:
        timer.cancel()
    return dist.PrefixStore(meeting.nonce, store)
