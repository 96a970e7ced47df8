"""Every Python block of the documentation runs, and so does every example in a docstring."""

import ast
import doctest
import inspect
import sys
from pathlib import Path

import pytest

from objcomm._bootstrap import launch
from objcomm._config import FOREVER_SECONDS, Settings
from objcomm._failures import mesh
from objcomm._p2p import mailbox
from objcomm._wire import failure_message, header
from tests.doctor.job import by_command
from tests.documented import Block, blocks, documented_modules, examples, run_block, run_examples
from tests.package.pages import PAGES, programs, steps
from tests.public_names import FUNCTIONS, PUBLIC
from tests.ranks import run_on_fresh_ranks

_ROOT = Path(__file__).parents[1]

# Blocks that launch ranks import torch again, beside other tests that do so.
_DEADLINE_S = 600.0


# Their ranks import torch, which takes seconds, so the quick tests run only the first of them.
_LAUNCHING = [block.where for block in blocks() if "objcomm.launch(" in block.source]


def marks_of(block: Block) -> list[pytest.MarkDecorator]:
    """A page shows a timeout with a short one, which a busy machine may overrun."""
    is_timed = "objcomm.TransportTimeout" in block.source and "sleep(" in block.source
    is_long = block.where in _LAUNCHING[1:]
    return [pytest.mark.timed] * is_timed + [pytest.mark.long] * is_long


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=block.where, marks=marks_of(block)) for block in blocks()]
)
def test_a_block_of_the_documentation_runs(block: Block, tmp_path: Path) -> None:
    run_on_fresh_ranks(
        block.ranks,
        run_block,
        deadline=_DEADLINE_S,
        where=block.where,
        source=block.source,
        folder=str(tmp_path),
        is_launched=block.is_launched,
    )


#: Values that a page promises, and the place of each in the code.
NUMBERS = [
    (Settings.report_after, "guide/failures", "when a call has waited for {:g} s"),
    (Settings.report_after, "guide/multi-host", "`objcomm.configure(report_after=…)` | {:g} s |"),
    (Settings.lost_after, "guide/failures", "that has had no response for {:g} s"),
    (Settings.lost_after, "guide/multi-host", "`objcomm.configure(lost_after=…)` | {:g} s |"),
    (mesh._REPORT_SECONDS, "reference/failing", "If it is still waiting after {:g} s, a message"),  # noqa: SLF001  # promised
    (launch._GRACE_SECONDS, "guide/starting", "The other ranks have {:g} s to notice"),  # noqa: SLF001  # likewise
    (mailbox._KEPT_MAX_NBYTES >> 20, "guide/point-to-point", "keeps up to {} MiB of one sender's"),  # noqa: SLF001  # likewise
    (FOREVER_SECONDS // 86400, "reference/failing", "Limits longer than {:g} days, "),
    (FOREVER_SECONDS // 86400, "reference/failing", '`float("inf")`, count as {:g} days.'),
    (header._NAME_MIN_NBYTES, "reference/failing", "the first {} bytes of the call's `name=`"),  # noqa: SLF001  # likewise
    (failure_message._TEXT_MAX_NBYTES, "reference/failing", "of more than {} bytes has its"),  # noqa: SLF001  # likewise
]


@pytest.mark.parametrize(("value", "page", "sentence"), NUMBERS)
def test_a_page_promises_the_number_that_the_code_has(
    value: float, page: str, sentence: str
) -> None:
    text = (_ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert sentence.format(value) in " ".join(text.split())


def test_the_readme_shows_code_that_is_run() -> None:
    assert any(block.where.startswith("README.md") for block in blocks())


@pytest.mark.parametrize("page", PAGES)
def test_a_first_page_says_how_each_of_its_programs_is_started(page: str) -> None:
    for source, commands in programs(_ROOT / page):
        if source:
            assert any(words[0] in {"python", "torchrun"} for words in commands), source
            statements = [
                each for each in ast.parse(source).body if not isinstance(each, ast.Import)
            ]
            assert ast.unparse(statements[0]).startswith("objcomm.init(")
            assert "print(" in source
            assert not any(isinstance(each, ast.Assert) for each in ast.walk(ast.parse(source)))


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("page", PAGES)
def test_a_first_page_runs_on_any_number_of_ranks_with_what_it_installs(
    page: str, size: int, tmp_path: Path
) -> None:
    """``tests.package`` installs it for real, and starts as many ranks as the page does."""
    path = [tmp_path / "without numpy", _ROOT]
    path[0].mkdir()
    (path[0] / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    for words, _ in steps(_ROOT / page, tmp_path):
        if words[0] == "pip":
            path = path[-1:] if "numpy" in words else path
            continue
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command = [sys.executable, *(launcher if words[0] == "torchrun" else []), words[-1]]
        done = by_command(command, {"PYTHONPATH": ":".join(map(str, path))}, cwd=tmp_path)
        assert done.status == 0, f"{words}\n{done.err}"
        assert done.out


_STARTS_LIKE_A_SCRIPT = """
import torch.distributed as dist
dist.init_process_group("gloo")
import objcomm
assert objcomm.all_gather(objcomm.rank()) == [0, 1]
undefined
"""


def test_a_block_that_fails_is_reported_with_its_ranks(tmp_path: Path) -> None:
    source, folder = _STARTS_LIKE_A_SCRIPT, str(tmp_path)
    with pytest.raises(pytest.fail.Exception) as caught:
        run_on_fresh_ranks(2, run_block, where="page.md:3", source=source, folder=folder)
    for words in ("[rank 0]", "[rank 1]", "page.md:3", "NameError: name 'undefined'"):
        assert words in str(caught.value)


def marks_of_module(name: str) -> list[pytest.MarkDecorator]:
    """A block of a page shows the same as the examples of ``launch``."""
    return [pytest.mark.long] * (name == "objcomm._bootstrap.launch")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of_module(name)) for name in documented_modules()]
)
def test_examples_in_docstrings_are_right(name: str) -> None:
    run_on_fresh_ranks(0, run_examples, deadline=_DEADLINE_S, name=name)


@pytest.mark.parametrize("name", [*FUNCTIONS, "Op", "Shard", "Work"])
def test_every_public_function_shows_an_example(name: str) -> None:
    assert doctest.DocTestParser().get_examples(PUBLIC[name].__doc__ or "")


def test_every_example_of_a_public_name_is_among_those_that_run() -> None:
    run = {test.docstring for name in documented_modules() for test in examples(name)}
    members = list(PUBLIC.values())
    methods = [
        each for member in members if inspect.isclass(member) for each in vars(member).values()
    ]
    shown = [
        inspect.unwrap(getattr(each, "__func__", each)).__doc__ for each in [*members, *methods]
    ]
    parser = doctest.DocTestParser()
    missing = [doc for doc in shown if doc and parser.get_examples(doc) and doc not in run]
    assert missing == []
