"""Torch's process groups: which one a call means, its ranks and its store, and how one is made.

Whatever of this torch has no public way to ask for stands here. ``dist.new_group`` asks every rank
of the world to call it, in one order. With ``use_local_synchronization=True`` only members need
to, but then torch names the group by its ranks and by how many groups this process has: members
with different pasts wait for each other under different names, for as long as the limit. Here the
members have agreed on a name before.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import os
import threading
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from objcomm._config import GroupLike  # noqa: TC001  # who asks for a function's types finds it
from objcomm._environment import Unjoined, tells_no_size, unjoined_in
from objcomm.errors import NotInGroupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


#: A group's limit where its own can't be found: torch's default for Gloo.
TIMEOUT_SECONDS = 1800.0


def store_of(group: Any) -> Any:
    """The store over which the members of a process group met; None if torch knows of none."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415  # absent in some builds

    # Before torch 2.10 only its own record of each group has it.
    _, store = c10d._world.pg_map.get(group, (None, None))  # noqa: SLF001  # see above
    return store


def bare(store: Any) -> Any:
    """A store without the prefixes before its keys."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


#: The group of a rank that is outside: torch's own object, as programs compare it by ``is``. A
#: torch without distributed has none. (None as ``group=`` means the world.)
NOBODY: Any = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else -100


def is_initialized() -> bool:
    """Whether torch.distributed is there and ``init_process_group`` was called.

    Examples:
        >>> import objcomm
        >>> objcomm.is_initialized()
        False
    """
    return dist.is_available() and dist.is_initialized()


#: What ``dist.GroupMember.WORLD`` asks, in three calls of Python.
_world: Any = dist.distributed_c10d._world if dist.is_available() else None  # noqa: SLF001  # see above


def default_group() -> Any:
    """The group of all ranks; None before ``init_process_group``, and where torch has none."""
    return None if _world is None else _world.default_pg


def is_nobody(group: GroupLike) -> bool:
    """Whether ``group=`` is what a rank outside of a group has in its place."""
    return group is NOBODY or (isinstance(group, int) and group == NOBODY)


def is_world(process_group: Any) -> bool:
    """Whether a process group is the one of all ranks."""
    return process_group is dist.GroupMember.WORLD


def process_group_of(group: GroupLike, operation: str = "") -> Any:
    """Torch's own object for ``group=``, or None on a rank outside.

    Args:
        group: as the user gave it.
        operation: what the user has called, for an error's text.

    Raises:
        UsageError: it is a mesh of several dimensions, or no group at all.
    """
    if group is None:
        return dist.GroupMember.WORLD
    if hasattr(group, "get_group") and hasattr(group, "mesh"):
        mesh: Any = group
        if mesh.ndim != 1:
            raise UsageError(
                f"{_said_by(operation)}group= must be a mesh of one dimension, not of {mesh.ndim}; "
                "slice it: mesh['dp']"
            )
        return mesh.get_group() if mesh.get_coordinate() is not None else None
    if is_nobody(group):
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"{_said_by(operation)}group={group!r} must be a process group, a device mesh or None; "
            "of a list of ranks objcomm.new_group makes a group"
        )
    return group


def _said_by(operation: str) -> str:
    """How an error's text begins."""
    return f"{operation}: " if operation else ""


def refuse_worker(operation: str, rank: int) -> None:
    """Let no worker of a DataLoader take itself for a rank.

    Args:
        operation: what the user has called.
        rank: global, of the process that the worker works for; -1 where nothing tells.

    Raises:
        UsageError: this process is a worker.
    """
    worker = get_worker_info()
    if worker is not None:
        whose = f"rank {rank}" if rank >= 0 else "a rank"
        raise UsageError(
            f"{_said_by(operation)}this process is worker {worker.id} of a DataLoader of {whose}, "
            "and no rank itself; make this call in the process that reads from the DataLoader, "
            "or set num_workers=0"
        )


class _Inheritance:
    """The world that this process was forked with, if it was: its connections are the parent's.

    Attributes:
        forks: how many forks led from the first process that imported objcomm to this one.
    """

    def __init__(self) -> None:
        self.forks = 0
        self._world: Callable[[], Any] = _nobody
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._note)

    def _note(self) -> None:
        self.forks += 1
        world = default_group()
        self._world = _nobody if world is None else weakref.ref(world)

    def has(self, world: Any) -> bool:
        """Whether a process group of all ranks was made before this process was forked."""
        return world is not None and self._world() is world


