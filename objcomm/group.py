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
from objcomm.history import History
from objcomm.transport.base import LANE_BITS, Deadline, DeviceLink
from objcomm.transport.lane import Lane
from objcomm.transport.mesh import Mesh
from objcomm.transport.nccl import device_link
from objcomm.transport.regions import regions
from objcomm.transport.verdict import Verdict
from objcomm.transport.watch import bulletin_of, end_elsewhere, watch

#: What ``timeout=`` takes: seconds, a timedelta, or None for the group's own.
Timeout: TypeAlias = float | timedelta | None

# Where a group's own limit can't be found: torch's default for Gloo.
_TIMEOUT_SECONDS = 1800.0

_lane_name: ContextVar[str] = ContextVar("objcomm_lane", default="")


class Group:
    """One process group as objcomm sees it; every rank in here is a rank within the group.

    Attributes:
        name: torch's, the same on every rank; empty where torch.distributed is not initialised.
        description: what torch says that it is for.
        rank: this process's.
        size: number of ranks.
        ranks: their global ranks, in group order.
        counters: what its operations cost this rank.
        history: its last operations on this rank.
    """

    def __init__(self, process_group: Any = None, world: Any = None) -> None:
        self.name = getattr(process_group, "group_name", "")
        self.description = getattr(process_group, "group_desc", "")
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
        self.history = History()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._world: Any = None if world is None else weakref.ref(world)
        self._mesh: Mesh | None = None
        self._owed: dict[str, Verdict] = {}  # by lane, what ended an earlier mesh
        self._device_link: DeviceLink | None = None

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

    def enter(self, operation: str, deadline: Deadline, call_site: str) -> tuple[Mesh, Lane]:
        """The connections and the calling thread's lane; the first use makes all ranks meet.

        Raises:
            BrokenGroupError: an earlier error ended the group.
            ObjcommError: what ended the connections since this lane's last call, once.
            UsageError: this process was forked from the one that made the group; or another live
                thread has the lane, or this one has it and waits for a callback.
            TransportTimeout: not every rank came.
        """
        if self._pid != os.getpid():
            raise UsageError(
                f"{operation}: a forked process cannot use its parent's connections; "
                "call objcomm from the process that called init_process_group"
            )
        name, mesh = _lane_name.get(), self._mesh
        if mesh is None or mesh.verdict is not None or self._owed:
            mesh = self._settled(operation, name)
        lane = mesh.lanes.get(name)
        if lane is None or lane.owner is not threading.current_thread():
            lane = self._taken(operation, mesh, name)
        if lane.entry is not None:
            waiting = f"{lane.entry.operation} at {lane.entry.header.call_site}"
            raise UsageError(
                f"{operation}: a callback of {waiting} cannot use the group that waits "
                "for it; communicate before or after that call"
            )
        if mesh.link is None:
            lane.regions = regions.get()
            store = self._own().get_group_store()
            mesh.connect(store, deadline, lane, operation, call_site)
        return mesh, lane

    @property
    def device_link(self) -> DeviceLink | None:
        """What joins the ranks' accelerators, once ``enter`` was called."""
        return self._device_link

    @property
    def verdict(self) -> Verdict | None:
        """What has ended the connections, if anything has."""
        return None if self._mesh is None else self._mesh.verdict

    @property
    def is_broken(self) -> bool:
        """Whether the group can carry no more objects."""
        mesh = self._mesh
        return mesh is not None and mesh.verdict is not None and not mesh.can_be_replaced

    def fail(self, key: str, verdict: Verdict) -> Verdict:
        """Tell all ranks in the block ``key`` that this one failed; returns what all raise."""
        return verdict if self._mesh is None else self._mesh.fail(key, verdict)

    def failed(self, key: str) -> Verdict | None:
        """What some rank has told of the block ``key``, where its mesh has been replaced since."""
        mesh = self._mesh
        is_same = mesh is None or (mesh.verdict is None and key.startswith(mesh.nonce))
        return None if mesh is None or is_same else mesh.failed(key)

    def leave(self, key: str) -> None:
        """Forget the block ``key``, which this rank leaves by an error."""
        if self._mesh is not None:
            self._mesh.leave(key)

    def absolve(self, verdict: Verdict) -> None:
        """End the connections by a verdict that the calling thread raises elsewhere.

        Other threads' lanes raise it in their next calls, as they do on the other ranks.
        """
        mesh = self._mesh
        if mesh is None or mesh.settle(verdict).name != verdict.name:
            return
        thread = threading.current_thread()
        with self._lock:
            for name, lane in mesh.lanes.items():
                if lane.owner is thread:
                    lane.owes = False
                    self._owed.pop(name, None)

    def _settled(self, operation: str, lane_name: str) -> Mesh:
        """A mesh that nothing has ended, once the lane has raised what ended the last one."""
        with self._lock:
            owed = self._owed.pop(lane_name, None)
            mesh = self._mesh
            if owed is None and mesh is not None and mesh.verdict is not None:
                lane = mesh.lanes.get(lane_name)
                if lane is not None and lane.owes:
                    lane.owes, owed = False, mesh.verdict
            if owed is not None:
                end_elsewhere(owed)
                raise owed.error(operation)
            if mesh is None or mesh.verdict is not None:
                mesh = self._mesh = self._renewed(operation, mesh)
            return mesh

    def _renewed(self, operation: str, ended: Mesh | None) -> Mesh:
        """A new mesh in the place of one that has ended."""
        if ended is not None and ended.verdict is not None:
            if not ended.can_be_replaced:
                raise BrokenGroupError(operation, text_of(ended.verdict.error("an earlier call")))
            # A thread that has ended is in no sequence of calls that others could be ahead of.
            lanes = [lane for lane in ended.lanes.values() if lane.owner.is_alive()]
            owing = [lane.name for lane in lanes if lane.owes]
            self._owed.update(dict.fromkeys(owing, ended.verdict))
        process_group = self._own()
        self._device_link = device_link(process_group)
        bulletin = bulletin_of(self._world())
        mesh = Mesh(process_group.group_name, self.ranks, self.rank, self.history, bulletin)
        if ended is not None and ended.link is None:
            mesh.failed_meeting = ended.nonce
        watch(mesh)
        return mesh

    def _taken(self, operation: str, mesh: Mesh, name: str) -> Lane:
        """The lane of that name for the calling thread."""
        thread = threading.current_thread()
        with self._lock:
            lane = mesh.lanes.get(name) or self._new_lane(mesh, name, thread)
            if lane.owner is not thread and lane.owner.is_alive():
                which = f"lane {name!r} of this group" if name else "this group"
                raise UsageError(
                    f"{operation}: thread {lane.owner.name!r} already uses {which}; let "
                    f"{thread.name!r} take a lane of its own: with objcomm.lane('…'):"
                )
            lane.owner = thread
            return lane

    def _new_lane(self, mesh: Mesh, name: str, thread: threading.Thread) -> Lane:
        number = fingerprint(name) % (1 << LANE_BITS)
        for other in mesh.lanes.values():
            if other.number == number:
                raise UsageError(f"lanes {other.name!r} and {name!r} collide; rename one of them")
        mesh.lanes[name] = Lane(name, number, thread)
        return mesh.lanes[name]

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
