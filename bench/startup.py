"""Measure import time in new interpreters that alternate.

Does not know about ranks: one interpreter imports torch, the next one torch and then all of
objcomm. Both find compiled bytecode, as in an installed package. If the environment sets
PYTHONDONTWRITEBYTECODE, it is ignored, because most of the time would be compilation.
"""

import json
import os
import subprocess
import sys

_TORCH = "torch"
_ADDED = "objcomm"
_ALL_OF_IT = "objcomm._public"  # the package itself imports nothing until a name is used
_TOGETHER = "torch, then objcomm"
_PROGRAM = """
import json, sys, time
taken = []
for name in sys.argv[1:]:
    began = time.perf_counter()
    __import__(name)
    taken.append(time.perf_counter() - began)
print(json.dumps(taken))
"""


def import_seconds(samples: int) -> dict[str, list[float]]:
    """Return the seconds to import torch alone, objcomm after torch, and both together."""
    taken: dict[str, list[float]] = {_TORCH: [], _ADDED: [], _TOGETHER: []}
    _imports(_TORCH, _ALL_OF_IT)  # compiles their bytecode and fills the page cache
    for _ in range(samples):
        taken[_TORCH] += _imports(_TORCH)
        both = _imports(_TORCH, _ALL_OF_IT)
        taken[_ADDED].append(both[1])
        taken[_TOGETHER].append(sum(both))
    return taken


def _imports(*modules: str) -> list[float]:
    command = [sys.executable, "-c", _PROGRAM, *modules]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    printed = subprocess.run(  # noqa: S603  # this interpreter
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout
    return [float(seconds) for seconds in json.loads(printed)]
