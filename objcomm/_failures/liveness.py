"""Which processes of a world are alive, judged by the processes and not by their connections.

Connections are poor evidence: a group has none before its first use, nor between a recoverable
error and its next call, and a child forked by a dead rank keeps that rank's connections open. So
each process publishes a record of itself in the store when it first uses a world, and adds the
reason when it ends normally. For processes on the same host the kernel answers immediately. For
processes on other hosts, a rank on that host writes the reason into the record of the dead one.
"""

import os
import random
import select
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from objcomm._environment import machine, namespace
from objcomm._failures.verdict import FAREWELLS
from objcomm.errors import Position

#: Prefix of the reason for a process that ended without publishing one.
KILLED = "its process, "

_PF_EXITING = 0x4  # linux/sched.h
_MOST_AT_A_LOOK = 16
# The watchdog looks every quarter of a second.
_ONE_LOOK_SECONDS = 0.1


class LaneCalls(NamedTuple):
    """What a rank publishes about one of its lanes when it no longer needs the connections.

    Attributes:
        number: the lane's number.
        calls: how many calls were made on it.
        step: operation, root and fingerprint of the last call.
        last: the position of the last call.
        is_open: whether a thread may have been cut off between its calls.
    """

    number: int
    calls: int
    step: tuple[int, ...]
    last: Position
    is_open: bool


class GroupCalls(NamedTuple):
    """What a rank publishes about all of its lanes on one mesh.

    Attributes:
        mesh: the mesh's number, as in message headers.
        rank: the group rank.
        members: global ranks of the group; empty if there are more than 64.
        lanes: the lanes that the rank has used.
        is_single: whether no thread but the main one could have made calls on further lanes.
        left_by: how the rank left, and at which line; empty if its program ended.
        failure: the error, if the rank leaves because of one; others may have made more calls.
    """

    mesh: int
    rank: int
    members: tuple[int, ...]
    lanes: tuple[LaneCalls, ...]
    is_single: bool
    left_by: str = ""
    failure: str = ""

    @property
    def last(self) -> Position | None:
        """Position of the last call; None if the rank has used several lanes."""
        if not self.lanes:
            return Position(self.rank, "", 0, -1, "", is_over=True)
        return self.lanes[0].last if len(self.lanes) == 1 else None


class Process(NamedTuple):
    """The record of one process, as published in the store.

    Attributes:
        name: a unique identifier, different in each world.
        place: host and PID namespace; equal for processes that can look up each other's PID.
        pid: the process ID.
        born: start time in the kernel's clock ticks, because PIDs are reused; 0 if unknown.
        end_reason: why it ended or left its world; empty while it is alive.
        calls: the calls it made, published when it will make no more.
        figures: the cost of its calls, packed by ``compat.report``; empty without a report.
        world_size: number of ranks in its world; 0 if unknown.
        hosts_store: whether it hosts its world's store.
    """

    name: str
    place: str
    pid: Annotated[int, range(1, 1 << 31)]  # passed to kill(), where a negative one means a group
    born: int
    end_reason: str = ""
    calls: tuple[GroupCalls, ...] = ()
    figures: bytes = b""
    world_size: Annotated[int, range(1 << 20)] = 0
    hosts_store: bool = False

    @classmethod
    def own(cls) -> Self:
        """Create the record of this process."""
        return cls(uuid.uuid4().hex, _place(), os.getpid(), _born(os.getpid()))

    def has_ended(self) -> bool:
        """Whether the kernel reports that it has ended; valid only for a process of this place."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except (AttributeError, OSError):  # not Linux, or no file descriptors left
            return not _is_there(self.pid)
        try:
            watched = select.poll()
            watched.register(descriptor, select.POLLIN)
            # A zombie counts as ended: its descriptor is readable.
            return bool(watched.poll(0)) or _is_another_or_ending(self.pid, self.born)
        finally:
            os.close(descriptor)

    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or debugger; valid only for a process of this place."""
        return _stat(self.pid)[:1] in (["T"], ["t"])


