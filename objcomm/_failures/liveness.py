"""Which processes of a world are there, known by the processes and not by their connections.

Connections come and go: a group has none before its first use, nor between an error that it
outlives and its next call, and a child that a dead rank has forked keeps that rank's open. So each
process tells the others in the store who it is, when it first uses a world, and leaves a word there
when it ends by itself. Whether a process of the same host is there, the kernel knows, and tells at
once; of those on other hosts the processes beside them tell, by writing that word in their place.
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

#: How the reason of a process begins that ended without a word of its own.
KILLED = "its process, "

_PF_EXITING = 0x4  # linux/sched.h
_MOST_AT_A_LOOK = 16
# The watchdog looks every quarter of a second.
_ONE_LOOK_SECONDS = 0.1


class LaneCalls(NamedTuple):
    """What a rank tells of one of its lanes when it needs the connections no longer.

    Attributes:
        number: the lane's.
        calls: how many it has had.
        step: operation, root and fingerprint of the last of them.
        last: where that was.
        is_open: whether a thread may have been cut off in the middle of its calls.
    """

    number: int
    calls: int
    step: tuple[int, ...]
    last: Position
    is_open: bool


class GroupCalls(NamedTuple):
    """What a rank tells of all lanes of a group's connections.

    Attributes:
        mesh: the connections' number, as headers carry it.
        rank: within the group.
        members: global ranks of the group; empty if there are many.
        lanes: those that it has used.
        is_single: whether no other thread could have made a call on another one.
        left_by: how and at which line it has left; empty where its program came to its end.
        failure: the reason if it leaves by an error, so that others may have made more calls.
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
        """Where its last call was; None if it has used several lanes."""
        if not self.lanes:
            return Position(self.rank, "", 0, -1, "", is_over=True)
        return self.lanes[0].last if len(self.lanes) == 1 else None


