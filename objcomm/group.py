"""One process group as objcomm sees it: ranks, links, lanes and time limits.

The only place where global ranks become group ranks. Knows nothing of operations.
"""

import operator
import os
import threading
import weakref
from contextvars import ContextVar, Token
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeAlias

import torch.distributed as dist

from objcomm.counters import Counters
from objcomm.errors import BrokenGroupError, UsageError, text_of
from objcomm.frames import fingerprint
from objcomm.transport.base import LANE_BITS, Deadline, DeviceLink
from objcomm.transport.gloo import GlooLink
from objcomm.transport.lane import Lane
from objcomm.transport.nccl import device_link

#: What ``timeout=`` takes: seconds, a timedelta, or None for the group's own.
Timeout: TypeAlias = float | timedelta | None

# Where a group's own limit can't be found: torch's default for Gloo.
_TIMEOUT_SECONDS = 1800.0

_lane_name: ContextVar[str] = ContextVar("objcomm_lane", default="")


class Group:
    """One process group as objcomm sees it; every rank in here is a rank within the group.

    Attributes:
        rank: this process's.
        size: number of ranks.
        ranks: their global ranks, in group order.
        counters: what its operations cost this rank.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.rank = 0
        self.ranks: tuple[int, ...] = (0,)
        if process_group is None:
            self._process_group = None
            self._timeout_seconds = _TIMEOUT_SECONDS
        else:
            self.rank = process_group.rank()
            self.ranks = tuple(dist.get_process_group_ranks(process_group))
            # Weak, or the state of a destroyed group would live as long as the process.
            self._process_group = weakref.ref(process_group)
            self._timeout_seconds = _timeout_seconds(process_group)
        self.size = len(self.ranks)
        self.counters = Counters()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lanes: dict[str, Lane] = {}
        self._link: GlooLink | None = None
        self._device_link: DeviceLink | None = None
        self._broken_by = ""

    def root(self, operation: str, global_rank: int | None, group_rank: int | None) -> int:
        """The group rank that a call's ``src``/``dst`` or ``group_src``/``group_dst`` means.

        Raises:
            UsageError: both were given, or there is no such rank in this group.
        """
        if global_rank is not None and group_rank is not None:
            raise UsageError(f"{operation}: give a global rank or a group rank, not both")
        if group_rank is not None:
            rank = _index(operation, group_rank)
            if not 0 <= rank < self.size:
                raise UsageError(f"{operation}: a group of {self.size} has no rank {rank}")
            return rank
        if global_rank is None:
            return 0
        rank = _index(operation, global_rank)
        if rank not in self.ranks:
            raise UsageError(
                f"{operation}: global rank {rank} is not in this group, which has "
                f"{list(self.ranks)}; a rank within the group goes into group_src= or group_dst="
            )
        return self.ranks.index(rank)

    def deadline(self, operation: str, timeout: Timeout) -> Deadline:
        """The time limit of one call.

        Raises:
            UsageError: it is not a positive time.
        """
        if timeout is None:
            return Deadline(self._timeout_seconds)
        seconds: Any = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not isinstance(seconds, (int, float)) or not seconds > 0:
            raise UsageError(f"{operation}: timeout={timeout!r} is not a positive time")
        return Deadline(seconds)

    def link(self, operation: str, deadline: Deadline) -> GlooLink:
        """What joins the ranks; the first use makes it, which all ranks must join.

        Raises:
            BrokenGroupError: an earlier error ended it.
            UsageError: this process was forked from the one that made it.
            TransportTimeout: not every rank came.
        """
        if self._broken_by:
            raise BrokenGroupError(operation, self._broken_by)
        if self._pid != os.getpid():
            raise UsageError(
                f"{operation}: a forked process cannot use its parent's connections; "
                "call objcomm from the process that called init_process_group"
            )
        if self._link is None:
            with self._lock:
                if self._link is None:
                    process_group = self._own()
                    store = process_group.get_group_store()
                    # The link last: a thread that sees it needs no lock.
                    self._device_link = device_link(process_group)
                    self._link = GlooLink(store, self.rank, self.size, deadline)
        return self._link

    @property
    def device_link(self) -> DeviceLink | None:
        """What joins the ranks' accelerators, once ``link`` was called."""
        return self._device_link

    def lane(self, operation: str) -> Lane:
        """The lane of the calling thread.

        Raises:
            UsageError: another thread, which still lives, uses it; or this thread does, and waits
                for a callback; or another lane's name has the same number.
        """
        name, thread = _lane_name.get(), threading.current_thread()
        lane = self._lanes.get(name)
        if lane is not None and lane.owner is thread:
            if lane.busy_with:
                raise UsageError(
                    f"{operation}: a callback of {lane.busy_with} cannot use the group that waits "
                    "for it; communicate before or after that call"
                )
            return lane
        with self._lock:
            lane = self._lanes.get(name) or self._new_lane(name, thread)
            if lane.owner is not thread and lane.owner.is_alive():
                which = f"lane {name!r} of this group" if name else "this group"
                raise UsageError(
                    f"{operation}: thread {lane.owner.name!r} already uses {which}; let "
                    f"{thread.name!r} take a lane of its own: with objcomm.lane('…'):"
                )
            lane.owner = thread
            return lane

    def _new_lane(self, name: str, thread: threading.Thread) -> Lane:
        number = fingerprint(name) % (1 << LANE_BITS)
        for other in self._lanes.values():
            if other.number == number:
                raise UsageError(f"lanes {other.name!r} and {name!r} collide; rename one of them")
        self._lanes[name] = Lane(name, number, thread)
        return self._lanes[name]

    def give_up(self, error: BaseException) -> None:
        """Close this group's connections because of ``error``, so that no rank waits for this."""
        if not self._broken_by:
            self._broken_by = text_of(error)
            if self._link is not None:
                self._link.abort()

    def _own(self) -> Any:
        process_group = self._process_group and self._process_group()
        if process_group is None:
            raise UsageError("this process group was destroyed")
        return process_group


def _index(operation: str, rank: object) -> int:
    """A rank as a number, numpy's integers included.

    Raises:
        UsageError: it is none; a float or a bool is a mistake of the caller's.
    """
    try:
        if not isinstance(rank, bool):
            return operator.index(rank)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        pass
    raise UsageError(f"{operation}: {rank!r} is no rank")


def _timeout_seconds(process_group: Any) -> float:
    for device in process_group._device_types:  # noqa: SLF001  # torch has no public way to ask
        backend = process_group._get_backend(device)  # noqa: SLF001  # likewise
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return _TIMEOUT_SECONDS


class lane:  # noqa: N801  # used as a function, like contextlib's
    """Let a second thread use a group: its calls in this block are a sequence of their own.

    Calls of one lane pair with the same lane's calls on the other ranks, in order, whatever other
    threads do meanwhile. The first thread to use a group needs no lane.

    Args:
        name: the same on every rank. Use few names, again and again: each keeps 32 KiB for every
            peer, and of some hundred names two may collide, which raises UsageError.

    Example:
        >>> import objcomm
        >>> with objcomm.lane("eval"):
        ...     scores = objcomm.all_gather(0.5)
        >>> scores
        [0.5]
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise UsageError("a lane needs a name")
        self._name = name
        self._tokens: list[Token[str]] = []

    def __enter__(self) -> None:
        self._tokens.append(_lane_name.set(self._name))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _lane_name.reset(self._tokens.pop())
