"""A whole program with torch's object collectives replaced: what is told of that, and its cost.

Begun by ``startup.sitecustomize`` in each process of the program that has imported torch. Needs no
other rank and no group, which may be gone when a process ends. Speaks on standard error.
"""

import atexit
import contextlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

import objcomm
from objcomm._observe import recorder
from objcomm._observe.history import CallRecord, Counters, OperationStats
from objcomm._world import rank, world_size
from objcomm.compat import torch as replacing

_NAMES = sorted(set(replacing.__all__) - {"patch"})
_MOST_LINES = 5

_PACKAGE = str(Path(objcomm.__file__).parent)
# What is installed, and what is generated ("<string>"), is not the program's.
_NOT_THE_PROGRAM = (
    "<",
    _PACKAGE,
    *(sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def begin(*, is_first: bool, has_report: bool) -> None:
    """Replace the functions in this process, for good.

    Args:
        is_first: whether this process runs the program itself, and was not started by it. On rank 0
            it tells what was replaced.
        has_report: whether to tell at this process's end what they have cost it.
    """
    replacing.patch()
    replacing.check_calls(is_on=os.environ.get("OBJCOMM_CHECK") != "0")
    if is_first and rank() == 0:
        if dist.is_available():
            _tell(f"objcomm {objcomm.__version__} in place of torch's {', '.join(_NAMES)}")
        else:
            _tell("nothing is replaced: this torch has no distributed")
    if has_report:
        report = Report()
        recorder.listeners.append(report.add)
        atexit.register(report.tell, is_asked=is_first)


class Report:
    """What the replaced functions have cost this process, by function and by the program's line."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._pid = os.getpid()
        self._folder = _working_directory()
        self._place = (0, 0)
        self._functions = Counters()
        self._lines = Counters()

    def add(self, call: CallRecord) -> None:
        """Count a call that has ended; on the thread that made it."""
        if call.operation not in _NAMES:
            return  # the program's own, of objcomm
        self._place = rank(), world_size()  # known now; the group may be gone later
        line = f"{_line() or call.header.call_site}  {call.operation}"
        for counters, name in ((self._functions, call.operation), (self._lines, line)):
            counters.add(name, (0, call.sent_nbytes, call.received_nbytes), call.seconds)

    def tell(self, *, is_asked: bool) -> None:
        """Write it, in one piece; not in a process that has forked from the one that it is of.

        Args:
            is_asked: whether to tell of no call, too.
        """
        functions = self._functions.snapshot()
        if os.getpid() != self._pid or not (functions or is_asked):
            return
        own, size = self._place if functions else (max(rank(), 0), max(world_size(), 1))
        seconds = time.perf_counter() - self._began
        title = f"rank {own} of {size} (process {self._pid})"
        if not functions:
            _tell(f"{title}: no call of torch's object collectives in {seconds:.3f} s")
            return
        total = sum(each.seconds for each in functions.values())
        by_time = sorted(self._lines.snapshot().items(), key=lambda item: -item[1].seconds)
        _tell(
            f"{title}: {total:.3f} s of {seconds:.3f} s in torch's object collectives",
            *_table(functions.items()),
            "slowest lines:",
            *_table((line.removeprefix(self._folder), of) for line, of in by_time[:_MOST_LINES]),
        )


def _table(rows: Iterable[tuple[str, OperationStats]]) -> list[str]:
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    return [
        f"  {name:{width}}  {of.calls:>6} {'calls' if of.calls > 1 else 'call '}  "
        f"{of.seconds:>9.3f} s  "
        f"sent {_size(of.sent_nbytes):>8}  received {_size(of.received_nbytes):>8}"
        for name, of in listed
    ]


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:  # noqa: PLR2004  # of each unit in the next
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} GB"


def _line() -> str:
    """The innermost ``file:line`` of the program itself on this thread; empty if there is none."""
    frame = sys._getframe(1)  # noqa: SLF001  # as ``call_site`` does
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    path = frame.f_code.co_filename
    return "" if path.startswith(_NOT_THE_PROGRAM) else f"{path}:{frame.f_lineno}"


def _working_directory() -> str:
    """How the paths of files below it begin; they are shown without that."""
    try:
        return f"{Path.cwd()}{os.sep}"
    except OSError:  # it was removed
        return ""


def _tell(*lines: str) -> None:
    text = "".join(f"objcomm.run: {line}\n" for line in lines)
    # A closed standard error is no reason to end a program.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()
