"""Run a string as a separate program."""

import subprocess
import sys
import textwrap
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def run_python(source: str, *options: str) -> str:
    """Return what a fresh interpreter prints; fail with its output if it fails."""
    done = subprocess.run(  # our own interpreter, our own text
        [sys.executable, *options, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=900,  # only a hang takes this long
        cwd=_ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
