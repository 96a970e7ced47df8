"""pyproject.toml matches the versions that were tested, and gives a reason for each requirement."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import objcomm
from objcomm.__main__ import main as objcomm_main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(TEXT)["project"]
QUESTIONS = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if "==" in line
)
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = [*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]
#: What the FAQ says was tested: Python, torch, and how much.
RUN = re.findall(r"^\| (3\.\d+) \| (2\.\d+\.\d+) \| (.+) \|$", QUESTIONS, re.MULTILINE)


def minor(version: str) -> Version:
    return Version(".".join(version.split(".")[:2]))


def test_the_console_command_is_the_one_of_the_package() -> None:
    assert PROJECT["scripts"] == {"objcomm": f"objcomm.__main__:{objcomm_main.__name__}"}


def test_the_classifiers_are_the_pythons_that_were_run() -> None:
    prefix = "Programming Language :: Python :: 3."
    named = [each for each in PROJECT["classifiers"] if each.startswith(prefix)]
    assert named == [
        prefix + each for each in sorted({python[2:] for python, _, _ in RUN}, key=int)
    ]


def test_no_older_python_is_allowed_than_was_run() -> None:
    oldest = min((python for python, _, _ in RUN), key=Version)
    assert PROJECT["requires-python"] == f">={oldest}"


def test_no_older_torch_is_allowed_than_was_run() -> None:
    oldest = min((torch for _, torch, _ in RUN), key=Version)
    (torch,) = (each for each in map(Requirement, REQUIRED) if each.name == "torch")
    assert torch.specifier == SpecifierSet(f">={minor(oldest)}")


def test_the_whole_suite_was_run_with_the_pins() -> None:
    assert [torch for _, torch, much in RUN if much.startswith("the whole suite")] == [
        PINS["torch"]
    ]


#: All requirements except objcomm itself and those that `make` never installs.
PINNED = [each for each in REQUIRED if Requirement(each).name not in {"objcomm", "atheris"}]


@pytest.mark.parametrize("wanted", PINNED)
def test_the_pins_are_allowed(wanted: str) -> None:
    requirement = Requirement(wanted)
    pins = {name.lower().replace("_", "-"): pin for name, pin in PINS.items()}
    assert requirement.specifier.contains(pins[requirement.name])


def test_each_requirement_has_its_reason() -> None:
    lists = TEXT.partition("dependencies = [")[2].partition("[tool.")[0]
    lines = [line for line in lists.splitlines() if re.match(r' {4}"', line)]
    assert len(lines) == len(REQUIRED)
    for line in lines:
        assert re.search(r"  # \S", line), line


def test_the_version_is_one_that_can_be_published() -> None:
    assert str(Version(objcomm.__version__)) == objcomm.__version__
    assert PROJECT["dynamic"] == ["version"]


def test_no_text_says_to_install_objcomm_from_an_index() -> None:
    """No index has objcomm, so a text must name the missing package itself, not an extra."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir()]
    for path in [*pages, *(ROOT / "objcomm").rglob("*.py")]:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"objcomm\[|pip install '?objcomm", text), path
