"""Torch's process groups: the group that a call means, its ranks and store, and its creation.

All uses of torch's private API for this are here. ``dist.new_group`` must be called by every rank
of the world, in the same order. With ``use_local_synchronization=True`` only members must call it,
but torch then derives the group's name from its ranks and the number of groups that this process
has. Members that created different groups earlier wait for each other under different names until
the timeout. Here, the members agree on a name beforehand.
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

from objcomm._config import GroupLike  # noqa: TC001  # needed at run time by typing.get_type_hints
from objcomm._environment import Unjoined, tells_no_size, unjoined_in
from objcomm.errors import NotInGroupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


#: A group's timeout if its own can't be found: torch's default for Gloo.
TIMEOUT_SECONDS = 1800.0


def store_of(group: Any) -> Any:
    """Return the store over which the members of a process group met; None if torch has none."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415  # absent in some builds

    # Before torch 2.10, only torch's internal record of each group has it.
    _, store = c10d._world.pg_map.get(group, (None, None))  # noqa: SLF001  # see above
    return store


def bare(store: Any) -> Any:
    """Return a store without its key prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


#: The group of a rank that is not a member. It is torch's own object, because programs compare
#: with ``is``; a torch without distributed has none. (None as ``group=`` means the world.)
NOBODY: Any = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else -100


def is_initialized() -> bool:
    """Whether torch.distributed is available and ``init_process_group`` was called.

    Examples:
        >>> import objcomm
        >>> objcomm.is_initialized()
        False
    """
    return dist.is_available() and dist.is_initialized()


#: Read by ``dist.GroupMember.WORLD``, which takes three Python calls.
_world: Any = dist.distributed_c10d._world if dist.is_available() else None  # noqa: SLF001  # see above


def default_group() -> Any:
    """Return the group of all ranks; None before ``init_process_group`` and without distributed."""
    return None if _world is None else _world.default_pg


def is_nobody(group: GroupLike) -> bool:
    """Whether ``group=`` is the value that a rank outside of a group has for it."""
    return group is NOBODY or (isinstance(group, int) and group == NOBODY)


def is_world(process_group: Any) -> bool:
    """Whether a process group is the world."""
    return process_group is dist.GroupMember.WORLD


def process_group_of(group: GroupLike, operation: str = "") -> Any:
    """Return torch's process group for ``group=``, or None on a rank outside of it.

    Args:
        group: as the user passed it.
        operation: the operation that the user called, for an error's text.

    Raises:
        UsageError: ``group`` is a mesh of several dimensions, or not a group.
    """
    if group is None:
        return dist.GroupMember.WORLD
    if hasattr(group, "get_group") and hasattr(group, "mesh"):
        mesh: Any = group
        if mesh.ndim != 1:
            raise UsageError(
                f"{_prefix(operation)}group= must be a mesh of one dimension, not of {mesh.ndim}; "
                "slice it: mesh['dp']"
            )
        return mesh.get_group() if mesh.get_coordinate() is not None else None
    if is_nobody(group):
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"{_prefix(operation)}group={group!r} must be a process group, a device mesh or None; "
            "use objcomm.new_group to make a group from a list of ranks"
        )
    return group


def _prefix(operation: str) -> str:
    """Return the beginning of an error's text."""
    return f"{operation}: " if operation else ""


def refuse_worker(operation: str, rank: int) -> None:
    """Raise an error in a DataLoader worker, which is not a rank.

    Args:
        operation: the operation that the user called.
        rank: global rank of the process that the worker belongs to; -1 if unknown.

    Raises:
        UsageError: this process is a worker.
    """
    worker = get_worker_info()
    if worker is not None:
        whose = f"rank {rank}" if rank >= 0 else "a rank"
        raise UsageError(
            f"{_prefix(operation)}this process is worker {worker.id} of a DataLoader of {whose}, "
            "and is not a rank itself; make this call in the process that reads from the "
            "DataLoader, or set num_workers=0"
        )


