"""Import time, measured in fresh interpreters that alternate.

Knows nothing of ranks: one interpreter imports torch, the next torch and then all of objcomm. Both
find compiled bytecode, as an installed package has it, whatever the environment of the benchmark
says: under PYTHONDONTWRITEBYTECODE most of the time would be the compiler's.
"""

import json
import os
import subprocess
import sys

_TORCH = "torch"
_ADDED = "objcomm"
_ALL_OF_IT = "objcomm._public"  # the package alone imports nothing before a name is used
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
    """Seconds to import torch alone, objcomm once torch is there, and the two together."""
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
    printed = subprocess.run(  # noqa: S603  # this very interpreter
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout
    return [float(seconds) for seconds in json.loads(printed)]
