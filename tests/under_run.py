"""How programs end with and without ``python -m objcomm.run``, and what it reports about them."""

import sys

from tests.doctor.job import Said, by_command

RUN = ("-m", "objcomm.run")
_TOLD = "objcomm.run: "


def python(*words: str, **variables: str) -> Said:
    """Run a program with Python, and return how it ends."""
    return by_command([sys.executable, *words], variables)


def torchrun(size: int, *words: str) -> Said:
    """Run a program with torchrun, and return how its ranks end."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
    return python(*launcher, *words)


def reported(said: Said) -> list[str]:
    """List the lines from objcomm.run."""
    lines = said.err.splitlines()
    return [line.removeprefix(_TOLD) for line in lines if line.startswith(_TOLD)]


def own(said: Said) -> str:
    """Return what the program itself writes to standard error."""
    return "".join(
        line for line in said.err.splitlines(keepends=True) if not line.startswith(_TOLD)
    )
