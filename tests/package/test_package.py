"""The archives, as a user gets them; run beside the other long tests, most of which wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package.__main__ import ROOT

# Only a hang takes this long, and it is below every test's deadline, see ``tests/conftest.py``. An
# index may take minutes to send torch. This needs two minutes of processor time, and the other
# tests leave it an eighth of a processor: 850 s were not enough once.
_DEADLINE_S = 1700.0


@pytest.mark.long
@pytest.mark.lasting
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git knows what belongs in the archives")
def test_the_archives_install_and_run_the_pages_programs(tmp_path: Path) -> None:
    # pip may resolve an index's name for longer than ranks do, see ``tests/conftest.py``.
    of_tests = ("PYTEST_", "RES_OPTIONS")
    own = {name: value for name, value in os.environ.items() if not name.startswith(of_tests)}
    printed = tmp_path / "printed"  # a pipe's content would be truncated at the deadline
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
