"""``python docs/record.py``: record README.md's program with torch and with objcomm.

The ranks of that program make different calls. ``docs/desync.json`` gets each line that they print,
with the seconds since the last rank joined, and ``docs/draw.py`` draws it. A recording ends when
all ranks have raised, or after a minute.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import objcomm

_DOCS = Path(__file__).parent
_RANKS = 2
_LIMIT_SECONDS = 60
_TORCHRUN = f"torchrun --nproc-per-node={_RANKS}"
_COMMANDS = {
    f"torch {torch.__version__.partition('+')[0]}": f"{_TORCHRUN} train.py",
    f"objcomm {objcomm.__version__}": f"{_TORCHRUN} -m objcomm.run train.py",
}
_JOIN = 'dist.init_process_group("gloo")'
# On the same line, so that the error's line numbers are those of README.md. In one write each, so
# that the ranks' lines do not mix: torchrun starts unbuffered processes.
_ANNOUNCED = f'{_JOIN}; print(f"rank {{dist.get_rank()}} has joined\\n", end="")'
_HAS_JOINED = re.compile(r"rank \d has joined")
_HAS_RAISED = re.compile(r"\[rank\d\]: [\w.]+Error: ")


def record(command: str, program: str, folder: Path) -> dict[str, Any]:
    """Run a command, and return its output until all ranks have raised or the limit passes."""
    (folder / "train.py").write_text(program, encoding="utf-8")
    printed: list[tuple[float, str]] = []
    joined: list[float] = []
    raised = 0
    is_over = threading.Event()
    with (
        subprocess.Popen(  # noqa: S603  # one of the commands above
            [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # torchrun prints a warning without it
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process
    ):

        def stop() -> None:
            is_over.set()
            process.terminate()

        limit = threading.Timer(_LIMIT_SECONDS, stop)
        for line in process.stdout or ():
            now = time.monotonic()
            if is_over.is_set():
                continue  # torchrun reports how its processes ended
            printed.append((now, line.rstrip().replace(f"{folder}/", "")))
            if _HAS_JOINED.fullmatch(line.rstrip()):
                joined.append(now)
                if len(joined) == _RANKS:
                    limit.start()
            raised += bool(_HAS_RAISED.match(line))
            if raised == _RANKS:
                is_over.set()
        limit.cancel()
    return {
        "command": command,
        "seconds": None if raised else _LIMIT_SECONDS,
        "printed": [[round(at - max(joined), 2), text] for at, text in printed],
    }


def main() -> None:
    """Record both commands."""
    readme = (_DOCS.parent / "README.md").read_text(encoding="utf-8")
    program = readme.partition("```py\n")[2].partition("```")[0]
    if program.count(_JOIN) != 1:
        raise ValueError(f"the first program of README.md does not have one {_JOIN}")
    with tempfile.TemporaryDirectory() as folder:
        recorded = {
            name: record(command, program.replace(_JOIN, _ANNOUNCED), Path(folder))
            for name, command in _COMMANDS.items()
        }
    text = json.dumps(recorded, indent=1) + "\n"
    (_DOCS / "desync.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
