"""Runs tests on a copy of the checkout, with or without a mutant in it.

The copy is imported in place of what is installed, in the processes that the tests start, too.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant

# In the order of the files, so that the same test is named each time.
_PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:randomly",
)
#: The whole suite, as `make test` and `make test-long` run it.
WHOLE = (("-n", "6", "--dist", "worksteal", "-m", "not long"), ("-n", "6", "-m", "long"))

_NOTHING_CHOSEN = 5  # pytest's exit status
_LOOK_SECONDS = 2.0
_TOLD_LINES = 15


class UnfitError(Exception):
    """A mutant does not fit the checkout, or the copy is not what would be tested."""


@dataclass(frozen=True)
class Outcome:
    """How tests ended: ``passed``, ``failed``, ``timed out`` or ``not run``.

    Attributes:
        name: the mutant's, or empty for the checkout as it is.
        by: the first test that failed, or why nothing can be said.
    """

    name: str
    verdict: str
    by: str
    seconds: float


def judge(
    root: Path, mutant: Mutant | None, runs: Sequence[Sequence[str]], limit_seconds: float
) -> Outcome:
    """Run pytest with each of ``runs`` in turn, until something fails."""
    name = "" if mutant is None else mutant.name
    began = time.monotonic()
    verdict, by = "passed", ""
    try:
        with _copied(root) as copy:
            if mutant is not None:
                _apply(mutant, copy)
            _check_import(copy)
            for arguments in runs:
                verdict, by = _run(arguments, copy, limit_seconds)
                if verdict != "passed":
                    break
    except UnfitError as error:
        verdict, by = "not run", str(error)
    return Outcome(name, verdict, by, round(time.monotonic() - began, 1))


def fits(root: Path, mutant: Mutant) -> bool:
    """Whether the text that a mutant replaces stands in its file exactly once."""
    file = root / mutant.path
    return file.exists() and file.read_text(encoding="utf-8").count(mutant.old) == 1


def _apply(mutant: Mutant, copy: Path) -> None:
    if not fits(copy, mutant):
        raise UnfitError(f"does not apply to {mutant.path}")
    file = copy / mutant.path
    file.write_text(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new), "utf-8")


@contextmanager
def _copied(root: Path) -> Iterator[Path]:
    """All that git tracks or would track, in a folder that is gone afterwards."""
    command = ("git", "ls-files", "-z", "-co", "--exclude-standard")
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="objcomm-mutant-", ignore_cleanup_errors=True) as name:
        copy = Path(name, "checkout")
        for path in filter(None, listed.split("\0")):
            if (root / path).is_file():  # and not deleted since
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / path, copy / path)
        (copy.parent / "tmp").mkdir()
        yield copy


def _environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "TMPDIR": str(copy.parent / "tmp")}


def _check_import(copy: Path) -> None:
    """From another folder, as a process may that a test starts elsewhere."""
    program = "from importlib.util import find_spec; print(find_spec('objcomm').origin)"
    command = (sys.executable, "-c", program)
    done = subprocess.run(
        command,
        check=False,
        cwd=copy.parent,
        env=_environment(copy),
        capture_output=True,
        text=True,
    )
    if done.stdout.strip() != str(copy / "objcomm" / "__init__.py"):
        raise UnfitError(f"objcomm is {done.stdout.strip() or done.stderr.strip()[-500:]}")


def _run(arguments: Sequence[str], copy: Path, limit_seconds: float) -> tuple[str, str]:
    """Run pytest, and end it with all of its processes at the limit, or once a test has failed."""
    path = copy.parent / "printed"
    with path.open("wb") as printed:
        process = subprocess.Popen(
            (*_PYTEST, *arguments),
            cwd=copy,
            env=_environment(copy),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until = time.monotonic() + limit_seconds
    try:
        # What has failed may not end: a thread waits for what never comes.
        while process.poll() is None and time.monotonic() < until and not _first_failed(path):
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
    finally:
        is_over = process.poll() is not None
        _end(process)
    if first := _first_failed(path):
        return "failed", first
    if not is_over:
        return "timed out", f"no end within {limit_seconds:g} s"
    return _verdict(process.returncode, path)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the session, and the process if it still runs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _first_failed(path: Path) -> str:
    """The first test that pytest's summary names, or its file if that could not be imported."""
    _, _, summary = path.read_text("utf-8", "replace").partition("short test summary info")
    marks = ("FAILED ", "ERROR ")
    first = (line.partition(" ")[2] for line in summary.splitlines() if line.startswith(marks))
    return next(first, "").partition(" - ")[0]


def _verdict(status: int, path: Path) -> tuple[str, str]:
    if status in {0, _NOTHING_CHOSEN}:
        return "passed", ""
    lines = path.read_text("utf-8", "replace").splitlines()
    # The suite's own limit for a test ends pytest itself, with all stacks.
    if any(re.search(r"Timeout \(\d+:\d\d:\d\d\)!$", line) for line in lines):
        return "timed out", "a test did not end within the suite's own limit"
    return "not run", "\n".join([f"pytest ended with {status}:", *lines[-_TOLD_LINES:]])
