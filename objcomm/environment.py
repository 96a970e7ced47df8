"""Where a launcher has put this process, from the environment variables that it has set.

Reads a mapping and nothing else: knows no torch, and starts nothing.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from objcomm.errors import UsageError

_PORT = 29500  # torchrun's own
_SLURM_PORTS = 15000  # the first of those that are derived from a job's number
_SLURM_PORT_COUNT = 10000
_STEP_STRIDE = 1009  # keeps the steps of one job, and jobs of consecutive numbers, apart


class Place(NamedTuple):
    """Where one process of a job stands.

    Attributes:
        launcher: which launcher's variables say so.
        rank: of this process.
        world_size: number of processes.
        local_rank: among the processes on this host; None where no variable tells.
        host: where rank 0 is; empty where no variable tells.
        port: where the ranks meet on that host.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    host: str
    port: int


class _Names(NamedTuple):
    """The variables of one launcher."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str


# mpirun inside of a SLURM job starts one daemon on each host, and its ranks inherit the daemon's
# SLURM variables; torchrun's ranks inherit everybody's. So SLURM is asked after them.
_LAUNCHERS = (
    _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    _Names(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
)
_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")


def place_in(environ: Mapping[str, str]) -> Place | None:
    """Read a launcher's variables; empty ones count as not set.

    Args:
        environ: as ``os.environ``.

    Returns:
        The place; None if no launcher has set anything.

    Raises:
        UsageError: a variable is missing, is no whole number, or does not fit to another one.
    """
    found = {name: value.strip() for name, value in environ.items() if value.strip()}
    for names in _LAUNCHERS:
        if names.rank in found:
            return _place(names, found)
    if _number(found, "WORLD_SIZE", 1) > 1:
        raise UsageError(
            f"init: WORLD_SIZE={found['WORLD_SIZE']} is set, but no launcher has set RANK; start "
            "the program by torchrun, srun or mpirun, or set RANK for each process"
        )
    return None


def rank_in(environ: Mapping[str, str]) -> int | None:
    """This process's rank in its job, as the first launcher says that says one.

    Args:
        environ: as ``os.environ``; empty variables count as not set.

    Raises:
        UsageError: what it says is no whole number.
    """
    return _first(environ, [names.rank for names in _LAUNCHERS])


def local_rank_in(environ: Mapping[str, str]) -> int | None:
    """The same among the processes on this host."""
    return _first(environ, [names.local_rank for names in _LAUNCHERS])


def _first(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    found = {name: environ[name].strip() for name in names if environ.get(name, "").strip()}
    return _number(found, next(iter(found))) if found else None


def _place(names: _Names, found: Mapping[str, str]) -> Place:
    rank = _number(found, names.rank)
    # A batch script may export the world's size for all, and leave ranks to the launcher.
    size_name = names.world_size if names.world_size in found else "WORLD_SIZE"
    if size_name not in found:
        raise UsageError(
            f"init: {names.rank}={rank} is set, but {names.world_size} is not; set it to the "
            "number of ranks"
        )
    world_size = _number(found, size_name)
    if not 0 <= rank < world_size:
        raise UsageError(
            f"init: {names.rank}={rank} does not lie between 0 and {size_name}={world_size} - 1; "
            "each process has a rank of its own, counted from 0"
        )
    host = _host(names, found, world_size)
    return Place(
        names.launcher, rank, world_size, _local_rank(names, found, world_size), host, _port(found)
    )


def _local_rank(names: _Names, found: Mapping[str, str], world_size: int) -> int | None:
    for each in (names, *_LAUNCHERS):
        if each.local_rank in found:
            return _number(found, each.local_rank)
    return 0 if world_size == 1 else None


def _host(names: _Names, found: Mapping[str, str], world_size: int) -> str:
    """Where rank 0 is, or an empty text."""
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
            raise UsageError(f"init: MASTER_PORT={port} is no port; set one from 1 to 65535")
        return port
    job = _number(found, "SLURM_JOB_ID", -1)
    if job < 0:
        return _PORT
    step = _number(found, "SLURM_STEP_ID", 0)
    return _SLURM_PORTS + (job + _STEP_STRIDE * step) % _SLURM_PORT_COUNT


def first_host(hosts: str, name: str) -> str:
    """The first host of SLURM's short form, such as ``node003`` of ``node[003-005,9],login1``.

    Args:
        hosts: the list.
        name: of the variable that has it, for the error.

    Raises:
        UsageError: it is no such list.
    """
    # A comma within brackets separates no hosts.
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts)
    end = len(first[0]) if first else 0
    if first is None or hosts[end : end + 1] not in {"", ","}:
        raise UsageError(
            f"init: {name}={hosts!r} is no list of hosts; set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first[0])


def _number(found: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = found.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"{name}={text!r} is no whole number; set it to one") from None
