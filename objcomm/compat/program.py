"""Replace torch's object collectives in a whole program, and report what was replaced and its cost.

``startup.sitecustomize`` starts this in each process of the program that has imported torch.
Reports go to standard error.

The cost is one table on rank 0. Each rank counts its own calls. When it leaves the world, it puts
its figures into the world's store, which may not exist later. Rank 0 reads them from there, and
waits a few seconds for ranks that have yet to leave.
"""

import atexit
import contextlib
import os
import statistics
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

import objcomm
from objcomm._failures.noticeboard import BoardThread, StoreSilentError
from objcomm._failures.watchdog import board_thread_of
from objcomm._observe import recorder
from objcomm._observe.history import CallRecord, Counters
from objcomm._observe.terminal import aligned
from objcomm._transport.store import pack_record, refuse_lost, unpack_record
from objcomm._world import default_group, inheritance, is_reachable, is_world, rank, store_of
from objcomm.compat import torch as replacing
from objcomm.compat.patching import Patch, Switch
from objcomm.errors import WireError, grouped, ranks_text

#: The functions that are replaced, and counted.
NAMES = sorted(set(replacing.__all__) - {"patch"})

_MOST_LINES = 5
# Rank 0 compares ranks, so each rank sends more lines than are shown: 3 KB.
_MOST_LINES_GIVEN = 30

# How long rank 0 waits for the others when it leaves the world normally, and after an error.
_PATIENCE_SECONDS = 5.0
_FAILED_PATIENCE_SECONDS = 1.0
_LOOK_SECONDS = 0.05

