"""The facts that a figure depends on: processor, memory and versions. Names no host or path."""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import objcomm

_PACKAGES = ("torch", "numpy", "cloudpickle", "msgpack", "mpi4py")
_GIB = 1 << 30


def about(*, mpi: bool) -> dict[str, str]:
    """Return the facts in the report's order; ``mpi`` says whether mpi4py is measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "objcomm": objcomm.__version__,
        **{package: _version(package) for package in _PACKAGES},
        "MPI": mpi_library() if mpi else "absent: no mpiexec that works with mpi4py",
    }


def mpi_library() -> str:
    """Return name and version of the MPI that mpi4py loads, found out in another process."""
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    asked = subprocess.run(  # noqa: S603
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return short_mpi_name(asked.stdout)


def short_mpi_name(library_version: str) -> str:
    """Return only name and number, because the full text may name the host that built it."""
    first_line = " ".join(library_version.split("\n", 1)[0].replace("Version:", "").split())
    found = re.match(r"[^,(\[]*?\d+(\.\d+)+", first_line)
    return found.group() if found else "unknown"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    return named.group(1) if named else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
