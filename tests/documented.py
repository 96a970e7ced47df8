"""The code blocks and docstrings of the documentation, and how to run one of them on ranks.

The ranks' processes import this module, and each runs one block, so it imports little.
"""

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

import objcomm
from tests.workers import here, join

__all__ = ["Block", "blocks", "documented_modules", "examples", "run_block", "run_examples"]

_ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```python(?P<tags>[^\n]*)\n(?P<source>.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """One fenced block: where it is, and how many ranks run it; 0 means without ranks.

    ``launcher=torchrun`` sets torchrun's variables, which some libraries require.
    """

    where: str
    ranks: int
    source: str
    is_launched: bool


def blocks() -> Iterator[Block]:
    """Yield each block of README.md, CONTRIBUTING.md and docs/ that is tagged as Python."""
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
    """Run a block as a script, in a folder that it may write to."""
    os.chdir(folder)
    if is_launched:
        os.environ.update(LOCAL_RANK=str(here().rank), OMP_NUM_THREADS="1")
    if here().world_size > 1:
        join(here(), "docs")
        # A block may show how a script starts; that is already done here.
        dist.init_process_group = lambda *_, **__: None
    exec(compile(source, where, "exec"), {"__name__": "__main__"})  # noqa: S102  # its purpose


def examples(name: str) -> list[doctest.DocTest]:
    """Return the docstrings of a module that have examples.

    Public classes and functions give ``objcomm`` as their module, so doctest would take them for
    imported ones; this reads from the source which ones the module defines.
    """
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder()
    found = finder.find(module)
    if name == "objcomm":  # its members appear to be defined there
        found = [test for test in found if test.name == name]
    body = ast.parse(inspect.getsource(module)).body
    definitions = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for own in sorted({node.name for node in definitions}):
        member = getattr(module, own)
        if member.__module__ == "objcomm":
            found += finder.find(member, f"{name}.{own}", module=False, globs=vars(module))
    return [test for test in found if test.examples]


def documented_modules() -> list[str]:
    """List the modules whose docstrings have examples."""
    found = [each.name for each in pkgutil.walk_packages(objcomm.__path__, "objcomm.")]
    names = [name for name in found if not name.startswith(("objcomm.demo", "objcomm.__main__"))]
    return [name for name in ["objcomm", *names] if examples(name)]


def run_examples(name: str) -> None:
    """Run the examples in the docstrings of a module."""
    runner = doctest.DocTestRunner()
    for test in examples(name):
        runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0
