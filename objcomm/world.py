"""Which group a call means, and the questions about a group that need no traffic."""

import os
import threading
import weakref
from typing import Any, Literal, TypeAlias

import torch.distributed as dist

from objcomm.counters import OperationStats
from objcomm.environment import Standing, local_rank_in, standing_in
from objcomm.errors import NotInGroupError, UsageError
from objcomm.group import Group
from objcomm.transport.stores import bare, store_of

#: What ``group=`` takes: a process group, a one-dimensional device mesh, or None for the world.
GroupLike: TypeAlias = Any

#: The group of a rank that is outside: ``dist.GroupMember.NON_GROUP_MEMBER``, which a torch
#: without distributed does not have. (None as ``group=`` means the world.)
NOBODY = -100


class _Groups:
    """The state of every live process group, by the object and never by its name, which recurs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
        self.solo = Group()

    def of(self, process_group: Any) -> Group:
        found = self._known.get(process_group)
        if found is None:
            with self._lock:
                made = Group(process_group, dist.GroupMember.WORLD)
                found = self._known.setdefault(process_group, made)
        return found

    def all(self) -> list[Group]:
        with self._lock:
            return list(self._known.values())


_groups = _Groups()


def known_groups() -> list[Group]:
    """Every group that this process has used and that still lives."""
    return _groups.all()


def solo_group() -> Group:
    """The group of calls that were made without torch.distributed."""
    return _groups.solo


def is_initialized() -> bool:
    """Whether torch.distributed is there and ``init_process_group`` was called.

    Examples:
        >>> import objcomm
        >>> objcomm.is_initialized()
        False
    """
    return dist.is_available() and dist.is_initialized()


def resolve(group: GroupLike) -> Group:
    """What ``group=`` means here.

    Returns:
        A world of one where torch.distributed is not initialised.

    Raises:
        UsageError: the environment promises other ranks, but nothing is initialised; or it is a
            mesh of several dimensions, or no group at all.
        NotInGroupError: this rank is no member.
    """
    if not is_initialized():
        promise = standing_in(os.environ).promise if group is None else ""
        if promise:
            raise UsageError(
                f"{promise} promises other ranks, but torch.distributed is not initialised; call "
                "objcomm.init or init_process_group first"
            )
        if is_nobody(group):
            raise NotInGroupError("this rank is no member of this group")
        if group is not None:
            raise UsageError("group= was given, but torch.distributed is not initialised")
        return _groups.solo
    process_group = process_group_of(group)
    if process_group is None or process_group.rank() < 0:
        raise NotInGroupError(
            f"global rank {dist.get_rank()} is no member of this group; "
            "let only its members make this call"
        )
    return _groups.of(process_group)


def is_nobody(group: GroupLike) -> bool:
    """Whether ``group=`` is what a rank outside of a group has in its place."""
    return isinstance(group, int) and group == NOBODY


def process_group_of(group: GroupLike) -> Any:
    """Torch's own object for ``group=``, or None on a rank outside.

    Raises:
        UsageError: it is a mesh of several dimensions, or no group at all.
    """
    if group is None:
        return dist.GroupMember.WORLD
    if hasattr(group, "get_group") and hasattr(group, "mesh"):
        if group.ndim != 1:
            raise UsageError(f"a mesh of {group.ndim} dimensions is no group; slice it: mesh['dp']")
        return group.get_group() if group.get_coordinate() is not None else None
    if is_nobody(group):
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"group={group!r} is neither a process group nor a device mesh")
    return group


#: Backends whose ranks may be no processes, or none that have a store in common.
_UNREACHABLE = {"fake", "mpi", "threaded"}
#: Stores by the names of their classes; a bare one stands where there is none, and torch 2.15 has a
#: ``FakeStore``.
_STORES_OF_ONE_PROCESS = {"FakeStore", "HashStore", "Store"}


def is_reachable(group: GroupLike) -> bool:
    """Whether objcomm can join the ranks of ``group=``; the same answer on each of them.

    Its ranks meet in the group's store, so they must be processes that share one. True where
    nothing has to be joined: on a rank outside, and without torch.distributed. False for what is
    no group.
    """
    if not is_initialized():
        return True
    try:
        process_group = process_group_of(group)
        if process_group is None or process_group.rank() < 0 or process_group.size() == 1:
            return True
        if dist.get_backend(process_group) in _UNREACHABLE:
            return False
        store = bare(store_of(process_group))
    except (UsageError, RuntimeError, ValueError):
        return False
    return store is not None and type(store).__name__ not in _STORES_OF_ONE_PROCESS


def _not_joined(group: GroupLike) -> Standing:
    """What is known of this rank where torch.distributed is not initialised."""
    if group is None:
        return standing_in(os.environ)
    return Standing(-1, -1, "") if is_nobody(group) else Standing(0, 1, "")


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
        NotInGroupError: it is ``"node"``, and this rank is no member of ``group``.

    Examples:
        >>> import objcomm
        >>> objcomm.is_main()
        True
    """
    if isinstance(group, str):  # it would be False on all ranks
        raise UsageError(f"is_main: {group!r} is no group; write scope={group!r}")
    if scope == "world":
        if group is None and not is_initialized():
            return _is_main_by_launcher()
        return rank(group) == 0
    if scope != "node":
        raise UsageError(f"is_main: scope={scope!r} is neither 'world' nor 'node'")
    local = local_rank_in(os.environ) if group is None else None
    if local is not None and not is_initialized():
        return local == 0
    whole = resolve(group)
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
    standing = standing_in(os.environ)
    if standing.rank < 0:  # it would be False on all ranks
        raise UsageError(
            f"is_main: {standing.promise} promises other ranks, but no variable says which one "
            "this is; call objcomm.init or init_process_group first"
        )
    return standing.rank == 0


def stats(group: GroupLike = None) -> dict[str, OperationStats]:
    """What each operation on ``group`` has cost this rank so far.

    Local: needs no other rank.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the world.

    Returns:
        Figures by operation, such as ``stats()["broadcast"].sent_nbytes``.

    Raises:
        NotInGroupError: this rank is no member of ``group``.

    Examples:
        >>> import objcomm
        >>> objcomm.reset_stats()
        >>> objcomm.barrier()
        >>> objcomm.stats()["barrier"].calls
        1
    """
    return resolve(group).counters.snapshot()


def reset_stats(group: GroupLike = None) -> None:
    """Begin counting ``group``'s operations at zero, on this rank.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the world.

    Raises:
        NotInGroupError: this rank is no member of ``group``.

    Examples:
        >>> import objcomm
        >>> objcomm.reset_stats()
        >>> objcomm.stats()
        {}
    """
    resolve(group).counters.clear()