class _Inheritance:
    """Remembers the world that a forked process inherited, whose connections are the parent's.

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
        """Whether a world was created before this process was forked."""
        return world is not None and self._world() is world


def _nobody() -> None:
    """Return None, like a dead weak reference."""


inheritance = _Inheritance()


def group_for_call(group: GroupLike, operation: str = "") -> Any:
    """Return the process group for a call with this ``group=``; None for a world of one.

    Args:
        group: as the user passed it.
        operation: the operation that the user called, for an error's text.

    Raises:
        UsageError: a launcher has started other ranks, or ``group`` was given, but
            torch.distributed is not initialized; or ``group`` is a mesh of several dimensions, or
            not a group.
        NotInGroupError: this rank is not a member of the group.
    """
    prefix = _prefix(operation)
    if not is_initialized():
        is_sure = group is not None or tells_no_size()
        promise = "" if is_sure else unjoined_in(os.environ).promise
        if promise:
            refuse_worker(operation, unjoined_in(os.environ).rank)
            raise UsageError(
                f"{prefix}{promise} says that there are other ranks, but torch.distributed is not "
                "initialized; make this call after objcomm.init or init_process_group, and before "
                "objcomm.shutdown or destroy_process_group"
            )
        if is_nobody(group):
            raise NotInGroupError(f"{prefix}this rank is not a member of this group")
        if group is not None:
            raise UsageError(
                f"{prefix}group={group!r} was given, but torch.distributed is not initialized; "
                "make this call after objcomm.init or init_process_group, and before "
                "objcomm.shutdown or destroy_process_group, or leave group= out"
            )
        return None
    process_group = process_group_of(group, operation)
    if process_group is None or process_group.rank() < 0:
        raise NotInGroupError(
            f"{prefix}global rank {dist.get_rank()} is not a member of this group; "
            "let only its members make this call"
        )
    return process_group


def ranks_of(process_group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group's members, in group rank order."""
    return tuple(dist.get_process_group_ranks(process_group))


def timeout_of(process_group: Any) -> float:
    """Return a group's own timeout, in seconds."""
    for device in process_group._device_types:  # noqa: SLF001  # torch has no public way to ask
        backend = process_group._get_backend(device)  # noqa: SLF001  # likewise
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return TIMEOUT_SECONDS


#: Backends whose ranks may not be processes, or may not share a store.
_UNREACHABLE = {"fake", "mpi", "threaded"}
#: Class names of stores. Torch uses a plain ``Store`` as a placeholder, and 2.15 has a
#: ``FakeStore``.
_STORES_OF_ONE_PROCESS = {"FakeStore", "HashStore", "Store"}


def is_reachable(group: GroupLike) -> bool:
    """Whether objcomm can connect the ranks of ``group=``; the same answer on every rank.

    Ranks meet in the group's store, so they must be processes that share one. True if there is
    nothing to connect: on a rank outside of the group, and in a world of one. False for anything
    that is not a group, and for a group that torch's own code created without ``new_group``,
    whether there is a world or not.
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
    """Return what is known about this rank while torch.distributed is not initialized."""
    if group is None:
        return unjoined_in(os.environ)
    return Unjoined(-1, -1, "") if is_nobody(group) else Unjoined(0, 1, "")


def rank(group: GroupLike = None) -> int:
    """Return this process's rank within ``group``: 0 in a world of one, -1 outside the group.

    Never raises and never communicates, so a logging filter may call it anywhere. Before the ranks
    have joined, the rank comes from the launcher's variables that ``objcomm.init`` reads; it is -1
    if they say that there are other ranks but not which rank this is.

    Args:
        group: a process group or a one-dimensional device mesh; defaults to the world.

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
    """Return the number of ranks in ``group``: 1 in a world of one, -1 outside the group.

    Never raises and never communicates. Before the ranks have joined, the number comes from the
    launcher's variables, as in ``rank``.

    Args:
        group: a process group or a one-dimensional device mesh; defaults to the world.

    Examples:
        >>> import objcomm
        >>> objcomm.world_size()
        1
    """
    try:
        return process_group_of(group).size() if is_initialized() else _not_joined(group).world_size
    except (AttributeError, RuntimeError, UsageError):
        return -1


