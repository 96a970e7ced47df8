"""``python -m tests.package``: build the archives into dist/ and try them as a user would.

They are tried in an environment with only the wheel and its requirements, at the versions of
constraints.txt. Installing torch takes most of the time: a minute from a local disk, more from an
index.
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

# All that pip and the programs may take from their environment.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
_PINNED = {**_ENVIRONMENT, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}


def main() -> None:
    """Run the steps; the first that fails ends the program, and its output says why."""
    with TemporaryDirectory(prefix="objcomm-package-") as name, ThreadPoolExecutor(1) as beside:
        folder = Path(name)
        source, wheel = _step("build", build)
        _step("contents", lambda: check_contents(source, wheel))
        _step("metadata", lambda: _run(*_TWINE, source, wheel))
        # One reads and computes, while the other mostly writes to the disk.
        suite = beside.submit(
            _step, "suite of the source archive", lambda: check_suite(source, folder / "source")
        )
        python = _step("install", lambda: install(wheel, folder))
        _step("smoke test", lambda: _run(python, HERE / "smoke.py", at=folder))
        _step("pages", lambda: check_pages(wheel, folder))
        _step("types", lambda: check_types(python, folder))
        suite.result()


def build() -> tuple[Path, Path]:
    """Build the source archive, and the wheel from it, so that the wheel shows what it lacks."""
    shutil.rmtree(DIST, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", DIST, ROOT, environment=_PINNED)
    (source,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return source, wheel


def check_contents(source: Path, wheel: Path) -> None:
    """Check that one has everything that git tracks, and the other the package and nothing else."""
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
    """Check that the suite of the source archive can be collected and starts without git.

    Its files are those of the checkout, see ``check_contents``, so its tests are, too.
    """
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    _printed(sys.executable, *_PYTEST, "--collect-only", at=unpacked)
    _run(sys.executable, *_PYTEST, "tests/test_architecture.py", at=unpacked)


_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
_TWINE = (sys.executable, "-m", "twine", "--no-color", "check", "--strict")


def install(wheel: Path, folder: Path) -> Path:
    """Create an environment with the wheel; return its interpreter."""
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment" / "bin" / "python"
    # Compiling all of torch takes longer than installing it, and little of it is imported here.
    without = ("--quiet", "--no-compile")
    _run(python, "-m", "pip", "install", *without, wheel, environment=_PINNED)
    _run(python, "-m", "pip", "check")
    return python


def check_pages(wheel: Path, folder: Path) -> None:
    """Check that the first pages' programs need only what the pages install, and their output."""
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
                # On a port that nothing else uses. Its ranks write a line and its end separately,
                # so their lines may mix: each rank writes to its own file.
                apart = ("--redirects=1", f"--log-dir={logs}")
                command = ["torchrun", "--standalone", *apart, *words[1:]]
            text = _printed(*command, at=at, environment=environment)
            text += "".join(each.read_text() for each in sorted(logs.rglob("stdout.log")))
            shutil.rmtree(logs, ignore_errors=True)
            printed = text.splitlines()
            if not set(shown) <= set(printed):
                raise SystemExit(f"{page}: {' '.join(words)} printed {printed}, not {shown}")


def check_types(python: Path, folder: Path) -> None:
    """Check that mypy in strict mode finds the annotations of the installed package."""
    program = shutil.copy(HERE / "typed.py", folder)  # away from any configuration and checkout
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
