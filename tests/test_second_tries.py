"""Tests of promised durations get a second try, alone; a run reports how many needed one."""

import re
import sys
from pathlib import Path

import pytest

from tests.doctor.job import by_command

_TESTS = """
from pathlib import Path
import pytest

def is_first_time(name):
    seen = Path(__file__).with_name(name)
    first = not seen.exists()
    seen.touch()
    return first

@pytest.mark.timed
@pytest.mark.parametrize("number", range({late}))
def test_late_once(number):
    assert not is_first_time(f"late{{number}}")

@pytest.mark.timed
@pytest.mark.parametrize("number", range({wrong}))
def test_always_wrong(number):
    assert number < 0

@pytest.mark.parametrize("number", range({unmarked}))
def test_wrong_once(number):
    assert not is_first_time(f"unmarked{{number}}")
"""


def run(folder: Path, *options: str, late: int, wrong: int = 0, unmarked: int = 0) -> str:
    """Return the output of a separate pytest that runs such a file."""
    (folder / "test_sample.py").write_text(_TESTS.format(late=late, wrong=wrong, unmarked=unmarked))
    (folder / "conftest.py").write_text('pytest_plugins = ["tests.second_tries"]\n')
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = timed\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = by_command(command, cwd=folder)
    return f"{done.out}\nexit status {done.status}\n"


@pytest.mark.parametrize(
    "options",
    [pytest.param((), marks=pytest.mark.long), ("-n", "2")],
    ids=["one process", "two processes"],
)
def test_only_timed_tests_get_a_second_try(tmp_path: Path, options: tuple[str, ...]) -> None:
    report = run(tmp_path, *options, late=1, wrong=1, unmarked=1)
    found = re.search(r"=+ (.*) in [\d.]+s", report)
    assert found, report
    assert found[1] == "2 failed, 1 passed, 2 first try", report
    assert "first try of test_sample.py::test_late_once[0]" in report
    assert "second tries: 2 of at most 3\n" in report
    assert "assert 0 < 0" in report.split("second try:")[1]
    assert "FAILED test_sample.py::test_always_wrong[0]" in report
    assert "FAILED test_sample.py::test_wrong_once[0]" in report
    assert "exit status 1" in report


@pytest.mark.parametrize(("late", "status"), [pytest.param(3, 0, marks=pytest.mark.long), (4, 1)])
def test_more_than_three_second_tries_fail_the_run_even_if_all_pass(
    tmp_path: Path, late: int, status: int
) -> None:
    report = run(tmp_path, late=late)
    assert f" {late} passed" in report, report
    assert ("too many" in report) == (status == 1)
    assert f"exit status {status}" in report