# All members have arrived and only need to connect. If one dies now, the others must not wait for
# the timeout of a call.
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
    """Create a process group with the backend of ``parent``; all of ``ranks`` must call this.

    It may block in C++ for up to ``limit``.

    Args:
        parent: the group that its members belong to.
        name: the same on all members, and different from every other group's.
        ranks: global ranks, in the order of the new group.
        limit: how long to wait for the connections.
        timeout: the new group's own timeout.
        purpose: the purpose of the group, for torch's log.
        store: a connection to the world's store that nothing else uses meanwhile.

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


# The classes of torch's own backends for devices, by name. Both connect at their first transfer.
_OF_DEVICES = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}

# objcomm's own limits end waits for a communicator. NCCL's watchdog would end the process.
_NEVER = timedelta(days=365)


_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment = threading.RLock()  # reentrant: a destructor may create another backend


@contextlib.contextmanager
def _errors_left_to_objcomm() -> Iterator[None]:
    """Keep the watchdog of an NCCL backend created here from ending the process when a peer dies.

    A verdict aborts the backend instead. ``dist.distributed_c10d._abort_process_group`` asks for
    this setting, which the backend reads from the environment when it is created; its options do
    not include it. A group that another thread creates at the same moment gets it, too.
    """
    with _environment:
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = "0"
        try:
            yield
        finally:
            del os.environ[_ERROR_HANDLING]
            if before is not None:
                os.environ[_ERROR_HANDLING] = before


def can_be_created(name: str) -> bool:
    """Whether ``communicator`` can create a backend of this name."""
    return name in _OF_DEVICES or name.upper() in dist.Backend._plugins  # noqa: SLF001  # torch has no public way to ask


def communicator(backend: str, name: str, *, store: Any, rank: int, ranks: Sequence[int]) -> Any:
    """Create a backend between some ranks, which belongs to no process group.

    This is local: NCCL and similar backends connect at their first transfer. Torch does not
    register it, because not all ranks create one at the same time, and torch derives the names of
    later groups from the number of registered ones.

    Args:
        backend: a name that ``can_be_created`` accepts.
        name: the same on all its ranks, and different from every other's.
        store: the world's store.
        rank: this rank's place in ``ranks``.
        ranks: global ranks.
    """
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415  # absent in some builds

    # A thread that waits in the store blocks its connection.
    own = dist.PrefixStore(name, store.clone())
    if backend in _OF_DEVICES:
        kind: Any = getattr(c10d, _OF_DEVICES[backend])
        options = kind.Options()
        options._timeout = _NEVER  # noqa: SLF001  # torch has no public name
        options.global_ranks_in_group, options.group_name = list(ranks), name
        with _errors_left_to_objcomm():
            return kind(own, rank, len(ranks), options)
    plugin: Any = dist.Backend._plugins[backend.upper()]  # noqa: SLF001  # likewise
    if not plugin.extended_api:
        return plugin.creator_fn(own, rank, len(ranks), _NEVER)
    given: Any = c10d._DistributedBackendOptions()  # noqa: SLF001  # likewise
    given.store, given.group_rank, given.group_size = own, rank, len(ranks)
    given.timeout, given.group_id, given.global_ranks_in_group = _NEVER, name, list(ranks)
    return plugin.creator_fn(given, None)


# Methods that change a backend's timeout. XCCL and others had none before torch 2.12
# (https://github.com/intel/torch-xpu-ops/issues/3101).
_SETTERS = ("_set_default_timeout", "set_timeout")


def has_gloo(group: Any) -> bool:
    """Whether a process group uses Gloo for any type of device."""
    return str(dist.Backend.GLOO) in str(dist.get_backend_config(group))


def is_alive(group: Any) -> bool:
    """Whether torch still knows a process group, which it does until the group is destroyed."""
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


class _Binding:
    """Hides from torch that the world is bound to a device while any thread creates a group.

    Otherwise torch would split the world's NCCL communicator for the new group, and every rank of
    the world would have to participate. With this, torch creates a separate communicator at the
    group's first use.
    """

    def __init__(self) -> None:
        # Not held while a thread connects: threads that wait for different ranks must not wait for
        # each other.
        self._lock = threading.RLock()
        self._hiding = 0
        self._device: torch.device | None = None

    @contextlib.contextmanager
    def hidden(self, world: Any) -> Iterator[torch.device | None]:
        """Hide the device during this block, and yield it."""
        with self._lock:
            self._hiding += 1  # first, in case a signal handler interrupts this
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
