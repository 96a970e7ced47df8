"""Find out where this process runs, from a launcher's variables and from the kernel.

Reads the environment and the kernel's files. Does not use torch, and starts nothing.
"""

import contextlib
import ipaddress
import os
import re
import socket
import struct
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from objcomm.errors import UsageError

#: A command that starts a program on one host, for error messages.
EXAMPLE = "torchrun --nproc-per-node=4 train.py"

#: For each launcher, a command that starts a program and tells its ranks the host of rank 0.
WITH_ADDRESS = {
    "torchrun": EXAMPLE,  # torchrun sets the address, so torchrun was not used
    "Open MPI": "mpirun -x MASTER_ADDR=HOST ...",
    "PMI": "mpirun -genv MASTER_ADDR HOST ...",
    "SLURM": "MASTER_ADDR=HOST srun ...",
    "jsrun": "jsrun -E MASTER_ADDR=HOST ...",
}

_PORT = 29500  # torchrun's default
_SLURM_PORTS = 15000  # the first of the ports derived from a job's number
_SLURM_PORT_COUNT = 10000
_STEP_STRIDE = 1009  # gives the steps of one job, and consecutive jobs, different ports
_IS_INVENTED = 1 << 40  # the multicast bit, RFC 9562 section 6.10

# From Linux' netdevice(7): an address and the name of its interface.
_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s24s")
_MOST_ADDRESSES = 1024


class Placement(NamedTuple):
    """The position of one process in a job.

    Attributes:
        launcher: the launcher whose variables were read.
        rank: rank of this process.
        world_size: number of processes.
        local_rank: rank among the processes on this host; None if no variable gives it.
        host: the host of rank 0; empty if no variable gives it.
        port: the port on that host where the ranks meet.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    host: str
    port: int

    @property
    def named_by(self) -> str:
        """What has set the world size, for errors about a missing address.

        Torchrun always sets an address; if there is none, something else has set its variables.
        """
        return "WORLD_SIZE" if self.launcher == "torchrun" else self.launcher

    @property
    def address(self) -> str:
        """``host:port`` where the ranks meet, with an IPv6 address in brackets."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class Unjoined(NamedTuple):
    """What a launcher's variables say about a process that has not joined the other ranks.

    Attributes:
        rank: rank of this process: 0 if no variable says that there are others, -1 if unknown.
        world_size: number of processes.
        promise: the variable that says that there are other ranks, such as ``WORLD_SIZE=4``; empty
            if there is none.
    """

    rank: int
    world_size: int
    promise: str


class _Names(NamedTuple):
    """The variables of one launcher; the first of ``world_sizes`` that is set counts."""

    launcher: str
    rank: str
    world_sizes: tuple[str, ...]
    local_rank: str
    local_size: str


