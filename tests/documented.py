"""The documentation's blocks and docstrings, and how one of them is run on ranks.

The ranks' processes import this, and each serves one block: it imports little.
"""

import doctest
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tests.workers import here, join

__all__ = ["Block", "blocks", "run_block", "run_examples"]

_ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```python(?P<tags>[^\n]*)\n(?P<source>.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """One fenced block: where it stands, and on how many ranks it runs; 0 means alone.

    ``launcher=torchrun`` sets torchrun's variables, which some libraries ask for.
    """

    where: str
    ranks: int
    source: str
    is_launched: bool


def blocks() -> Iterator[Block]:
    """Each block of README.md, CONTRIBUTING.md and docs/ that is tagged as Python."""
    tops = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md"]
    for path in [*tops, *sorted((_ROOT / "docs").rglob("*.md"))]:
        text = path.read_text() if path.exists() else ""
        for found in _FENCE.finditer(text):
            line = text[: found.start()].count("\n") + 1
            ranks = re.search(r"ranks=(\d+)", found["tags"])
            where = f"{path.relative_to(_ROOT)}:{line}"
            is_launched = "launcher=torchrun" in found["tags"]
            yield Block(where, int(ranks[1]) if ranks else 0, found["source"], is_launched)


def run_block(where: str, source: str, folder: str, *, is_launched: bool = False) -> None:
    """Run a block as a script of its own, in a folder that it may write to."""
    os.chdir(folder)
    if is_launched:
        os.environ.update(LOCAL_RANK=str(here().rank), OMP_NUM_THREADS="1")
    if here().world_size > 1:
        join(here(), "docs")
        # A block may show how a script starts; it finds that done.
        dist.init_process_group = lambda *_, **__: None
    exec(compile(source, where, "exec"), {"__name__": "__main__"})  # noqa: S102  # what it is for


def run_examples(name: str) -> None:
    """Run the examples in the docstrings of a module."""
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0
