"""The output of programs that have a mistake; each is a file in ``tests/programs/mistakes``.

Its docstring states the mistake, how many ranks run the program, and how they end::

    ranks: 3
    0, 2: TransportTimeout
        says rank 1 did not arrive … now at @loading | rank 1 … no answer
        shows %gather, in evaluate
        never died
    1: exit 0

A rank ends with an uncaught exception of a class, with an exit status (negative for a signal), or
in ``any`` way; ``all`` means all ranks. One line of its output must contain the words after
``says``, one line of a traceback those after ``shows``, and no line those after ``never``. ``…``
matches any text, and ``|`` separates alternatives. ``@loading`` is the line of the program with
this mark in a comment, as errors name it; ``%gather`` is a line as tracebacks name it.

The ranks get torchrun's variables and its store; after ``ranks: 2, by hand`` only the variables.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.doctor.job import Agent
from tests.endings import HUNG, Ending, Endings, Program

_FOLDER = Path(__file__).parent / "programs" / "mistakes"
_MISTAKES = {path.stem: path for path in sorted(_FOLDER.glob("*.py"))}


@dataclass(frozen=True)
class _Expected:
    """How some of the ranks end.

    Attributes:
        end: the class of an exception, ``exit`` and a status, or ``any``.
        words: what a line must or must not contain: ``says``, ``shows`` or ``never``, and a
            pattern.
    """

    ranks: list[int]
    end: str
    words: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _Mistake:
    """One program's source, and how its ranks must end."""

    source: str
    size: int
    is_by_hand: bool
    expected: list[_Expected]


def _read(path: Path) -> _Mistake:
    source = path.read_text(encoding="utf-8")
    marks = {
        mark: number
        for number, line in enumerate(source.splitlines(), start=1)
        for mark in re.findall(r"# @(\w+)$", line)
    }
    docstring = ast.get_docstring(ast.parse(source)) or ""
    _, first, *lines = [line for line in docstring.splitlines() if line]
    number, _, start = first.removeprefix("ranks: ").partition(", ")
    mistake = _Mistake(source, int(number), start == "by hand", [])
    for line in lines:
        if line.startswith(" "):
            kind, _, words = line.strip().partition(" ")
            assert kind in {"says", "shows", "never"}, line
            pattern = _pattern(words, path.name, marks)
            mistake.expected[-1].words.append((kind, pattern))
        else:
            ranks, _, end = line.partition(": ")
            mistake.expected.append(_Expected(_numbers(ranks, mistake.size), end))
    return mistake


def _numbers(ranks: str, size: int) -> list[int]:
    if ranks == "all":
        return list(range(size))
    ends = [part.partition("-") for part in ranks.split(", ")]
    return [each for first, _, last in ends for each in range(int(first), int(last or first) + 1)]


def _pattern(words: str, file: str, marks: dict[str, int]) -> str:
    """Return a regular expression for words that contain marks and gaps."""

    def piece(text: str) -> str:
        text = re.sub(r"@(\w+)", lambda mark: f"\0{file}:{marks[mark[1]]}", text)
        text = re.sub(r"%(\w+)", lambda mark: f"line {marks[mark[1]]}", text)
        return re.escape(text).replace("\0", r"\S*") + (r"\b" if text[-1].isdigit() else "")

    ways = [".*".join(map(piece, way.split(" … "))) for way in words.split(" | ")]
    return "|".join(ways)


def _found(pattern: str, said: str) -> str:
    """Return the line that matches; empty if none does."""
    found = re.search(f"^.*({pattern}).*$", said, re.IGNORECASE | re.MULTILINE)
    return found[0] if found else ""


_BY_TORCH = r"^\[rank\d+\]: ?"  # starts each line of a traceback, once there is a group


def _ends_as(end: str, status: int, said: str) -> bool:
    if end == "any":
        return status != HUNG
    if end.startswith("exit "):
        return status == int(end.removeprefix("exit "))
    is_raised = re.search(rf"^([\w.]+\.)?{end}(:|$)", said, re.MULTILINE)
    return status not in {0, HUNG} and is_raised is not None


def _wrong(expected: _Expected, ending: Ending) -> Iterator[str]:
    """Yield the differences from the expected ending."""
    said = re.sub(_BY_TORCH, "", ending.said, flags=re.MULTILINE)
    messages = "\n".join(line for line in said.splitlines() if not line.startswith("  "))
    if not _ends_as(expected.end, ending.status, said):
        yield f"{expected.end} was expected, not exit status {ending.status}"
    for kind, pattern in expected.words:
        line = _found(pattern, messages if kind == "says" else said)
        if bool(line) == (kind == "never"):
            yield f"{kind} {pattern!r}: {line or 'no line does'}"


@pytest.fixture(scope="module")
def endings() -> Iterator[Endings]:
    """Run the programs; torch is imported once for all of them."""
    with Endings() as endings:
        yield endings


@pytest.mark.parametrize("name", _MISTAKES)
def test_a_mistake_is_explained(name: str, endings: Endings) -> None:
    mistake = _read(_MISTAKES[name])
    agent = Agent()
    by_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(agent.store.port)}
    program = Program(
        [""] * mistake.size,
        {} if mistake.is_by_hand else by_torchrun,
        begin=mistake.source,
        file=str(_MISTAKES[name]),
    )
    (ended,) = endings.run([program])
    wrong = [
        f"rank {rank}: {line}"
        for each in mistake.expected
        for rank in each.ranks
        for line in _wrong(each, ended[rank])
    ]
    said = [f"[rank {rank}] exit status {end.status}\n{end.said}" for rank, end in enumerate(ended)]
    assert not wrong, "\n".join([*wrong, *said])
