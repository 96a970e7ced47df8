"""Run a string as a separate program."""

import sys
import textwrap

from tests.doctor.job import ROOT, by_command


def run_python(source: str, *options: str) -> str:
    """Return what a fresh interpreter prints; fail with its output if it fails."""
    done = by_command([sys.executable, *options, "-c", textwrap.dedent(source)], cwd=ROOT)
    assert done.status == 0, done.err
    return done.out