def _nobody() -> None:
    """In place of a reference."""


inheritance = _Inheritance()


def group_for_call(group: GroupLike, operation: str = "") -> Any:
    """The process group on which a call with this ``group=`` is made; None for a world of one.

    Args:
        group: as the user gave it.
        operation: what the user has called, for an error's text.

    Raises:
        UsageError: the environment promises other ranks, but nothing is initialised; or it is a
            mesh of several dimensions, or no group at all.
        NotInGroupError: this rank is no member.
    """
    said_by = _said_by(operation)
    if not is_initialized():
        is_sure = group is not None or tells_no_size()
        promise = "" if is_sure else unjoined_in(os.environ).promise
        if promise:
            refuse_worker(operation, unjoined_in(os.environ).rank)
            raise UsageError(
                f"{said_by}{promise} says that there are other ranks, but torch.distributed is not "
                "initialized; make this call after objcomm.init or init_process_group, and before "
                "objcomm.shutdown or destroy_process_group"
            )
        if is_nobody(group):
            raise NotInGroupError(f"{said_by}this rank is not a member of this group")
        if group is not None:
            raise UsageError(
                f"{said_by}group={group!r} was given, but torch.distributed is not initialized; "
                "make this call after objcomm.init or init_process_group, and before "
                "objcomm.shutdown or destroy_process_group, or leave group= out"
            )
        return None
    process_group = process_group_of(group, operation)
    if process_group is None or process_group.rank() < 0:
        raise NotInGroupError(
            f"{said_by}global rank {dist.get_rank()} is not a member of this group; "
            "let only its members make this call"
        )
    return process_group


def ranks_of(process_group: Any) -> tuple[int, ...]:
    """The global ranks of a group's members, in the group's order."""
    return tuple(dist.get_process_group_ranks(process_group))


def timeout_of(process_group: Any) -> float:
    """A group's own time limit, in seconds."""
    for device in process_group._device_types:  # noqa: SLF001  # torch has no public way to ask
        backend = process_group._get_backend(device)  # noqa: SLF001  # likewise
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return TIMEOUT_SECONDS


#: Backends whose ranks may be no processes, or none that have a store in common.
_UNREACHABLE = {"fake", "mpi", "threaded"}
#: Stores by the names of their classes; a bare one stands where there is none, and torch 2.15 has a
#: ``FakeStore``.
_STORES_OF_ONE_PROCESS = {"FakeStore", "HashStore", "Store"}


def is_reachable(group: GroupLike) -> bool:
    """Whether objcomm can join the ranks of ``group=``; the same answer on each of them.

    Its ranks meet in the group's store, so they must be processes that share one. True where
    nothing has to be joined: on a rank outside, and for a world of one. False for what is no group,
    and for one that torch's own code has made without ``new_group``, with a world or without.
    """
    if not is_initialized():
        return group is None
    try:
        process_group = process_group_of(group)
        if process_group is None or process_group.rank() < 0:
            return True
        backend = dist.get_backend(process_group)
        if process_group.size() == 1:
            return True
        if backend in _UNREACHABLE:
            return False
        store = bare(store_of(process_group))
    except (UsageError, RuntimeError, ValueError):
        return False
    return store is not None and type(store).__name__ not in _STORES_OF_ONE_PROCESS


def _not_joined(group: GroupLike) -> Unjoined:
    """What is known of this rank where torch.distributed is not initialised."""
    if group is None:
        return unjoined_in(os.environ)
    return Unjoined(-1, -1, "") if is_nobody(group) else Unjoined(0, 1, "")


def rank(group: GroupLike = None) -> int:
    """This process's rank within ``group``; 0 in a world of one, -1 outside the group.

    Never raises and never communicates, so a logging filter may call it anywhere. Before the ranks
    have joined, a launcher's variables tell, those that ``objcomm.init`` reads; -1 if they promise
    other ranks and do not say which one this is.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the world.

    Examples:
        >>> import objcomm
        >>> objcomm.rank()
        0
    """
    try:
        return process_group_of(group).rank() if is_initialized() else _not_joined(group).rank
    except (AttributeError, RuntimeError, UsageError):
        return -1


