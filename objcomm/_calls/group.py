"""One process group as objcomm sees it: ranks, links, lanes and time limits.

The global ranks that a user gives become group ranks here. Knows nothing of operations.
"""

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

from objcomm._algorithms.device import DevicePath, device_links
from objcomm._config import GroupLike, Settings, Timeout, seconds_of, whole_number
from objcomm._environment import local_rank_in, unjoined_in
from objcomm._failures.channel import Channel, say_farewell
from objcomm._failures.mesh import Mesh
from objcomm._failures.verdict import Verdict
from objcomm._failures.watchdog import check_running
from objcomm._observe.recorder import Recorder, forget_world, recorder_of
from objcomm._transport.lane import IN_TURNS, Lane
from objcomm._transport.link import Deadline
from objcomm._transport.threads import Alone
from objcomm._wire.header import fingerprint
from objcomm._world import (
    TIMEOUT_SECONDS,
    default_group,
    group_for_call,
    inheritance,
    is_alive,
    is_initialized,
    rank,
    refuse_worker,
    timeout_of,
)
from objcomm.errors import UsageError, ranges_text

_lane_name: ContextVar[str] = ContextVar("objcomm_lane", default="")

_LISTED_MAX = 100  # characters of a list of ranks in a name


class Group:
    """One process group as objcomm sees it; every rank in here is a rank within the group.

    Attributes:
        name: torch's, the same on every rank; empty where torch.distributed is not initialised.
        rank: this process's.
        size: number of ranks.
        ranks: their global ranks, in group order.
        places: the ranks within the group by global rank.
        recorder: what this rank did last on it, and what it cost.
        timeout_seconds: the limit of a call that has none of its own.
        hosts: where each rank runs, once ``node_group`` has asked; empty before.
        peers: what messages from rank to rank have here, once there were any.
    """

    peers: Any = None

    def __init__(
        self, process_group: Any = None, world: Any = None, recorder: Recorder | None = None
    ) -> None:
        """Begin.

        Args:
            process_group: torch's; None for calls that were made without torch.distributed.
            world: torch's group of all ranks.
            recorder: given if this is a part of the process group; it has the part's ranks.
        """
        self.recorder = recorder_of(process_group) if recorder is None else recorder
        self.name = self.recorder.name
        self.rank = self.recorder.rank
        self.ranks = self.recorder.ranks
        self._own: Callable[[], Any]
        if process_group is None:
            self._own = functools.partial(_living, _nothing)
            self.timeout_seconds = TIMEOUT_SECONDS
        else:
            # Weak, or the state of a destroyed group would live as long as the process.
            self._own = functools.partial(_living, weakref.ref(process_group))
            self.timeout_seconds = timeout_of(process_group)
        self.size = len(self.ranks)
        self.places = {rank: place for place, rank in enumerate(self.ranks)}
        # A group that is first used in a fork is its parent's no less.
        self._forks = -1 if inheritance.has(world) else inheritance.forks
        self._lock = threading.RLock()
        self._making_a_part = Alone("a call that makes a group of some ranks")
        self._world = functools.partial(_living, _nothing if world is None else weakref.ref(world))
        self._whole = self._joining(tuple(range(self.size)), None)
        self.hosts: tuple[str, ...] = ()
        self._near: dict[str, weakref.ref[Any]] = {}  # by the lane's name
        self._turns = threading.RLock()
        self._turn = Alone("a call")
        self._channels: dict[tuple[int, ...], Channel] = {}  # by those whom they join
        self._parts: dict[tuple[int, ...], Group] = {}  # by their members
        self._at_end: list[Callable[[], None]] = []
        self._end: Any = None
        if process_group is not None:
            # Its end, not this object's: whoever still waits for a message holds this one.
            self._end = weakref.finalize(
                process_group, _close, self._whole, self._channels, self._at_end
            )
            self._end.atexit = False  # the watchdog's

    def at_end(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once the group is destroyed and the other ranks know."""
        self._at_end.append(callback)

    def let_go(self) -> None:
        """Keep the connections no longer than this object, rather than until the group's end."""
        self._end.detach()

    def root(
        self,
        operation: str,
        global_rank: int | None,
        group_rank: int | None,
        argument: str = "src",
    ) -> int:
        """The group rank that a call means by ``src`` and ``group_src``, or their like.

        Args:
            operation: what the user has called.
            global_rank: what was given as a global rank; None for nothing.
            group_rank: what was given as a rank within the group; likewise.
            argument: the name of the first; the second has ``group_`` before it.

        Raises:
            UsageError: both were given, or there is no such rank in this group.
        """
        if group_rank is None and type(global_rank) is int and global_rank in self.places:
            return self.places[global_rank]
        if group_rank is None and global_rank is None:
            return 0
        if global_rank is not None and group_rank is not None:
            raise UsageError(
                f"{operation}: {argument}={global_rank!r} and group_{argument}={group_rank!r} "
                "were both given; give one of them"
            )
        if group_rank is not None:
            rank = _index(operation, f"group_{argument}", group_rank)
            if not 0 <= rank < self.size:
                raise UsageError(
                    f"{operation}: group_{argument}={rank} is not in this group of {self.size}; "
                    f"ranks within it are 0 to {self.size - 1}"
                )
            return rank
        rank = _index(operation, argument, global_rank)
        if rank not in self.places:
            # A number that is no rank within the group either was not meant as one.
            is_place = 0 <= rank < self.size
            cure = f"; give a rank within the group as group_{argument}=" * is_place
            raise UsageError(
                f"{operation}: {argument}={rank} is not in this group, whose global ranks are "
                f"{ranges_text(self.ranks)}{cure}"
            )
        return self.places[rank]

    def deadline(
        self, operation: str, timeout: Timeout, chosen: Settings | None = None
    ) -> Deadline:
        """The time limit of one call.

        Args:
            operation: for an error's text.
            timeout: as the user gave it.
            chosen: the options of the call; those in force if None.

        Raises:
            UsageError: it is not a positive time.
        """
        seconds = self.timeout_seconds if timeout is None else seconds_of(operation, timeout)
        return Deadline(seconds, chosen)

    def enter(
        self, operation: str, deadline: Deadline, call_site: str, *, raises_later: bool = False
    ) -> tuple[Mesh, Lane]:
        """The connections and the calling thread's lane; the first use makes all ranks meet.

        With ``raises_later`` a thread gets connections that have ended, if it has yet to raise why.

        Raises:
            BrokenGroupError: an earlier error ended the group.
            ObjcommError: what ended the connections since this lane's last call, once.
            UsageError: this process was forked from the one that made the group; or the
                interpreter is shutting down; or another live thread has the lane, or this one has
                it and waits for a callback.
            TransportTimeout: not every rank came.
        """
        self.check_process(operation)
        whole = self._whole
        mesh, lane = whole.admit(operation, _lane_name.get(), raises_later=raises_later)
        if mesh.link is None:
            whole.connect(mesh, lane, operation, deadline, call_site)
        return mesh, lane

    def join(self, operation: str, deadline: Deadline, call_site: str) -> None:
        """Make all ranks meet now; every one must call this, and any thread may use the group next.

        Raises:
            ObjcommError: as ``enter``.
        """
        self.check_process(operation)
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
        with self._turns, self._turn:
            _lane_name.set(IN_TURNS)
            try:
                yield
            finally:
                _lane_name.set("")  # no token: see ``_config``

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
        return self._forks != inheritance.forks

    def check_process(self, operation: str) -> None:
        """Refuse a call that this process can't make.

        Raises:
            UsageError: it was forked from the one that made the group, as a DataLoader's worker
                may be; or its interpreter is shutting down.
        """
        if self._forks == inheritance.forks and not sys.is_finalizing():
            return
        if self.is_of_the_parent:
            parent = rank()
            refuse_worker(operation, parent)
            raise UsageError(
                f"{operation}: this process was forked by rank {parent}, and is not a rank itself: "
                "a forked process cannot use its parent's connections; call objcomm from the "
                "process that called init_process_group"
            )
        check_running(operation)

    @functools.cached_property
    def device_path(self) -> DevicePath:
        """What joins the ranks' accelerators, if anything does."""
        return DevicePath(device_links(self._own()))

    @functools.cached_property
    def pair_path(self) -> DevicePath:
        """The same for messages from rank to rank, which have no order with collectives."""
        return DevicePath([link for link in device_links(self._own()) if link.is_pairwise])

    @property
    def mesh(self) -> Mesh | None:
        """What joins all ranks, or did last; None before the first call.

        Look at each step anew: after an error that the ranks outlive another one takes its place.
        """
        return self._whole.mesh

    @property
    def is_broken(self) -> bool:
        """Whether all ranks together can exchange no more objects."""
        return self._whole.is_broken

    def absolve(self, verdict: Verdict, global_ranks: Iterable[int]) -> None:
        """End what joins only these ranks, by a verdict that the calling thread raises elsewhere.

        Other threads' lanes raise it in their next calls, as they do on the other ranks.
        """
        for channel in (self._whole, *tuple(self._channels.values())):
            if set(channel.global_ranks) <= set(global_ranks):
                channel.absolve(verdict)

    def channel(self, members: tuple[int, ...]) -> Channel:
        """What joins some of the ranks, in ascending order, and needs nobody else."""
        channel = self._channels.get(members)
        if channel is None:
            made = self._joining(members, self._whole)
            channel = self._channels.setdefault(members, made)
        return channel

    def part(self, members: tuple[int, ...]) -> "Group":
        """Some of the ranks, of which this is one, as a group that needs nobody else.

        What joins them is apart from all else that this group has, and stays for its life, or
        until an error has broken it.

        Args:
            members: ranks within this group, in the order that they have in the part; the same on
                each of them.
        """
        with self._lock, self._making_a_part:
            part = self._parts.get(members)
            if part is None or part.is_broken:
                if part is not None:
                    part.let_go()
                name = f"{self.name}, a group of {_listed([self.ranks[each] for each in members])}"
                recorder = self.recorder.among(members, name)
                part = Group(self.process_group, self._world(), recorder)
                # The links join the whole group's accelerators.
                part.device_path = part.pair_path = DevicePath()
                self._parts[members] = part
        return part

    @property
    def parts(self) -> list["Group"]:
        """The parts that this rank has called for."""
        return list(self._parts.values())

    @property
    def process_group(self) -> Any:
        """Torch's; a part's is the whole one.

        Raises:
            UsageError: it was destroyed.
        """
        return self._own()

    def _joining(self, members: tuple[int, ...], whole: Channel | None) -> Channel:
        return Channel(
            name=self.name,
            process_group=self._own,
            world=self._world,
            ranks=self.ranks,
            rank=self.rank,
            members=members,
            history=self.recorder.history,
            whole=whole,
        )


def _listed(ranks: Sequence[int]) -> str:
    """Ranks in their order, as a text that no others have, and that is not too long for a key."""
    told = ",".join(map(str, ranks))
    return told if len(told) < _LISTED_MAX else f"{len(ranks)} ranks ({fingerprint(told):016x})"


def _living(reference: Callable[[], Any]) -> Any:
    process_group = reference()
    if process_group is None:
        raise UsageError("this process group was destroyed")
    return process_group


def _close(
    whole: Channel, others: dict[tuple[int, ...], Channel], at_end: list[Callable[[], None]]
) -> None:
    """Nobody can make another call; those that wait must not do so until their limits."""
    say_farewell([*others.values(), *([whole] if whole.is_busy else [])])
    whole.retire()
    for callback in at_end:
        callback()


def _nothing() -> None:
    """Stands for a process group that there never was."""


def _index(operation: str, argument: str, rank: object) -> int:
    """A rank as a number.

    Raises:
        UsageError: it is none.
    """
    number = whole_number(rank)
    if number is None:
        raise UsageError(f"{operation}: {argument} must be an integer, a rank, not {rank!r}")
    return number


class lane:  # noqa: N801  # used as a function, like contextlib's
    """Let a second thread use a group: its calls in this block are a sequence of their own.

    Calls of one lane pair with the same lane's calls on the other ranks, in order, whatever other
    threads do meanwhile. The first thread to use a group needs no lane.

    Args:
        name: the same on every rank. Use few names, again and again: over Gloo each keeps 32 KiB
            for every peer, and of some hundred names two may collide, which raises UsageError.

    Examples:
        >>> import objcomm
        >>> with objcomm.lane("eval"):
        ...     scores = objcomm.all_gather(0.5)
        >>> scores
        [0.5]
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise UsageError("lane: name must not be empty")
        self._name = name
        self._former: list[str] = []

    def __enter__(self) -> None:
        self._former.append(_lane_name.get())
        _lane_name.set(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _lane_name.set(self._former.pop())  # no token: see ``_config``


class _Groups:
    """The state of every live process group, by the object and never by its name, which recurs."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
        self.solo = Group()
        # The one that was asked for last, behind its process group; replaced as a whole. Both are
        # weak: what is kept here must not outlive the process group.
        self.latest: tuple[Callable[[], Any], Callable[[], Group | None]] = _nothing, _nothing

    def of(self, process_group: Any) -> Group:
        found = self._known.get(process_group)
        if found is None:
            if not is_alive(process_group):
                raise UsageError("this process group was destroyed")
            made = Group(process_group, dist.GroupMember.WORLD)
            found = self._known.setdefault(process_group, made)
            if found is not made:  # a handler, or another thread, came first
                made.let_go()
        self.latest = weakref.ref(process_group), weakref.ref(found)
        return found

    def all(self) -> list[Group]:
        alive = [reference() for reference in self._known.keyrefs()]
        known = [self._known[each] for each in alive if each is not None]
        return [each for group in known for each in (group, *group.parts)]


_groups = _Groups()


def known_groups() -> list[Group]:
    """Every group, or part of one, that this process has used and that still lives."""
    return _groups.all()


def solo_group() -> Group:
    """The group of calls that were made without torch.distributed."""
    return _groups.solo


def resolve(group: GroupLike | Group, operation: str = "") -> Group:
    """What ``group=`` means here; a group of objcomm's own, such as a part, means itself.

    Args:
        group: as the user gave it.
        operation: what the user has called, for an error's text.

    Returns:
        A world of one where torch.distributed is not initialised.

    Raises:
        UsageError: the environment promises other ranks, but nothing is initialised; or it is a
            mesh of several dimensions, or no group at all.
        NotInGroupError: this rank is no member.
    """
    if isinstance(group, Group):
        return group
    # Whoever has a world is in it, so there is nothing to ask.
    process_group = default_group() if group is None else None
    if process_group is None:
        process_group = group_for_call(group, operation)
    if process_group is None:
        forget_world()
        return _groups.solo
    reference, latest = _groups.latest
    found = latest() if reference() is process_group else None
    return _groups.of(process_group) if found is None else found


def is_main(group: GroupLike = None, *, scope: Literal["world", "node"] = "world") -> bool:
    """Whether this process is the first rank of ``group``; True in a world of one.

    Never communicates. Where the ranks have joined, the group tells and the environment plays no
    part, so there is exactly one main rank. Before that a launcher's variables tell, as in
    ``rank``.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the world.
        scope: ``"world"`` for the first rank of all, ``"node"`` for the first one on its host. What
            a host is ``objcomm.node_group`` finds out; if it was never called for ``group``, the
            launcher's LOCAL_RANK, SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK or MPI_LOCALRANKID
            tells for the world.

    Raises:
        UsageError: ``scope`` is neither, or was given as ``group``; or nobody knows: it is
            ``"node"``, or the ranks have not joined and no variable has this one's. That rank.
        NotInGroupError: it is ``"node"``, and this rank is not a member of ``group``.

    Examples:
        >>> import objcomm
        >>> objcomm.is_main()
        True
    """
    if isinstance(group, str):  # it would be False on all ranks
        raise UsageError(f"is_main: {group!r} is not a group; pass scope={group!r}")
    if scope == "world":
        if group is None and not is_initialized():
            return _is_main_by_launcher()
        return rank(group) == 0
    if scope != "node":
        raise UsageError(f"is_main: scope={scope!r} is neither 'world' nor 'node'")
    local = local_rank_in(os.environ) if group is None else None
    if local is not None and not is_initialized():
        return local == 0
    whole = resolve(group, "is_main")
    if whole.hosts:
        return whole.hosts.index(whole.hosts[whole.rank]) == whole.rank
    if local is not None:
        return local == 0
    if whole.size == 1:
        return True
    raise UsageError(
        f"is_main: global rank {whole.ranks[whole.rank]} can't tell which ranks share its host: "
        "there is no LOCAL_RANK; let every rank call objcomm.node_group() once before"
    )


def _is_main_by_launcher() -> bool:
    standing = unjoined_in(os.environ)
    if standing.rank < 0:  # it would be False on all ranks
        raise UsageError(
            f"is_main: {standing.promise} says that there are other ranks, but no variable says "
            "which one this is; call objcomm.init or init_process_group first"
        )
    return standing.rank == 0
