"""The archives, as a stranger gets them; beside the other long tests, because it mostly waits."""

import os
import subprocess
import sys

import pytest

from tests.package.__main__ import ROOT

# Of a hang: an index may take minutes to send torch.
_DEADLINE_S = 850.0


@pytest.mark.long
@pytest.mark.lasting
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git tells what belongs into the archives")
def test_what_is_built_installs_and_does_what_the_pages_tell() -> None:
    # Names of an index may be looked up for longer than ranks do it, see ``tests/conftest.py``.
    of_tests = ("PYTEST_", "RES_OPTIONS")
    own = {name: value for name, value in os.environ.items() if not name.startswith(of_tests)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.package"],
        cwd=ROOT,
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