class Processes:
    """What this process knows about the processes of one world. Thread-safe.

    Attributes:
        own: the record of this process.
        is_new: whether the store held no record of an earlier world for this rank. If it did, a
            dead process that was never seen alive may belong to that earlier world.
    """

    def __init__(self) -> None:
        self.own = Process.own()
        self.is_new = True
        self._known: dict[int, Process] = {}
        self._noticed: dict[str, float] = {}

    def note(self, rank: int, process: Process) -> None:
        """Record a rank's process as read from the store."""
        known = self._known.get(rank)
        is_other = known is None or known.name != process.name
        if self.is_new or not is_other or not self._end(process):
            self._known[rank] = process

    def note_end(self, rank: int, end_reason: str) -> None:
        """Record the end of a rank's process about which nothing else is known."""
        self._known[rank] = Process(uuid.uuid4().hex, "", 0, 0, end_reason)

    def of(self, rank: int) -> Process | None:
        """Return a rank's process record; None if it is not known."""
        return self._known.get(rank)

    def calls_of(self, rank: int, mesh: int) -> GroupCalls | None:
        """Return the calls that a rank made over a mesh; None if it has not published them."""
        process = self._known.get(rank)
        calls = () if process is None else process.calls
        return next((each for each in calls if each.mesh == mesh), None)

    def some_of(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks to check in one pass, in ascending order.

        Includes every rank whose end is already known or noticed. Other processes of this host cost
        20 to 80 µs of system calls each, so only the first of them, in the order given, and up to
        15 random others are included: 64 ranks of one host that check all others four times a
        second would keep two cores busy. The sample differs per pass and per rank, and a rank that
        finds a dead process reports it to the rest.
        """
        known = [(rank, self._known[rank]) for rank in ranks if rank in self._known]
        found = [rank for rank, each in known if each.end_reason or each.name in self._noticed]
        beside = [rank for rank, _ in known if rank not in found and self.is_beside(rank)]
        first, others = beside[:1], beside[1:]
        some = random.sample(others, min(len(others), _MOST_AT_A_LOOK - 1))
        return sorted([*found, *first, *some])

    def is_beside(self, rank: int) -> bool:
        """Whether a rank's process is on this host, so the kernel knows whether it is alive."""
        process = self._known.get(rank)
        return process is not None and process.place == self.own.place

    def killed(self) -> dict[int, str]:
        """Return the ranks whose processes ended without publishing a reason, each with a text."""
        ends = {rank: self.end_of(rank) for rank in tuple(self._known)}
        return {rank: why for rank, why in ends.items() if why.startswith(KILLED)}

    def noticed_first(self, ranks: Iterable[int]) -> set[int]:
        """Return those of ``ranks`` whose end was noticed first, or in the same pass as the first.

        The end of each must have been noticed.
        """
        at = {rank: self._noticed[self._known[rank].name] for rank in ranks}
        return {
            rank for rank, seconds in at.items() if seconds - min(at.values()) < _ONE_LOOK_SECONDS
        }

    def has_died(self, rank: int) -> bool:
        """Whether a rank's process has ended, other than normally or by destroying its group."""
        end = self.end_of(rank)
        return bool(end) and end not in FAREWELLS

    def stopped(self) -> set[int]:
        """Return the ranks whose processes are on this host and stopped."""
        known = tuple(self._known.items())
        return {rank for rank, each in known if self.is_beside(rank) and each.is_stopped()}

    def end_of(self, rank: int, for_seconds: float = 0.0) -> str:
        """Return why a rank's process has ended; empty if not known for ``for_seconds`` yet."""
        process = self._known.get(rank)
        end = "" if process is None else self._end(process)
        if process is None or not end:
            return ""
        now = time.monotonic()
        return end if now - self._noticed.setdefault(process.name, now) >= for_seconds else ""

    def _end(self, process: Process) -> str:
        if process.end_reason or process.place != self.own.place or not process.has_ended():
            return process.end_reason
        return f"{KILLED}{process.pid}, has ended"


def _place() -> str:
    try:
        return f"{machine()}/{namespace('pid')}"
    except OSError:
        return machine()


def _born(pid: int) -> int:
    return _birth_and_flags(pid)[0]


def _is_another_or_ending(pid: int, born: int) -> bool:
    """Whether the PID was reused, or its process is exiting and has closed its sockets."""
    began, flags = _birth_and_flags(pid)
    # Start times are 0 if either process had no file descriptor left to read them.
    is_another = bool(began and born) and began != born
    return is_another or bool(flags & _PF_EXITING)


def _birth_and_flags(pid: int) -> tuple[int, int]:
    fields = _stat(pid)
    return (int(fields[19]), int(fields[6])) if fields else (0, 0)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, see proc_pid_stat(5); may be empty."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return status.rpartition(")")[2].split()


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True