def world_size(group: GroupLike = None) -> int:
    """Number of ranks in ``group``; 1 in a world of one, -1 outside the group.

    Never raises and never communicates. Before the ranks have joined, a launcher's variables tell,
    as in ``rank``.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the world.

    Examples:
        >>> import objcomm
        >>> objcomm.world_size()
        1
    """
    try:
        return process_group_of(group).size() if is_initialized() else _not_joined(group).world_size
    except (AttributeError, RuntimeError, UsageError):
        return -1


# All members are here, and only have to connect: one that dies now must not hold the others for
# as long as a call.
CONNECT_MAX = timedelta(seconds=60)


def create(
    parent: Any,
    name: str,
    ranks: Sequence[int],
    *,
    limit: timedelta,
    timeout: timedelta,
    purpose: str,
    store: Any,
) -> Any:
    """Make a process group with the backend of ``parent``; every one of ``ranks`` must call this.

    It may block in C++ up to the limit.

    Args:
        parent: where its members come from.
        name: the same on all members, and no other group's.
        ranks: global ranks, in the order of the new group.
        limit: how long to wait for the connections.
        timeout: the new group's own time limit.
        purpose: what torch's log says that it is for.
        store: a connection to the world's store that nobody else uses meanwhile.

    Raises:
        RuntimeError: a connection failed.
    """
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415  # absent in some builds

    world: Any = dist.GroupMember.WORLD
    backend = dist.get_backend(parent)
    theirs: list[Any] = [parent._get_backend(each) for each in parent._device_types]  # noqa: SLF001  # torch has no public way to ask
    can_change = all(any(hasattr(each, setter) for setter in _SETTERS) for each in theirs)
    with _binding.hidden(world) as device:
        group, _ = c10d._new_process_group_helper(  # noqa: SLF001  # there is no public way, see above
            len(ranks),
            ranks.index(world.rank()),
            list(ranks),
            backend,
            store,
            name,  # type: ignore[arg-type]  # a NewType of str
            timeout=min(limit, CONNECT_MAX) if can_change else timeout,
            group_desc=f"objcomm.{purpose}",
        )
    order = {rank: place for place, rank in enumerate(ranks)}
    c10d._world.pg_group_ranks[group] = order  # noqa: SLF001  # as new_group does
    group.bound_device_id = device
    for each in group._device_types:  # noqa: SLF001  # torch has no public way to ask
        made: Any = group._get_backend(each)  # noqa: SLF001  # nor for this
        for setter in _SETTERS:
            with contextlib.suppress(AttributeError, RuntimeError):
                getattr(made, setter)(timeout)
                break
    return group


# How a backend's time limit is changed, where it can be: XCCL, and others, could not before torch
# 2.12 (https://github.com/intel/torch-xpu-ops/issues/3101).
_SETTERS = ("_set_default_timeout", "set_timeout")


def has_gloo(group: Any) -> bool:
    """Whether a process group uses Gloo, for any type of device."""
    return str(dist.Backend.GLOO) in str(dist.get_backend_config(group))


def is_alive(group: Any) -> bool:
    """Whether torch knows a process group: it was not destroyed."""
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def is_bound(group: Any) -> bool:
    """Whether a process group was told its device when it was made, as by ``device_id=``."""
    return _binding.of(group) is not None


class _Binding:
    """Hides from torch that the world is bound to a device, while any thread makes a group.

    Torch would split the world's NCCL communicator for the new group, which every rank of the
    world would have to join. A communicator of the group's own is made at its first use instead.
    """

    def __init__(self) -> None:
        # Not held while a thread connects: two that wait for different ranks must not wait for
        # each other.
        self._lock = threading.RLock()
        self._hiding = 0
        self._device: torch.device | None = None

    def of(self, group: Any) -> torch.device | None:
        """A group's device, hidden or not; None where there is none."""
        with self._lock:
            is_hidden = self._hiding > 0 and group is dist.GroupMember.WORLD
            return self._device if is_hidden else getattr(group, "bound_device_id", None)

    @contextlib.contextmanager
    def hidden(self, world: Any) -> Iterator[torch.device | None]:
        """Hide it in this block, which gets it."""
        with self._lock:
            self._hiding += 1  # first: a handler that hides it meanwhile finds it hidden
            if self._hiding == 1:
                self._device = world.bound_device_id
                world.bound_device_id = None
            device = self._device
        try:
            yield device
        finally:
            with self._lock:
                if self._hiding == 1:
                    world.bound_device_id = self._device
                self._hiding -= 1


_binding = _Binding()
