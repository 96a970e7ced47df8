"""CONTRIBUTING.md names existing files, tests and commands, and its example codec works."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import check_codec

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

QUOTED = [*re.findall(r"`([^`\n]+)`", PAGE), *re.findall(r"```text\n(make .*)\n```", PAGE)]
PATHS = sorted(
    set(re.findall(r"(?<![\w/])(?:objcomm|tests|bench|docs|\.ci)/[\w/.-]*", " ".join(QUOTED)))
    | {each for each in QUOTED if re.fullmatch(r"\.?[\w-]+\.(md|toml|txt|yaml)", each)}
)
MEMBERS = sorted(set(re.findall(r"`(\w+)`[^`.]{0,40} (?:of|in) `([\w/]+\.py)`", PAGE)))
PROGRAMS = sorted(set(re.findall(r"python -m ([\w.]+)", PAGE)))
MADE = sorted({each for each in QUOTED if each.startswith("make ")})
TARGETS = re.findall(r"[\w-]+", MAKEFILE.partition(".PHONY:")[2].partition("\n")[0])


_PROMISES = PAGE.partition("hold which promise\n")[2].partition("\n## ")[0]
HOLDING = sorted(set(re.findall(r"(?<=`)[\w/]+(?=`)", _PROMISES.partition("|---|")[2])))


@pytest.mark.parametrize("name", HOLDING)
def test_what_holds_a_promise_is_a_file_of_tests(name: str) -> None:
    folder, _, file = name.rpartition("/")
    assert (ROOT / "tests" / folder / f"test_{file}.py").exists()


def test_enough_is_found_on_the_page() -> None:
    assert len(HOLDING) > 70
    assert min(len(PATHS) / 40, len(MEMBERS) / 8, len(PROGRAMS) / 6, len(MADE) / 12) >= 1


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_the_page_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("name", "path"), MEMBERS)
def test_a_name_of_the_page_is_in_its_file(name: str, path: str) -> None:
    assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_the_page_can_be_started(program: str) -> None:
    assert importlib.util.find_spec(program)


@pytest.mark.parametrize("command", MADE)
def test_a_command_of_the_page_is_in_the_makefile(command: str) -> None:
    words = [word for word in shlex.split(command)[1:] if "=" not in word]
    assert len(words) == 1
    assert words[0] in TARGETS
    for variable in re.findall(r"\b([A-Z_]+)=", command):
        assert f"{variable} ?=" in MAKEFILE or f"$({variable})" in MAKEFILE


@pytest.mark.parametrize("target", TARGETS)
def test_make_help_lists_every_target(target: str) -> None:
    assert re.search(rf"\n{target}:", MAKEFILE)
    assert target == "help" or f"make {target} " in MAKEFILE.partition("help:\n")[2]


def test_the_codec_of_the_page_keeps_the_contract() -> None:
    (block,) = (
        each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "Json" in each
    )
    page: dict[str, Any] = {}
    exec(compile(block, "CONTRIBUTING.md", "exec"), page)  # noqa: S102  # its purpose
    check_codec(page["Json"], lambda: [{"lr": 0.1, "layers": [64, 10]}, [], None, "é"], object())