# mpirun in a SLURM job starts one daemon on each host, and its ranks inherit the daemon's SLURM
# variables; torchrun's ranks inherit those of any launcher. So SLURM comes after MPI, and torchrun
# comes first.
_LAUNCHERS = (
    _Names("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names("PMI", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names(
        "SLURM",
        "SLURM_PROCID",
        # In a shell opened by salloc, SLURM_NTASKS is the allocation's, but the step has one task.
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
    ),
    _Names(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        ("JSM_NAMESPACE_SIZE",),
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
)
_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")


_SIZES_WITHOUT_RANK = tuple(each.world_sizes[0] for each in _LAUNCHERS if each.launcher != "SLURM")
_SIZES = tuple(name.encode() for each in _LAUNCHERS for name in each.world_sizes)


def tells_no_size() -> bool:
    """Whether no launcher has set the number of ranks for this process.

    Every call asks this. It takes 4 µs, half as long as ``unjoined_in``, because raw names need no
    decoding.
    """
    environ = getattr(os, "environb", None)  # some systems lack it
    return environ is not None and not any(name in environ for name in _SIZES)


def has_agent_store(environ: Mapping[str, str]) -> bool:
    """Whether torchrun hosts the store in which ranks meet, so that no rank needs to create it."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def placement_in(environ: Mapping[str, str]) -> Placement | None:
    """Read a launcher's variables. Empty ones count as not set.

    Args:
        environ: a mapping like ``os.environ``.

    Returns:
        The placement; None if no launcher has set anything.

    Raises:
        UsageError: a variable is missing, is not an integer, or contradicts another one.
    """
    found = {name: value.strip() for name, value in environ.items() if value.strip()}
    names = _launcher_in(found)
    if names is not None:
        return _place(names, found)
    for each in _LAUNCHERS:
        name = _promise_of(each, found)
        if name:
            raise UsageError(
                f"init: {name}={found[name]} is set, but no launcher has set {each.rank}; start "
                f"the program with torchrun, srun or mpirun ({EXAMPLE}), or set {each.rank} for "
                "each process"
            )
    return None


def _promise_of(names: _Names, found: Mapping[str, str]) -> str:
    """Return a launcher's variable that says that there are other ranks, if no rank is set."""
    if names.launcher == "SLURM":  # it also sets the size in an allocation's shell
        return ""
    size = names.world_sizes[0]
    if _number(found, size, 1) > 1:
        return size
    return names.local_rank if _readable(found, names.local_rank, 0) > 0 else ""


def unjoined_in(environ: Mapping[str, str]) -> Unjoined:
    """Read a launcher's variables without raising errors; unreadable ones count as not set.

    Args:
        environ: a mapping like ``os.environ``; empty variables count as not set.
    """
    names = _launcher_in(environ)
    sizes = _SIZES_WITHOUT_RANK if names is None else names.world_sizes
    name = next((each for each in sizes if _text(environ, each)), "WORLD_SIZE")
    world_size = _readable(environ, name, 1)
    if world_size <= 1:
        return Unjoined(0, 1, "")
    rank = -1 if names is None else _readable(environ, names.rank, -1)
    return Unjoined(rank if rank < world_size else -1, world_size, f"{name}={world_size}")


def rank_in(environ: Mapping[str, str]) -> int | None:
    """Return this process's rank in its job, from the first launcher that has set one.

    Args:
        environ: a mapping like ``os.environ``; empty variables count as not set.

    Raises:
        UsageError: the variable is not an integer.
    """
    return _first(environ, [names.rank for names in _LAUNCHERS])


def local_rank_in(environ: Mapping[str, str]) -> int | None:
    """Return this process's rank on its host, from the first launcher that has set one."""
    return _first(environ, [names.local_rank for names in _LAUNCHERS])


def has_own_core(ranks: int, environ: Mapping[str, str]) -> bool:
    """Whether each rank of this host has its own core, according to the launcher and the system.

    Args:
        ranks: number of ranks known to be on this host; the launcher may have started more.
        environ: a mapping like ``os.environ``.
    """
    launched = max(_readable(environ, each.local_size, 0) for each in _LAUNCHERS)
    cores: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # "max", or no such file: there is no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    return max(ranks, launched) <= cores


def _first(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    found = {name: environ[name].strip() for name in names if environ.get(name, "").strip()}
    return _number(found, next(iter(found))) if found else None


def _launcher_in(environ: Mapping[str, str]) -> _Names | None:
    """Return the first launcher that has given this process a rank."""
    for names in _LAUNCHERS:
        if _text(environ, names.rank) and not (
            names.launcher == "SLURM" and _is_batch_script(environ)
        ):
            return names
    return None


def _is_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this is a job's batch script, which has a rank although it runs only once."""
    return bool(_text(environ, "SLURM_SUBMIT_DIR")) and not any(
        _text(environ, name) for name in _STEP_VARIABLES
    )


def _text(environ: Mapping[str, str], name: str) -> str:
    return environ[name].strip() if name in environ else ""


def _readable(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(_text(environ, name))
    except ValueError:
        return default


def _place(names: _Names, found: Mapping[str, str]) -> Placement:
    rank = _number(found, names.rank)
    # A batch script may export the world size, and leave the ranks to the launcher.
    size_name = next((each for each in names.world_sizes if each in found), "WORLD_SIZE")
    if size_name not in found:
        raise UsageError(
            f"init: {names.rank}={rank} is set, but {names.world_sizes[-1]} is not; set it to the "
            f"number of ranks, or let a launcher set both: {EXAMPLE}"
        )
    world_size = _number(found, size_name)
    if not 0 <= rank < world_size:
        raise UsageError(
            f"init: {names.rank}={rank} is not between 0 and {size_name}={world_size} - 1; "
            "each process has its own rank, counted from 0"
        )
    host = _host(names, found, world_size)
    local_rank = _first(found, [each.local_rank for each in (names, *_LAUNCHERS)])
    if local_rank is None and world_size == 1:
        local_rank = 0
    return Placement(names.launcher, rank, world_size, local_rank, host, _port(found))


def _host(names: _Names, found: Mapping[str, str], world_size: int) -> str:
    """Return the host of rank 0, or an empty string if unknown."""
    if "MASTER_ADDR" in found:
        return found["MASTER_ADDR"]
    if names.launcher != "torchrun":
        for name in _NODELISTS:
            if name in found:
                return first_host(found[name], name)
    is_on_one_host = names.local_size in found and found[names.local_size] == str(world_size)
    return "127.0.0.1" if is_on_one_host or world_size == 1 else ""


def _port(found: Mapping[str, str]) -> int:
    if "MASTER_PORT" in found:
        port = _number(found, "MASTER_PORT")
        if not 0 < port < 1 << 16:
            raise UsageError(f"init: MASTER_PORT={port} is not a port; set one from 1 to 65535")
        return port
    job = _number(found, "SLURM_JOB_ID", -1)
    if job < 0:
        return _PORT
    step = _number(found, "SLURM_STEP_ID", 0)
    return _SLURM_PORTS + (job + _STEP_STRIDE * step) % _SLURM_PORT_COUNT


def first_host(hosts: str, name: str) -> str:
    """Return the first host of a SLURM list: ``node003`` for ``node[003-005,9],login1``.

    Args:
        hosts: the list.
        name: the variable that contains it, for the error.

    Raises:
        UsageError: it is not such a list.
    """
    # A comma within brackets does not separate hosts.
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts)
    end = len(first[0]) if first else 0
    if first is None or hosts[end : end + 1] not in {"", ","}:
        raise UsageError(
            f"init: {name}={hosts!r} is not a list of hosts; set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first[0])


def _number(found: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = found.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"{name}={text!r} is not an integer; set it to one") from None


def machine() -> str:
    """Return a name that two processes share only if they are on the same host.

    Containers with different host names, networks or shared memory count as different hosts, even
    on one machine. So do machines with the same host name, because each boot has its own id.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        rooms = [namespace(each) for each in ("ipc", "net")]
    except OSError:  # not Linux, or a sandbox
        # Without a network card, getnode() returns a random number per process, marked as such.
        node = uuid.getnode()
        boot, rooms = "", [] if node & _IS_INVENTED else [node]
    return "/".join((socket.gethostname(), boot, *map(str, rooms)))


def system() -> str:
    """Return Python's name for the operating system: ``"linux"``, or ``"darwin"`` for macOS."""
    return sys.platform


def namespace(kind: str) -> int:
    """Return the number of this process's Linux namespace of a kind, such as ``"net"``.

    Raises:
        OSError: the system has no such namespaces.
    """
    return Path(f"/proc/self/ns/{kind}").stat().st_ino


def interface_addresses() -> dict[str, list[str]]:
    """Return this host's addresses by interface, IPv4 first, as getifaddrs does; Linux only."""
    import ctypes  # noqa: PLC0415  # rarely needed
    import fcntl  # noqa: PLC0415  # absent on Windows

    found: dict[str, list[str]] = {}
    room = bytearray(_MOST_ADDRESSES * _IFREQ.size)
    at = ctypes.addressof((ctypes.c_char * len(room)).from_buffer(room))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker, _SIOCGIFCONF, struct.pack("iL", len(room), at))
        nbytes = struct.unpack("iL", answer)[0]
        for raw_name, raw in _IFREQ.iter_unpack(bytes(room[:nbytes])):
            name = raw_name.split(b"\0")[0].decode().partition(":")[0]  # eth0:1 is an alias
            found.setdefault(name, []).append(socket.inet_ntoa(raw[4:8]))
    with contextlib.suppress(OSError):  # no IPv6
        for line in Path("/proc/self/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, _, _, name = line.split()
            address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
            found.setdefault(name, []).append(address)
    return found
