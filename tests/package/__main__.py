"""``python -m tests.package``: build the archives into dist/ and try them as a stranger would.

The environment that they are tried in has nothing but the wheel and what it asks for, at the
versions of constraints.txt. Installing torch takes most of the time: a minute from this machine's
disk, more from an index.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from tests.package.pages import PAGES, steps

T = TypeVar("T")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DIST = ROOT / "dist"

# All that pip and the programs may take from around them.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
_PINNED = {**_ENVIRONMENT, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}


def main() -> None:
    """Go through the steps; the first that fails ends the program, and its output says why."""
    with TemporaryDirectory(prefix="objcomm-package-") as name, ThreadPoolExecutor(1) as beside:
        folder = Path(name)
        source, wheel = _step("build", build)
        _step("contents", lambda: check_contents(source, wheel))
        _step("metadata", lambda: _run(*_TWINE, source, wheel))
        # The one reads and computes, while the other mostly writes to the disk.
        suite = beside.submit(
            _step, "suite of the source archive", lambda: check_suite(source, folder / "source")
        )
        python = _step("install", lambda: install(wheel, folder))
        _step("smoke test", lambda: _run(python, HERE / "smoke.py", at=folder))
        _step("pages", lambda: check_pages(wheel, folder))
        _step("types", lambda: check_types(python, folder))
        suite.result()


def build() -> tuple[Path, Path]:
    """Build the source archive, and the wheel from that: what it lacks the wheel will lack."""
    shutil.rmtree(DIST, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", DIST, ROOT, environment=_PINNED)
    (source,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return source, wheel


def check_contents(source: Path, wheel: Path) -> None:
    """Everything that git tracks is in the one, the package and nothing else in the other."""
    with tarfile.open(source) as archive:
        archived = {each.name.partition("/")[2] for each in archive if each.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
    tracked = set(_printed("git", "ls-files").split())
    _expect_same("the source archive", archived - {"PKG-INFO"}, tracked)
    _expect_same("the wheel", installed, {each for each in tracked if each.startswith("objcomm/")})
    if len(licences) != 1:
        raise SystemExit(f"{wheel.name} has {len(licences)} licences")


def check_suite(source: Path, folder: Path) -> None:
    """The suite of the source archive can be collected and begins to run without git.

    Its files are those of the checkout, see ``check_contents``, and so are its tests.
    """
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    _printed(sys.executable, *_PYTEST, "--collect-only", at=unpacked)
    _run(sys.executable, *_PYTEST, "tests/test_architecture.py", at=unpacked)


_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
_TWINE = (sys.executable, "-m", "twine", "--no-color", "check", "--strict")


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel; returns its interpreter."""
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment" / "bin" / "python"
    # Compiling all of torch takes longer than installing it, and little of it is imported here.
    without = ("--quiet", "--no-compile")
    _run(python, "-m", "pip", "install", *without, wheel, environment=_PINNED)
    _run(python, "-m", "pip", "check")
    return python


def check_pages(wheel: Path, folder: Path) -> None:
    """The first pages' programs run with exactly what their own lines install, and print that."""
    binaries = folder / "environment" / "bin"
    environment = {**_PINNED, "PATH": f"{binaries}:{_PINNED['PATH']}"}
    for page in PAGES:
        at = folder / page.replace("/", "-")
        at.mkdir()
        logs = at / "logs"
        for words, shown in steps(ROOT / page, at):
            command: list[str | Path] = list(words)
            if words[0] == "pip":
                command = [binaries / "python", "-m", *words]
                command[command.index(".")] = wheel
            elif words[0] == "torchrun":
                # With a port that nobody else has. Its ranks write a line and its end apart, so two
                # lines may share one in what it prints: each rank writes to a file of its own.
                apart = ("--redirects=1", f"--log-dir={logs}")
                command = ["torchrun", "--standalone", *apart, *words[1:]]
            text = _printed(*command, at=at, environment=environment)
            text += "".join(each.read_text() for each in sorted(logs.rglob("stdout.log")))
            shutil.rmtree(logs, ignore_errors=True)
            printed = text.splitlines()
            if not set(shown) <= set(printed):
                raise SystemExit(f"{page}: {' '.join(words)} printed {printed}, not {shown}")


def check_types(python: Path, folder: Path) -> None:
    """Mypy, strict, finds the annotations of what was installed."""
    program = shutil.copy(HERE / "typed.py", folder)  # beside no configuration and no checkout
    found = ("--strict", "--cache-dir", folder / "mypy", "--python-executable", python)
    _run(sys.executable, "-m", "mypy", *found, program, at=folder)


def _step(name: str, do: Callable[[], T]) -> T:
    began = time.monotonic()
    print(f"{name} …", flush=True)
    result = do()
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return result


def _run(*command: str | Path, at: Path = ROOT, environment: dict[str, str] = _ENVIRONMENT) -> None:
    if subprocess.run(command, check=False, cwd=at, env=environment).returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}")


def _printed(
    *command: str | Path, at: Path = ROOT, environment: dict[str, str] = _ENVIRONMENT
) -> str:
    done = subprocess.run(
        command, check=False, cwd=at, env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def _expect_same(what: str, found: set[str], wanted: set[str]) -> None:
    lacking, surplus = sorted(wanted - found), sorted(found - wanted)
    if lacking or surplus:
        raise SystemExit(f"{what} lacks {lacking} and has {surplus} besides")


if __name__ == "__main__":
    main()
