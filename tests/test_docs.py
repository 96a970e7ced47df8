"""Every Python block of the documentation runs, and so does every example in a docstring."""

import doctest
import importlib
import inspect
import os
import pkgutil
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

import objcomm
from tests.ahead import begun_ahead
from tests.ranks import run_on_fresh_ranks, solo
from tests.workers import here, join

_ROOT = Path(__file__).parents[1]
# Blocks that launch ranks import torch anew, beside other files of tests that do so.
_DEADLINE_S = 200.0
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


@pytest.fixture(scope="module")
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Block], None]]:
    """Waits for a block to end."""
    base = tmp_path_factory.mktemp("blocks")

    def begin(block: Block) -> None:
        folder = tempfile.mkdtemp(dir=base)
        run_on_fresh_ranks(
            block.ranks,
            run_block,
            deadline=_DEADLINE_S,
            where=block.where,
            source=block.source,
            folder=folder,
            is_launched=block.is_launched,
        )

    with begun_ahead(request, {block.where: partial(begin, block) for block in blocks()}) as wait:
        yield lambda block: wait(block.where)


@pytest.mark.parametrize("block", [pytest.param(block, id=block.where) for block in blocks()])
def test_a_block_of_the_documentation_runs(block: Block, run: Callable[[Block], None]) -> None:
    run(block)


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


def test_the_readme_shows_code_that_is_run() -> None:
    assert any(block.where.startswith("README.md") for block in blocks())


_STARTS_LIKE_A_SCRIPT = """
import torch.distributed as dist
dist.init_process_group("gloo")
import objcomm
assert objcomm.all_gather(objcomm.rank()) == [0, 1]
undefined
"""


def test_a_block_that_fails_is_told_with_its_ranks(tmp_path: Path) -> None:
    source, folder = _STARTS_LIKE_A_SCRIPT, str(tmp_path)
    with pytest.raises(pytest.fail.Exception) as caught:
        run_on_fresh_ranks(2, run_block, where="page.md:3", source=source, folder=folder)
    for told in ("[rank 0]", "[rank 1]", "page.md:3", "NameError: name 'undefined'"):
        assert told in str(caught.value)


def documented_modules() -> list[str]:
    """The modules whose docstrings hold examples."""
    finder = doctest.DocTestFinder()
    names = [
        found.name
        for found in pkgutil.walk_packages(objcomm.__path__, "objcomm.")
        if not found.name.startswith(("objcomm.demo", "objcomm.__main__"))
    ]
    return [
        name
        for name in names
        if any(test.examples for test in finder.find(importlib.import_module(name)))
    ]


@solo()
@pytest.mark.parametrize("name", documented_modules())
def test_examples_in_docstrings_are_right(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0


FUNCTIONS = [name for name in objcomm.__all__ if inspect.isfunction(getattr(objcomm, name))]


@pytest.mark.parametrize("name", [*FUNCTIONS, "Op", "Shard", "Work"])
def test_every_public_function_shows_an_example(name: str) -> None:
    assert doctest.DocTestParser().get_examples(getattr(objcomm, name).__doc__ or "")
