"""One process group as objcomm sees it: ranks, links, lanes and time limits.

The only place where global ranks become group ranks. Knows nothing of operations.
"""

import contextlib
import functools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar, Token
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeAlias

import torch.distributed as dist

from objcomm.counters import Counters
from objcomm.errors import UsageError
from objcomm.history import History
from objcomm.transport.base import FOREVER_SECONDS, Deadline, DeviceLink
from objcomm.transport.channel import Channel
from objcomm.transport.lane import IN_TURNS, Lane
from objcomm.transport.mailbox import Mailbox
from objcomm.transport.mesh import Mesh
from objcomm.transport.nccl import device_link
from objcomm.transport.order import Crew
from objcomm.transport.pair import Pair, say_farewell
from objcomm.transport.verdict import Verdict
from objcomm.transport.watch import check_running

#: What ``timeout=`` takes: seconds, a timedelta, or None for the group's own.
Timeout: TypeAlias = float | timedelta | None

# Where a group's own limit can't be found: torch's default for Gloo.
_TIMEOUT_SECONDS = 1800.0

_lane_name: ContextVar[str] = ContextVar("objcomm_lane", default="")


def seconds_of(operation: str, timeout: float | timedelta) -> float:
    """What ``timeout=`` means, in seconds: ``FOREVER_SECONDS`` if that is longer, or infinity.

    Raises:
        UsageError: it is not a positive time.
    """
    seconds: Any = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:
        raise UsageError(f"{operation}: timeout={timeout!r} is not a positive time")
    return float(min(seconds, FOREVER_SECONDS))


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
        mailbox: messages from rank to rank that have come here.
        crew: threads for calls that end in any order.
        hosts: where each rank runs, once ``node_group`` has asked; empty before.
    """

    def __init__(self, process_group: Any = None, world: Any = None) -> None:
        self.name = getattr(process_group, "group_name", "")
        self.description = getattr(process_group, "group_desc", "")
        self.rank = 0
        self.ranks: tuple[int, ...] = (0,)
        self._own: Callable[[], Any]
        if process_group is None:
            self._own = functools.partial(_living, _nothing)
            self._timeout_seconds = _TIMEOUT_SECONDS
        else:
            self.rank = process_group.rank()
            self.ranks = tuple(dist.get_process_group_ranks(process_group))
            # Weak, or the state of a destroyed group would live as long as the process.
            self._own = functools.partial(_living, weakref.ref(process_group))
            self._timeout_seconds = _timeout_seconds(process_group)
        self.size = len(self.ranks)
        self.counters = Counters()
        self.history = History()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._world = functools.partial(_living, _nothing if world is None else weakref.ref(world))
        self._whole = self._joining(tuple(range(self.size)), None)
        self.mailbox = Mailbox(self.rank, self.size)
        self.crew = Crew()
        self.hosts: tuple[str, ...] = ()
        self._near: dict[str, weakref.ref[Any]] = {}  # by the lane's name
        self._turns = threading.Lock()
        self._pairs: dict[int, Pair] = {}  # by the other rank
        if process_group is not None:
            # Its end, not this object's: whoever still waits for a message holds this one.
            weakref.finalize(
                process_group, _close, self._whole, self._pairs, self.crew
            ).atexit = False  # the watcher's

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
        return Deadline(seconds_of(operation, timeout))

    def enter(self, operation: str, deadline: Deadline, call_site: str) -> tuple[Mesh, Lane]:
        """The connections and the calling thread's lane; the first use makes all ranks meet.

        Raises:
            BrokenGroupError: an earlier error ended the group.
            ObjcommError: what ended the connections since this lane's last call, once.
            UsageError: this process was forked from the one that made the group; or the
                interpreter is shutting down; or another live thread has the lane, or this one has
                it and waits for a callback.
            TransportTimeout: not every rank came.
        """
        self._check_process(operation)
        return self._whole.enter(operation, deadline, call_site, _lane_name.get())

    def join(self, operation: str, deadline: Deadline, call_site: str) -> None:
        """Make all ranks meet now; every one must call this, and any thread may use the group next.

        Raises:
            ObjcommError: as ``enter``.
        """
        self._check_process(operation)
        self._whole.join(operation, deadline, call_site)

    @contextlib.contextmanager
    def in_turns(self) -> Iterator[None]:
        """Let any thread make a call in this block; all but the main one do it one after another.

        The main thread, and a thread that has taken a lane, keep their own. The others share one:
        as with torch it is for the program to let them come in the same order on all ranks.
        """
        if _lane_name.get() or threading.current_thread() is threading.main_thread():
            yield
            return
        with self._turns:
            token = _lane_name.set(IN_TURNS)
            try:
                yield
            finally:
                _lane_name.reset(token)

    @property
    def near(self) -> Any:
        """The group of this host's ranks, if the calling thread's lane has asked for it before.

        A lane's calls are the same on all ranks, so all of them remember it, or none does. Another
        thread's would not do: on another rank that thread may not have come so far.
        """
        return self._near.get(_lane_name.get(), _nothing)()

    @near.setter
    def near(self, process_group: Any) -> None:
        self._near[_lane_name.get()] = weakref.ref(process_group)

    @property
    def is_of_the_parent(self) -> bool:
        """Whether this process was forked after it was made."""
        return self._pid != os.getpid()

    def _check_process(self, operation: str) -> None:
        if self.is_of_the_parent:
            raise UsageError(
                f"{operation}: a forked process cannot use its parent's connections; "
                "call objcomm from the process that called init_process_group"
            )
        check_running(operation)

    @functools.cached_property
    def device_link(self) -> DeviceLink | None:
        """What joins the ranks' accelerators."""
        return device_link(self._own())

    @property
    def verdict(self) -> Verdict | None:
        """What has ended the connections of all ranks, if anything has."""
        mesh = self._whole.mesh
        return None if mesh is None else mesh.verdict

    @property
    def is_broken(self) -> bool:
        """Whether all ranks together can exchange no more objects."""
        return self._whole.is_broken

    def fail(self, key: str, verdict: Verdict) -> Verdict:
        """Tell all ranks in the block ``key`` that this one failed; returns what all raise."""
        mesh = self._whole.mesh
        return verdict if mesh is None else mesh.fail(key, verdict)

    def failed(self, key: str) -> Verdict | None:
        """What some rank has told of the block ``key``, where its mesh has been replaced since."""
        mesh = self._whole.mesh
        is_same = mesh is None or (mesh.verdict is None and key.startswith(mesh.nonce))
        return None if mesh is None or is_same else mesh.failed(key)

    def enter_block(self, key: str) -> Verdict | None:
        """Begin the block ``key``, unless another rank has failed in it and this one has heard."""
        mesh = self._whole.mesh
        return None if mesh is None else mesh.enter(key)

    def end_block(self, key: str) -> None:
        """End the block ``key``."""
        mesh = self._whole.mesh
        if mesh is not None:
            mesh.blocks.discard(key)
            mesh.bulletin.forget(key)

    def leave(self, key: str) -> None:
        """Forget the block ``key``, which this rank leaves by an error."""
        mesh = self._whole.mesh
        if mesh is not None:
            mesh.leave(key)

    def absolve(self, verdict: Verdict, global_ranks: Iterable[int]) -> None:
        """End what joins only these ranks, by a verdict that the calling thread raises elsewhere.

        Other threads' lanes raise it in their next calls, as they do on the other ranks.
        """
        with self._lock:
            channels = [self._whole, *[pair.channel for pair in self._pairs.values()]]
        for channel in channels:
            if set(channel.global_ranks) <= set(global_ranks):
                channel.absolve(verdict)

    def pair(self, peer: int) -> Pair:
        """This rank and another one, for messages from rank to rank."""
        self._check_process("a message from rank to rank")
        pair = self._pairs.get(peer)
        if pair is None:
            with self._lock:
                members = (min(peer, self.rank), max(peer, self.rank))
                channel = self._joining(members, self._whole)
                made = Pair(channel, peer, self.rank, self.mailbox)
                pair = self._pairs.setdefault(peer, made)
        return pair

    def _joining(self, members: tuple[int, ...], whole: Channel | None) -> Channel:
        return Channel(
            process_group=self._own,
            world=self._world,
            ranks=self.ranks,
            rank=self.rank,
            members=members,
            history=self.history,
            whole=whole,
        )


def _living(reference: Callable[[], Any]) -> Any:
    process_group = reference()
    if process_group is None:
        raise UsageError("this process group was destroyed")
    return process_group


def _close(whole: Channel, pairs: dict[int, Pair], crew: Crew) -> None:
    """Nobody can make another call; those that wait must not do so until their limits."""
    say_farewell([*[pair.channel for pair in pairs.values()], *([whole] if whole.is_busy else [])])
    crew.close()


def _nothing() -> None:
    """Stands for a process group that there never was."""


def whole_number(value: object) -> int | None:
    """A whole number, numpy's included; None for what is none, as a float or a bool is."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return None


def _index(operation: str, rank: object) -> int:
    """A rank as a number.

    Raises:
        UsageError: it is none.
    """
    number = whole_number(rank)
    if number is None:
        raise UsageError(f"{operation}: {rank!r} is no rank")
    return number


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

    Examples:
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
