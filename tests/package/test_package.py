"""The archives, as a stranger gets them; beside the other long tests, of which most wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package.__main__ import ROOT

# Of a hang, and below that of every test, see ``tests/conftest.py``. An index may take minutes to
# send torch; and this needs two minutes of processor time, of which the other tests leave it an
# eighth: 850 s were not enough once.
_DEADLINE_S = 1700.0


@pytest.mark.long
@pytest.mark.lasting
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git tells what belongs into the archives")
def test_what_is_built_installs_and_does_what_the_pages_tell(tmp_path: Path) -> None:
    # Names of an index may be looked up for longer than ranks do it, see ``tests/conftest.py``.
    of_tests = ("PYTEST_", "RES_OPTIONS")
    own = {name: value for name, value in os.environ.items() if not name.startswith(of_tests)}
    printed = tmp_path / "printed"  # a pipe's content is cut short where the deadline passes
    with printed.open("wb") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", "tests.package"],
            cwd=ROOT,
            env=own,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        with started:
            try:
                started.wait(_DEADLINE_S)
            except subprocess.TimeoutExpired:
                started.kill()
    assert started.returncode == 0, printed.read_text()