_PACKAGE = str(Path(objcomm.__file__).parent)
# Installed and generated code ("<string>") does not belong to the program.
_NOT_THE_PROGRAM = (
    "<",
    _PACKAGE,
    *(sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def begin(*, is_first: bool, has_report: bool) -> None:
    """Replace the functions in this process permanently.

    Args:
        is_first: whether this process runs the program itself and was not started by it. If so,
            rank 0 reports what was replaced.
        has_report: whether rank 0 reports at its end what the calls have cost the ranks.
    """
    replacing.patch()
    if os.environ.get("OBJCOMM_CHECK") != "0":
        replacing.check_calls()
    if is_first and rank() == 0:
        if dist.is_available():
            _print_lines(f"objcomm {objcomm.__version__} in place of torch's {', '.join(NAMES)}")
        else:
            _print_lines("nothing is replaced: this torch has no distributed")
    if has_report:
        reporting = Report()
        recorder.listeners.append(reporting.add)
        if dist.is_available():
            reporting.exchange_before_leaving()
        atexit.register(reporting.end, is_asked=is_first)


def _print_lines(*lines: str) -> None:
    text = "".join(f"objcomm.run: {line}\n" for line in lines)
    # A closed standard error must not end the program.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


class Cost(NamedTuple):
    """The cost to one rank of its calls to one function, from all lines or from a single one."""

    name: str
    calls: int
    sent_nbytes: int
    seconds: float


class Figures(NamedTuple):
    """The cost of one rank's calls, by function and by line of the program."""

    functions: tuple[Cost, ...] = ()
    lines: tuple[Cost, ...] = ()


class Report:
    """Counts this process's calls; on rank 0, also collects the figures of the other ranks."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._pid = os.getpid()
        self._folder = _working_directory()
        self._rank = -1
        self._functions = Counters()
        self._lines = Counters()
        self._others: dict[int, Figures] = {}
        self._missing: dict[int, str] = {}

    def add(self, call: CallRecord) -> None:
        """Count a completed call, on the thread that made it."""
        if call.operation not in NAMES:
            return  # the program itself called objcomm
        self._rank = rank()  # known now; the group may be gone later
        line = (_line() or call.header.call_site).removeprefix(self._folder)
        for counters, name in (
            (self._functions, call.operation),
            (self._lines, f"{line}  {call.operation}"),
        ):
            counters.add(name, (0, call.sent_nbytes, call.received_nbytes), call.seconds)

    def exchange_before_leaving(self) -> Patch:
        """Make the ranks exchange their figures whenever the world is about to be destroyed."""
        destroy = dist.destroy_process_group

        def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
            self.exchange()
            destroy(group)

        return Patch(
            Switch(
                lambda: (dist, dist.distributed_c10d),
                {"destroy_process_group": destroy_process_group},
                lambda group: group is None or is_world(group),
            )
        )

    def exchange(self) -> None:
        """Send this rank's figures to rank 0, or collect them there, if there is a world."""
        world = default_group()
        if world is None or os.getpid() != self._pid or inheritance.has(world):
            return
        self._rank, size = world.rank(), world.size()
        if size == 1 or not is_reachable(None):
            return
        # The store's host may be gone, and so may the board's thread.
        with contextlib.suppress(StoreSilentError, RuntimeError):
            if self._rank == 0:
                self._take_in(board_thread_of(world), range(1, size))
            else:
                if not self._functions.snapshot():
                    refuse_lost(store_of(world))  # a first connection attempt can take minutes
                mine = pack_record(self._figures())
                board_thread_of(world).call(
                    lambda board: board.publish_figures(mine), _PATIENCE_SECONDS
                )

    def _take_in(self, board_thread: BoardThread, ranks: Sequence[int]) -> None:
        has_failed = sys.exc_info()[1] is not None or hasattr(sys, "last_value")
        patience = _FAILED_PATIENCE_SECONDS if has_failed else _PATIENCE_SECONDS
        until = time.monotonic() + patience
        late = f"not at the end within {patience:g} s of rank 0"
        self._others.clear()  # from an earlier world; the new figures include them
        self._missing = dict.fromkeys(ranks, late)
        processes = board_thread.processes
        while late in self._missing.values():
            # Checked before the figures are read, because a rank writes its figures before it ends.
            ended = {each for each in self._missing if processes.end_of(each)}
            is_last = time.monotonic() >= until
            board_thread.call(lambda board: board.learn(list(self._missing)), _PATIENCE_SECONDS)
            for each in tuple(self._missing):
                process = processes.of(each)
                if process is not None and process.figures:
                    with contextlib.suppress(WireError):
                        self._others[each] = unpack_record(process.figures, Figures, "figures")
                    del self._missing[each]
                elif each in ended:
                    self._missing[each] = "ended before it could report"
            if is_last:
                return
            time.sleep(_LOOK_SECONDS)

    def end(self, *, is_asked: bool) -> None:
        """Exchange the figures for the last time, and print the report.

        Args:
            is_asked: whether to print a report even if there were no calls.
        """
        self.exchange()
        _print_lines(*self._lines_of_report(is_asked=is_asked))

    def _lines_of_report(self, *, is_asked: bool) -> list[str]:
        """Return the lines to print; none on ranks other than 0, and none in a forked process."""
        own = self._figures()
        place = max(self._rank if self._rank >= 0 else rank(), 0)
        if os.getpid() != self._pid or place != 0:
            return []
        of_ranks = {0: own, **self._others}
        seconds = time.perf_counter() - self._began
        if any(each.functions for each in of_ranks.values()):
            count = f"{len(of_ranks)} rank{'s' if len(of_ranks) > 1 else ''}"
            report = [f"torch's object collectives on {count}, in a program of {seconds:.3f} s"]
            report += _table(
                "function", {each: found.functions for each, found in of_ranks.items()}
            )
            lines = {each: found.lines for each, found in of_ranks.items()}
            report += _table("slowest lines", lines)[: _MOST_LINES + 1]
        elif is_asked:
            nothing = f"no call of torch's object collectives in {seconds:.3f} s"
            report = [f"{nothing} (process {self._pid})"]
        else:
            return []
        missing = grouped((why, absent) for absent, why in self._missing.items())
        report += [f"without {ranks_text(absent)}: {why}" for why, absent in missing.items()]
        return report

    def _figures(self) -> Figures:
        return Figures(_costs(self._functions), _costs(self._lines)[:_MOST_LINES_GIVEN])


def _costs(counters: Counters) -> tuple[Cost, ...]:
    """Return the counted costs, the longest first."""
    found = [
        Cost(name, of.calls, of.sent_nbytes, of.seconds) for name, of in counters.snapshot().items()
    ]
    return tuple(sorted(found, key=lambda each: -each.seconds))


def _table(title: str, of_ranks: Mapping[int, Iterable[Cost]]) -> list[str]:
    """Format a header row and one row per name, sorted by the longest time of any rank."""
    by_name = defaultdict[str, list[tuple[float, int, Cost]]](list)
    for rank_of, costs in of_ranks.items():
        for cost in costs:
            by_name[cost.name].append((cost.seconds, rank_of, cost))
    rows = []
    for name, found in by_name.items():
        (least, first, _), (most, last, _) = min(found), max(found)
        calls = sorted({cost.calls for _, _, cost in found})
        row = (
            name,
            str(len(found)),
            str(calls[0]) if len(calls) == 1 else f"{calls[0]}-{calls[-1]}",
            _size(sum(cost.sent_nbytes for _, _, cost in found)),
            f"{least:.3f} s (rank {first})",
            f"{statistics.median(seconds for seconds, _, _ in found):.3f} s",
            f"{most:.3f} s (rank {last})",
        )
        rows.append((most, row))
    rows.sort(key=lambda each: -each[0])
    head = (title, "ranks", "calls", "sent", "min", "median", "max")
    table = aligned([head, *(row for _, row in rows)], is_right=True)
    return [f"  {line}" for line in table]


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:  # noqa: PLR2004  # of one unit in the next
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} GB"


def _line() -> str:
    """Return the innermost ``file:line`` of the program on this thread; empty if there is none."""
    frame = sys._getframe(1)  # noqa: SLF001  # as ``call_site`` does
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    path = frame.f_code.co_filename
    return "" if path.startswith(_NOT_THE_PROGRAM) else f"{path}:{frame.f_lineno}"


def _working_directory() -> str:
    """Return the prefix of paths below the working directory; they are shown without it."""
    try:
        return f"{Path.cwd()}{os.sep}"
    except OSError:  # it was removed
        return ""
