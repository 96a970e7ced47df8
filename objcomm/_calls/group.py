"""The state that objcomm keeps for a process group: ranks, connections, lanes and timeouts.

Global ranks given by the user are converted to group ranks here. This module knows nothing about
operations.
"""

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from objcomm._algorithms.device import BackendLink, DevicePath, linked_devices
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
    communicator,
    default_group,
    group_for_call,
    inheritance,
    is_alive,
    is_initialized,
    rank,
    refuse_worker,
    store_of,
    timeout_of,
)
from objcomm.errors import UsageError, ranges_text

_lane_name: ContextVar[str] = ContextVar("objcomm_lane", default="")

_LISTED_MAX = 100  # maximum length of a list of ranks in a name, in characters


class Group:
    """The state of one process group. Ranks are group ranks unless called global.

    Attributes:
        name: torch's name, the same on every rank; empty if torch.distributed is not initialized.
        rank: this process's rank.
        size: number of ranks.
        ranks: the global ranks, in group order.
        places: group ranks by global rank.
        recorder: this rank's latest calls on the group, and their cost.
        timeout_seconds: the default timeout of a call.
        hosts: the host of each rank; empty until ``node_group`` has asked for it.
        peers: the state of point-to-point messages; None before the first.
        streams: the lane on which each open ``stream`` was opened, and its number there.
    """

    peers: Any = None

    def __init__(
        self, process_group: Any = None, world: Any = None, recorder: Recorder | None = None
    ) -> None:
        """Create the state.

        Args:
            process_group: torch's process group; None for calls without torch.distributed.
            world: torch's group of all ranks.
            recorder: the part's recorder, if this is a part of the process group.
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
            # Weak, or the state of a destroyed group would stay alive until the process ends.
            self._own = functools.partial(_living, weakref.ref(process_group))
            self.timeout_seconds = timeout_of(process_group)
        self.size = len(self.ranks)
        self.places = {rank: place for place, rank in enumerate(self.ranks)}
        # A group that is first used in a forked process belongs to the parent all the same.
        self._forks = -1 if inheritance.has(world) else inheritance.forks
        self._lock = threading.RLock()
        self._making_a_part = Alone("a call that makes a group of some ranks")
        self._world = functools.partial(_living, _nothing if world is None else weakref.ref(world))
        self._whole = self._joining(tuple(range(self.size)), None)
        self.hosts: tuple[str, ...] = ()
        self.streams: set[tuple[str, int]] = set()
        self._near: dict[str, weakref.ref[Any]] = {}  # by the lane's name
        self._agreements = Counter[str]()  # likewise
        self._turns = threading.RLock()
        self._turn = Alone("a call")
        self._channels: dict[tuple[int, ...], Channel] = {}  # by the ranks that they connect
        self._parts: dict[tuple[int, ...], Group] = {}  # by their members
        self._at_end: list[Callable[[], None]] = []
        self._end: Any = None
        if process_group is not None:
            # On the process group: a thread that waits for a message keeps this object alive.
            self._end = weakref.finalize(
                process_group, _close, self._whole, self._channels, self._at_end
            )
            self._end.atexit = False  # the watchdog cleans up at exit

    def at_end(self, callback: Callable[[], None]) -> None:
        """Register ``callback`` to run once the group is destroyed and the other ranks know."""
        self._at_end.append(callback)

    def let_go(self) -> None:
        """Tie the connections to the lifetime of this object instead of the process group's."""
        self._end.detach()

    def root(
        self,
        operation: str,
        global_rank: int | None,
        group_rank: int | None,
        argument: str = "src",
    ) -> int:
        """Return the group rank given by ``src`` or ``group_src``, or similar arguments.

        Args:
            operation: the name of the user's call.
            global_rank: the global rank, if given.
            group_rank: the group rank, if given.
            argument: the user's name for ``global_rank``; that for ``group_rank`` has the prefix
                ``group_``.

        Returns:
            The group rank; 0 if neither was given.

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
            # Suggest a group rank only if the number could be one.
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
        """Return the deadline of one call.

        Args:
            operation: the operation, for error messages.
            timeout: as the user gave it.
            chosen: the options of the call; if None, the current ones.

        Raises:
            UsageError: ``timeout`` is not a positive time.
        """
        seconds = self.timeout_seconds if timeout is None else seconds_of(operation, timeout)
        return Deadline(seconds, chosen)

    def enter(
        self, operation: str, deadline: Deadline, call_site: str, *, raises_later: bool = False
    ) -> tuple[Mesh, Lane]:
        """Return the mesh and the calling thread's lane; the first use connects all ranks.

        With ``raises_later``, this may be a mesh that has ended and whose verdict the thread has
        yet to raise.

        Raises:
            BrokenGroupError: an earlier error has closed the group's connections for good.
            ObjcommError: the connections were closed since this lane's last call. Raised once.
            UsageError: this process was forked from the one that created the group; or the
                interpreter is shutting down; or another live thread owns the lane; or this thread
                is inside another call on it, for example in a callback.
            TransportTimeout: not every rank joined in time.
        """
        self.check_process(operation)
        whole = self._whole
        mesh, lane = whole.admit(operation, _lane_name.get(), raises_later=raises_later)
        if mesh.link is None:
            whole.connect(mesh, lane, operation, deadline, call_site)
        return mesh, lane

    def join(self, operation: str, deadline: Deadline, call_site: str) -> None:
        """Connect all ranks now; every rank must call this. Does not take a lane for the thread.

        Raises:
            ObjcommError: as for ``enter``.
        """
        self.check_process(operation)
        self._whole.join(operation, deadline, call_site)

    @contextlib.contextmanager
    def in_turns(self) -> Iterator[None]:
        """Let any thread make calls in this block; threads without a lane of their own take turns.

        The main thread, and a thread that has chosen a lane, keep their own. The others share one
        lane: as with torch, the program must make them call in the same order on all ranks.
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
        """The group of this host's ranks, if the calling thread's lane has already created it.

        Kept per lane: a lane's calls are the same on all ranks, so either all ranks remember the
        group or none does. On another rank, another thread may not have made the same call yet.
        """
        return self._near.get(_lane_name.get(), _nothing)()

    @near.setter
    def near(self, process_group: Any) -> None:
        self._near[_lane_name.get()] = weakref.ref(process_group)

    @property
    def agreement(self) -> str:
        """The store key of the calling lane's next agreement on which ranks are alive.

        A lane's calls are the same on all ranks, so all ranks count the same agreements.
        """
        lane = _lane_name.get()
        return f"survivors/{self.name}/{lane}/{self._agreements[lane]}"

    def has_agreed(self) -> None:
        """Count an agreement of the calling thread's lane, whose key is not used again."""
        self._agreements[_lane_name.get()] += 1

    @property
    def is_of_the_parent(self) -> bool:
        """Whether this process was forked after the group was created."""
        return self._forks != inheritance.forks

    def check_process(self, operation: str) -> None:
        """Refuse a call that this process cannot make.

        Raises:
            UsageError: this process was forked from the one that created the group, like a
                DataLoader worker; or the interpreter is shutting down.
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
    def device_backends(self) -> dict[torch.device, str]:
        """The device types that have a link between the ranks, with the backend of each."""
        return linked_devices(self._own())

    def device_path(self, mesh: Mesh, lane: Lane) -> DevicePath:
        """Return the path between the accelerators of a connected mesh's ranks, for one lane."""
        path: DevicePath | None = lane.device_path
        if path is None:
            path = DevicePath(
                [self._link(*each, mesh, lane) for each in self.device_backends.items()]
            )
            if path.linked:
                mesh.at_end.append(path.abandon)
                if mesh.verdict is not None:  # it may have ended before that
                    path.abandon()
            lane.device_path = path
        return path

    def _link(self, device: torch.device, backend: str, mesh: Mesh, lane: Lane) -> BackendLink:
        name = f"objcomm {mesh.nonce} {lane.number} {device.type}"
        ranks = [mesh.ranks[member] for member in mesh.members]
        place = mesh.members.index(mesh.rank)
        # Must not hold ``self``, which holds the mesh: a cycle would keep connections open.
        create = functools.partial(_communicator, self._world, backend, name, place, ranks)
        return BackendLink(create, device, mesh.members)

    @property
    def mesh(self) -> Mesh | None:
        """The current or last mesh of all ranks; None before the first call.

        Do not keep it: after a recoverable error a new mesh replaces it.
        """
        return self._whole.mesh

    @property
    def is_broken(self) -> bool:
        """Whether the connections between all ranks are closed for good."""
        return self._whole.is_broken

    def mark_raised(self, verdict: Verdict, global_ranks: Iterable[int]) -> None:
        """End the channels among these ranks by a verdict that the calling thread raises elsewhere.

        Other threads raise it in their next calls, as they do on the other ranks.
        """
        for channel in (self._whole, *tuple(self._channels.values())):
            if set(channel.global_ranks) <= set(global_ranks):
                channel.mark_raised(verdict)

    def channel(self, members: tuple[int, ...]) -> Channel:
        """Return the channel between ``members`` (in ascending order); needs no other rank."""
        channel = self._channels.get(members)
        if channel is None:
            made = self._joining(members, self._whole)
            channel = self._channels.setdefault(members, made)
        return channel

    def part(self, members: tuple[int, ...]) -> "Group":
        """Return some of the ranks, including this one, as a group that needs no other rank.

        A part has its own connections, which stay open for the life of this group, or until an
        error breaks the part.

        Args:
            members: ranks within this group, in the order of the part; the same on each of them.
        """
        with self._lock, self._making_a_part:
            part = self._parts.get(members)
            if part is None or part.is_broken:
                if part is not None:
                    part.let_go()
                listed = _listed([self.ranks[each] for each in members])
                part = self._parts[members] = self.new_part(members, f"a group of {listed}")
        return part

    def new_part(self, members: tuple[int, ...], name: str) -> "Group":
        """Do what ``part`` does, but never return the same part twice.

        Args:
            members: as for ``part``.
            name: the name of the part within this group; the same on each of its ranks.
        """
        recorder = self.recorder.among(members, f"{self.name}, {name}")
        part = Group(self.process_group, self._world(), recorder)
        part.device_backends = {}
        return part

    @property
    def parts(self) -> list["Group"]:
        """The parts that this rank has created."""
        return list(self._parts.values())

    @property
    def process_group(self) -> Any:
        """Torch's process group; for a part, that of the whole group.

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
    """Return a unique text for a list of ranks that is short enough for a store key."""
    text = ",".join(map(str, ranks))
    return text if len(text) < _LISTED_MAX else f"{len(ranks)} ranks ({fingerprint(text):016x})"


def _living(reference: Callable[[], Any]) -> Any:
    process_group = reference()
    if process_group is None:
        raise UsageError("this process group was destroyed")
    return process_group


def _close(
    whole: Channel, others: dict[tuple[int, ...], Channel], at_end: list[Callable[[], None]]
) -> None:
    """Close the connections of a group that is gone, so that other ranks do not wait for it."""
    say_farewell([*others.values(), *([whole] if whole.is_busy else [])])
    whole.retire()
    for callback in at_end:
        callback()


def _communicator(
    world: Callable[[], Any], backend: str, name: str, place: int, ranks: Sequence[int]
) -> Any:
    return communicator(backend, name, store=store_of(world()), rank=place, ranks=ranks)


def _nothing() -> None:
    """Replacement for a weak reference where there is no process group."""


def _index(operation: str, argument: str, rank: object) -> int:
    """Return a rank as an int.

    Raises:
        UsageError: it is not an integer.
    """
    number = whole_number(rank)
    if number is None:
        raise UsageError(f"{operation}: {argument} must be an integer (a rank), not {rank!r}")
    return number


class lane:  # noqa: N801  # used like a function, as in contextlib
    """Context manager that lets a second thread use a group, with its own sequence of calls.

    Calls on a lane match calls on the same lane of the other ranks, in order, whatever other
    threads do meanwhile. The first thread to use a group does not need a lane.

    Args:
        name: the name of the lane, the same on every rank. Reuse a few names: over Gloo each lane
            keeps 32 KiB per peer, and among a hundred names, two may well collide, which
            raises UsageError.

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
    """The state of every live process group, keyed by the object, because names are reused."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
        self.solo = Group()
        # The last process group asked for, and its state. Replaced as a whole. Both references are
        # weak, so that they do not keep the process group alive.
        self.latest: tuple[Callable[[], Any], Callable[[], Group | None]] = _nothing, _nothing

    def of(self, process_group: Any) -> Group:
        found = self._known.get(process_group)
        if found is None:
            if not is_alive(process_group):
                raise UsageError("this process group was destroyed")
            made = Group(process_group, dist.GroupMember.WORLD)
            found = self._known.setdefault(process_group, made)
            if found is not made:  # a signal handler or another thread was first
                made.let_go()
        self.latest = weakref.ref(process_group), weakref.ref(found)
        return found

    def all(self) -> list[Group]:
        alive = [reference() for reference in self._known.keyrefs()]
        known = [self._known[each] for each in alive if each is not None]
        return [each for group in known for each in (group, *group.parts)]


_groups = _Groups()


def known_groups() -> list[Group]:
    """Return all live groups that this process has used, including their parts."""
    return _groups.all()


def solo_group() -> Group:
    """Return the group used for calls without torch.distributed."""
    return _groups.solo


def resolve(group: GroupLike | Group, operation: str = "") -> Group:
    """Return the state for a ``group=`` argument.

    Args:
        group: as the user gave it, or a ``Group``, such as a part, which is returned as it is.
        operation: the name of the user's call, for error messages.

    Returns:
        The group; a world of one if torch.distributed is not initialized.

    Raises:
        UsageError: the environment says that there are other ranks, but nothing is initialized; or
            ``group`` is a mesh of several dimensions, or not a group.
        NotInGroupError: this rank is not a member.
    """
    if isinstance(group, Group):
        return group
    # Every process with a default group is a member of it, so there is nothing to check.
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

    Never communicates. Once the process group is initialized, only the group decides, so there is
    exactly one main rank. Before that, the launcher's environment variables decide, as in ``rank``.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the world.
        scope: ``"world"`` for the first rank of the group, ``"node"`` for the first rank on its
            host. Hosts are known once ``objcomm.node_group`` has been called for ``group``;
            without that, the launcher's LOCAL_RANK, SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK or
            MPI_LOCALRANKID decides, for the world only.

    Raises:
        UsageError: ``scope`` is invalid, or was passed as ``group``; or the answer is unknown: the
            hosts for ``"node"`` are not known, or the process group is not initialized and no
            environment variable gives the rank. Raised on that rank.
        NotInGroupError: ``scope`` is ``"node"`` and this rank is not a member of ``group``.

    Examples:
        >>> import objcomm
        >>> objcomm.is_main()
        True
    """
    if isinstance(group, str):  # otherwise the result would be False on all ranks
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
    if standing.rank < 0:  # otherwise the result would be False on all ranks
        raise UsageError(
            f"is_main: {standing.promise} says that there are other ranks, but no variable says "
            "which one this is; call objcomm.init or init_process_group first"
        )
    return standing.rank == 0