class Process(NamedTuple):
    """One process, as it tells the others of its world who it is.

    Attributes:
        name: unlike any other process's, and another one in each world.
        place: equal where processes can see each other by their numbers.
        pid: its number.
        born: when it began, as the kernel counts, because numbers are used again; 0 if unknown.
        word: why it has ended, or left its world; empty while it is there.
        calls: the calls it made, published when it will make no more.
        figures: what its calls have cost, packed by ``compat.report``; empty without a report.
    """

    name: str
    place: str
    pid: Annotated[int, range(1, 1 << 31)]  # the kernel is asked by it; negative, of many
    born: int
    word: str = ""
    calls: tuple[GroupCalls, ...] = ()
    figures: bytes = b""

    @classmethod
    def own(cls) -> Self:
        """This one."""
        return cls(uuid.uuid4().hex, _place(), os.getpid(), _born(os.getpid()))

    def has_ended(self) -> bool:
        """Whether the kernel says so, to a process of the same place."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except (AttributeError, OSError):  # no Linux, or no descriptors left
            return not _is_there(self.pid)
        try:
            watched = select.poll()
            watched.register(descriptor, select.POLLIN)
            # One that waits for its parent to take its exit status has ended, too.
            return bool(watched.poll(0)) or _is_another_or_ending(self.pid, self.born)
        finally:
            os.close(descriptor)

    def is_stopped(self) -> bool:
        """Whether a process of the same place is stopped, by SIGSTOP or a debugger."""
        return _stat(self.pid)[:1] in (["T"], ["t"])


class Processes:
    """What this process knows of the others of one world; any thread may ask.

    Attributes:
        own: this one.
        is_new: whether no earlier world had its ranks' words in the same store. Where one had, a
            process that was never seen alive may be that one's.
    """

    def __init__(self) -> None:
        self.own = Process.own()
        self.is_new = True
        self._known: dict[int, Process] = {}
        self._noticed: dict[str, float] = {}

    def note(self, rank: int, process: Process) -> None:
        """Take in who a rank's process is, or that it has ended."""
        known = self._known.get(rank)
        is_other = known is None or known.name != process.name
        if self.is_new or not is_other or not self._end(process):
            self._known[rank] = process

    def note_end(self, rank: int, word: str) -> None:
        """Take in that a rank's process has ended, or left the world, of which no more is known."""
        self._known[rank] = Process(uuid.uuid4().hex, "", 0, 0, word)

    def of(self, rank: int) -> Process | None:
        """A rank's process, as far as it is known."""
        return self._known.get(rank)

    def calls_of(self, rank: int, mesh: int) -> GroupCalls | None:
        """The calls that a rank made over a mesh, published when it needs the mesh no longer."""
        process = self._known.get(rank)
        calls = () if process is None else process.calls
        return next((each for each in calls if each.mesh == mesh), None)

    def some_of(self, ranks: Iterable[int]) -> list[int]:
        """The ranks to ask after in one look, in order.

        All whose end is known or was noticed. Of those that the kernel must be asked about, which
        takes 20 to 80 µs each, only the first and some others: 64 ranks of a host that ask after
        each other four times a second would keep two cores busy. The others differ at each look,
        and from rank to rank, and a rank that finds an end tells the rest.
        """
        known = [(rank, self._known[rank]) for rank in ranks if rank in self._known]
        found = [rank for rank, each in known if each.word or each.name in self._noticed]
        beside = [rank for rank, _ in known if rank not in found and self.is_beside(rank)]
        first, others = beside[:1], beside[1:]
        some = random.sample(others, min(len(others), _MOST_AT_A_LOOK - 1))
        return sorted([*found, *first, *some])

    def is_beside(self, rank: int) -> bool:
        """Whether the kernel can tell of a rank's process."""
        process = self._known.get(rank)
        return process is not None and process.place == self.own.place

    def killed(self) -> dict[int, str]:
        """The ranks whose processes have ended without a word of their own, each with why."""
        ends = {rank: self.end_of(rank) for rank in tuple(self._known)}
        return {rank: why for rank, why in ends.items() if why.startswith(KILLED)}

    def noticed_first(self, ranks: Iterable[int]) -> set[int]:
        """Of ranks whose ends were noticed, those that were at the first look of all."""
        at = {rank: self._noticed[self._known[rank].name] for rank in ranks}
        return {
            rank for rank, seconds in at.items() if seconds - min(at.values()) < _ONE_LOOK_SECONDS
        }

    def has_died(self, rank: int) -> bool:
        """Whether a rank's process has ended otherwise than by coming to its program's end."""
        end = self.end_of(rank)
        return bool(end) and end not in FAREWELLS

    def stopped(self) -> set[int]:
        """The ranks whose processes are on this host and stopped."""
        known = tuple(self._known.items())
        return {rank for rank, each in known if self.is_beside(rank) and each.is_stopped()}

    def end_of(self, rank: int, for_seconds: float = 0.0) -> str:
        """Why a rank's process has ended, if that was noticed so long ago; empty if not."""
        process = self._known.get(rank)
        end = "" if process is None else self._end(process)
        if process is None or not end:
            return ""
        now = time.monotonic()
        return end if now - self._noticed.setdefault(process.name, now) >= for_seconds else ""

    def _end(self, process: Process) -> str:
        if process.word or process.place != self.own.place or not process.has_ended():
            return process.word
        return f"{KILLED}{process.pid}, has ended"


def _place() -> str:
    try:
        return f"{machine()}/{namespace('pid')}"
    except OSError:
        return machine()


def _born(pid: int) -> int:
    return _birth_and_flags(pid)[0]


def _is_another_or_ending(pid: int, born: int) -> bool:
    """Whether the number is used again, or its process about to end, having closed its sockets."""
    began, flags = _birth_and_flags(pid)
    # Unknown where this process, or that one when it began, had no descriptor left to read it.
    is_another = bool(began and born) and began != born
    return is_another or bool(flags & _PF_EXITING)


def _birth_and_flags(pid: int) -> tuple[int, int]:
    fields = _stat(pid)
    return (int(fields[19]), int(fields[6])) if fields else (0, 0)


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process from its state on, see proc_pid_stat(5), or nothing."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return told.rpartition(")")[2].split()


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
