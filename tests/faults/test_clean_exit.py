"""Programs whose calls are over end with exit code 0 and without a word, however they leave."""

import subprocess
import sys
from pathlib import Path

from tests.faults.exiting import EVENTS

_ROOT = Path(__file__).parents[2]
_TURNS = 1
_LIMIT_SECONDS = 120.0


def test_every_rank_ends_by_itself_and_silently(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.exiting", str(tmp_path), str(_TURNS)]
    ended = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True
    )
    assert (ended.stdout, ended.stderr) == (f"{_TURNS * len(EVENTS)} jobs ended\n", "")
