"""What a test leaves behind in its process; checked after each test with ``--leftovers``.

Between two tests the ranks of a pool then leave their world and join a new one, so whatever objcomm
and torch keep for a group must be gone as well: threads, descriptors, keys in the store.
"""

import collections
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from objcomm._config import settings

__all__ = ["OPTION", "VARIABLE", "Leftovers", "profile_once"]

OPTION = "--leftovers"
#: The variable that passes the option to the ranks.
VARIABLE = "OBJCOMM_TESTS_LEFTOVERS"

# An idle thread ends after a second; a busy machine gets more time.
_SETTLE_S = 15.0
_LOOK_S = 0.02


class Leftovers:
    """A snapshot of this process, to compare with a later state."""

    def __init__(self) -> None:
        self._before = {kind: look() for kind, look in _KINDS.items()}
        gc.freeze()  # the later search then takes 0.03 s, not a second: torch has many objects

    def find(self) -> list[str]:
        """Return what is new or gone since the snapshot, after time to settle."""
        until = time.monotonic() + _SETTLE_S
        gc.collect()  # an error that a test caught refers to its frames and what they held
        while (found := self._compare()) and time.monotonic() < until:
            time.sleep(_LOOK_S)
            gc.collect()  # a thread that has ended since then may have left a reference cycle
        return found

    def _compare(self) -> list[str]:
        found = []
        for kind, look in _KINDS.items():
            before, now = self._before[kind], look()
            found += [f"{kind}: {name} ({count} more)" for name, count in (now - before).items()]
            # Threads and descriptors from before the test may end late.
            if kind in _MUST_STAY:
                found += [f"{kind}: {name} is gone" for name in before - now]
        return found


@functools.cache
def profile_once() -> None:
    """Let torch create what the first profiler of a process leaves: a thread, and modules.

    One of these, ``torch.distributed.nn``, has the world as a default argument of its functions,
    and so keeps the world in which it is imported alive. Call this before there is one.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass


def _descriptors() -> collections.Counter[str]:
    kinds: collections.Counter[str] = collections.Counter()
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  # names only; entries come and go
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")  # noqa: PTH115  # not a path of a file
        except OSError:  # the descriptor of this listing
            continue
        kinds[target.partition(":")[0] if ":" in target else target] += 1
    return kinds


def _threads() -> collections.Counter[str]:
    names = collections.Counter(
        thread.name.rstrip("0123456789-_") for thread in threading.enumerate()
    )
    native = sum(1 for _ in Path("/proc/self/task").iterdir()) - threading.active_count()
    names["outside Python"] = max(0, native)
    return names


def _children() -> collections.Counter[str]:
    pids: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            pids += (task / "children").read_text().split()
    return collections.Counter({"of this process": len(pids)})


def _environment() -> collections.Counter[str]:
    return collections.Counter(
        f"{name}={value!r}"
        for name, value in os.environ.items()
        if not name.startswith(
            ("PYTEST_", "TORCHINDUCTOR_")
        )  # torch's own, from its first compilation
    )


def _settings() -> collections.Counter[str]:
    """Count what exists once per process."""
    log = logging.getLogger("objcomm")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Libraries that are imported late add them for their own types.
    filters = [each for each in warnings.filters if each[2].__module__ == "builtins"]
    return collections.Counter(
        {
            f"folder {os.getcwd()}": 1,  # noqa: PTH109  # as a string
            f"arguments {sys.argv}": 1,
            f"import path {sys.path}": 1,
            f"default dtype {torch.get_default_dtype()}": 1,
            f"default device {torch.get_default_device()}": 1,
            f"gradients {torch.is_grad_enabled()}": 1,
            f"handlers {handlers}": 1,
            f"filters of warnings {filters}": 1,
            f"excepthook of threads {threading.excepthook}": 1,
            f"options of objcomm {settings()}": 1,
            f"log of objcomm {log.level} {log.propagate} {log.handlers} {log.filters}": 1,
        }
    )


_KINDS: Mapping[str, Callable[[], collections.Counter[str]]] = {
    "descriptors": _descriptors,
    "threads": _threads,
    "children": _children,
    "environment": _environment,
    "settings": _settings,
}
_MUST_STAY = {"environment", "settings"}
