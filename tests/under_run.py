"""How programs end, under ``python -m objcomm.run`` or without it, and what it says of them."""

import sys

from tests.doctor.job import Said, by_command

RUN = ("-m", "objcomm.run")
_TOLD = "objcomm.run: "


def python(*words: str, **variables: str) -> Said:
    """How a program ends that Python runs."""
    return by_command([sys.executable, *words], **variables)


def torchrun(size: int, *words: str) -> Said:
    """How ranks end that torchrun starts."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
    return python(*launcher, *words)


def told(said: Said) -> list[str]:
    """What objcomm.run says."""
    lines = said.err.splitlines()
    return [line.removeprefix(_TOLD) for line in lines if line.startswith(_TOLD)]


def own(said: Said) -> str:
    """What the program itself writes to standard error."""
    return "".join(
        line for line in said.err.splitlines(keepends=True) if not line.startswith(_TOLD)
    )
