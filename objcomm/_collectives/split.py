"""Process groups made from another group's ranks: by color, as a copy, by host, from a list.

Ranks agree over the wire on who is in a new group, and on whether all members already have that
group. If one rank remembered a group that another had forgotten, one would wait for the other.
"""

import collections
import functools
import reprlib
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, cast

import torch.distributed as dist

from objcomm._algorithms import routes
from objcomm._algorithms.device import DevicePlace
from objcomm._calls.call import Call, plain_call
from objcomm._calls.group import Group, resolve
from objcomm._collectives.gather import all_gather_in
from objcomm._config import GroupLike, Timeout, check_name, settings, whole_number
from objcomm._environment import machine
from objcomm._failures.watchdog import board_thread_of
from objcomm._observe.log import log
from objcomm._transport.gloo import see_room_for
from objcomm._transport.link import Deadline
from objcomm._transport.threads import carried_out
from objcomm._wire.failure_message import line_of
from objcomm._wire.header import Operation, fingerprint
from objcomm._wire.message import Message
from objcomm._world import (
    NOBODY,
    create,
    has_gloo,
    is_alive,
    is_initialized,
    process_group_of,
    store_of,
)
from objcomm.errors import CollectiveError, DecodeError, RankFailure, UsageError, ranges_text

#: Ranks within the parent, in the order of the new group.
Members: TypeAlias = tuple[int, ...]

# torch exceeds its limit; wait this much longer, because its own error is more informative.
_LONGER = 1.2

# A name is the same on all members and identifies them; only objcomm creates names of this form.
_NAME = "objcomm/{members:016x}/{fresh}"


class _Contribution(NamedTuple):
    """What one rank sends to the others."""

    color: int | str | None
    key: int
    fresh: str  # the end of a new group's name, if this rank is its first member
    names: list[str]  # of the groups that this rank already has


class _Children:
    """The groups made from each group on this rank; keeps none of them alive."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of: weakref.WeakKeyDictionary[Any, dict[Members, weakref.ref[Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def living(self, parent: Any) -> "dict[Members, dist.ProcessGroup]":
        """Return those that still exist, and forget the destroyed ones."""
        with self._lock:
            found = self._of.get(parent, {})
            strong: dict[Members, Any] = {each: found[each]() for each in found}
            living = {members: group for members, group in strong.items() if _is_there(group)}
            self._of[parent] = {members: found[members] for members in living}
            return living

    def add(self, parent: Any, members: Members, group: Any) -> None:
        with self._lock:
            self._of.setdefault(parent, {})[members] = weakref.ref(group)


def _is_there(group: Any) -> bool:
    return group is not None and is_alive(group)


_children = _Children()


def split(
    color: SupportsIndex | str | None,
    key: SupportsIndex | None = None,
    *,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> "dist.ProcessGroup":
    """Split a group: ranks that pass the same color form a new group.

    Every rank of ``group`` must call this; other ranks must not. Several groups may be split at
    the same time. A new group has the backend and timeout of ``group``, and its own connections.
    Repeating a split of the same group returns the same object, until a member destroys it.

    Args:
        color: an int or a string, of the same type on all ranks. None or a negative int leaves
            this rank out of all new groups.
        key: an int that orders the ranks; ranks with equal keys keep their order in ``group``.
            None means 0.
        name: name of this call; see ``objcomm.broadcast``.
        group: the group to split: process group or one-dimensional device mesh; None means the
            world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        A ``torch.distributed.ProcessGroup``, which torch's functions also accept. A rank without a
        color gets ``dist.GroupMember.NON_GROUP_MEMBER``; every objcomm call rejects it with
        NotInGroupError. Without torch.distributed, None, which means a world of one.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: colors have different types, or some rank could not connect. Raised on
            every rank; no rank has the new group then.
        ObjcommError: any other error of ``objcomm.all_gather``, on the same ranks.

    Examples:
        >>> import objcomm
        >>> half = objcomm.split(objcomm.rank() % 2)
        >>> objcomm.all_gather("shard-0.parquet", group=half)
        ['shard-0.parquet']
    """
    mine, place = _color(color), _integer("key", 0 if key is None else key)
    return _divided(
        Operation.SPLIT, mine, place, _by_color, name=name, group=group, timeout=timeout
    )


def dup(*, name: str = "", group: GroupLike = None, timeout: Timeout = None) -> "dist.ProcessGroup":
    """Create another group of the same ranks, with its own connections.

    Every rank of ``group`` must call this. Messages in one group never match those in the other,
    so a library can communicate in a copy of the group that its user passed in. Each call creates
    a new group; ``dist.destroy_process_group`` destroys it.

    Args:
        name: name of this call; see ``objcomm.broadcast``.
        group: the group to copy; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        A ``torch.distributed.ProcessGroup`` with the ranks of ``group`` in the same order. Without
        torch.distributed, None, which means a world of one.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: some rank could not connect. Raised on every rank; no rank has the new
            group then.
        ObjcommError: any other error of ``objcomm.all_gather``, on the same ranks.

    Examples:
        >>> import objcomm
        >>> mine = objcomm.dup()
        >>> objcomm.world_size(mine) == objcomm.world_size()
        True
    """
    return _divided(
        Operation.DUP, 0, 0, _by_color, name=name, group=group, timeout=timeout, is_always_new=True
    )


def node_group(
    *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> "dist.ProcessGroup":
    """Return a group of the ranks of ``group`` that run on this rank's host.

    Every rank of ``group`` must call this. Each rank sends the name of its host; environment
    variables are not used. Containers with different host names, networks or shared memory count
    as different hosts, even on one machine. To group by another kind of place, use ``split``.

    Args:
        name: name of this call; see ``objcomm.broadcast``.
        group: the group whose ranks to use; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        A ``torch.distributed.ProcessGroup`` of one host's ranks, in the order of ``group``; the
        same object each time, as with ``split``. Without torch.distributed, None, which means a
        world of one.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: some rank could not connect. Raised on every rank; no rank has the new
            group then.
        ObjcommError: any other error of ``objcomm.all_gather``, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.all_gather("gpu 0", group=objcomm.node_group())
        ['gpu 0']
    """
    made = _divided(
        Operation.NODE_GROUP, machine(), 0, _by_color, name=name, group=group, timeout=timeout
    )
    if made is not None:
        resolve(group).near = made
    return made


def new_group(
    ranks: Iterable[SupportsIndex],
    *,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> "dist.ProcessGroup":
    """Create a group of the listed ranks; no other rank needs to call this.

    Every rank in ``ranks`` must call this, with the same list. On any other rank, a call returns
    immediately. Each call creates a new group with the backend and timeout of ``group``, and its
    own connections; ``dist.destroy_process_group`` destroys it. By contrast, ``dist.new_group``
    must be called by every rank of the world, in the same order.

    Only the members communicate, so ranks outside the list may have died. The first call for a
    list opens the connections over which the members agree; later calls for it reuse them.

    Args:
        ranks: global ranks, in the order of the new group.
        name: name of this call; see ``objcomm.broadcast``.
        group: the group that the ranks are members of; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        A ``torch.distributed.ProcessGroup``, which torch's functions also accept. A rank that is
        not in ``ranks`` gets ``dist.GroupMember.NON_GROUP_MEMBER``; every objcomm call rejects it
        with NotInGroupError. Without torch.distributed, None, which means a world of one.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        DesyncError: members passed different lists and wait for each other. Raised on those
            members.
        TransportTimeout: some member did not arrive. Raised on every member that waited for it.
        CollectiveError: some member could not connect. Raised on every member; none has the new
            group then.
        ObjcommError: any other error of ``objcomm.all_gather``, on the same ranks. These errors
            number ranks as in the new group.

    Examples:
        >>> import objcomm
        >>> ranks = [0]
        >>> if objcomm.rank() in ranks:
        ...     readers = objcomm.new_group(ranks)
        ...     objcomm.all_gather("shard-0.parquet", group=readers)
        ['shard-0.parquet']
    """
    operation = Operation.NEW_GROUP
    whole = resolve(group, operation.name.lower())
    deadline = whole.deadline(operation.name.lower(), timeout)
    check_name(name, operation.name.lower())
    members = _members(ranks, whole)
    if whole.rank not in members:
        return cast("dist.ProcessGroup", NOBODY)  # torch has no type for non-members
    if not is_initialized():
        return cast("dist.ProcessGroup", None)  # as ``group=``, None means this rank alone
    part: Any = whole.part(members)
    own = _Contribution(None, 0, uuid.uuid4().hex, [])
    with plain_call(operation, name=name, group=part, timeout=timeout) as call:
        contributions = _exchanged(call, own)
    everyone = tuple(range(part.size))
    made = connected(operation, name, (everyone, _name(everyone, contributions)), part, deadline)
    return cast("dist.ProcessGroup", made)


def _members(ranks: Iterable[SupportsIndex], whole: Group) -> Members:
    """Convert a list of global ranks to ranks within the group.

    Raises:
        UsageError: it is not a list of distinct global ranks of the group.
    """
    listed = None if isinstance(ranks, (str, bytes)) else _whole_numbers(ranks)
    if listed is None:
        raise UsageError(f"new_group: ranks must be a list of global ranks, not {ranks!r}")
    if not listed:
        raise UsageError("new_group: ranks=[] names no rank; give those of all members")
    outside = sorted(set(listed).difference(whole.ranks))
    if outside:
        raise UsageError(
            f"new_group: ranks={reprlib.repr(listed)} has {ranges_text(outside)}, which are not in "
            f"this group; its global ranks are {ranges_text(whole.ranks)}"
        )
    twice = [rank for rank, times in collections.Counter(listed).items() if times > 1]
    if twice:
        raise UsageError(
            f"new_group: ranks={reprlib.repr(listed)} has {ranges_text(twice)} more than once; "
            "name each once"
        )
    return tuple(whole.ranks.index(rank) for rank in listed)


def _whole_numbers(values: Iterable[object]) -> list[int] | None:
    """Return the ints; None if any value is not an int, or ``values`` is not iterable."""
    try:
        numbers = [whole_number(each) for each in values]
    except TypeError:
        return None
    whole = [each for each in numbers if each is not None]
    return whole if len(whole) == len(numbers) else None


def near_group(
    *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> "dist.ProcessGroup":
    """Like ``node_group``, but asks only once per lane; every rank of ``group`` must call this."""
    found = resolve(group).near
    return found if _is_there(found) else node_group(name=name, group=group, timeout=timeout)


def leaders(
    *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> "dist.ProcessGroup":
    """Return a group of the first rank of each host.

    Every rank of ``group`` must call this. Hosts are distinguished as in ``node_group``.

    Args:
        name: name of this call; see ``objcomm.broadcast``.
        group: the group whose ranks to use; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        On the first rank of each host, a ``torch.distributed.ProcessGroup`` of these ranks in the
        order of ``group``; the same object each time, as with ``split``. Other ranks get
        ``dist.GroupMember.NON_GROUP_MEMBER``, for which ``objcomm.rank`` returns -1; every objcomm
        call rejects it with NotInGroupError. Without torch.distributed, None, which means a world
        of one.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: some rank could not connect. Raised on every rank; no rank has the new
            group then.
        ObjcommError: any other error of ``objcomm.all_gather``, on the same ranks.

    Examples:
        >>> import objcomm
        >>> heads = objcomm.leaders()
        >>> if objcomm.rank(heads) >= 0:
        ...     objcomm.all_gather("host 0", group=heads)
        ['host 0']
    """
    return _divided(
        Operation.LEADERS, machine(), 0, _leaders, name=name, group=group, timeout=timeout
    )


def _color(color: object) -> int | str | None:
    """Return a color as plain data; None for no group.

    Raises:
        UsageError: it is not an int, a string or None.
    """
    if color is None or isinstance(color, str):
        return color
    number = _integer("color", color)
    return None if number < 0 else number


def _integer(name: str, value: object) -> int:
    """Return an argument as an int.

    Raises:
        UsageError: it is not an int.
    """
    number = whole_number(value)
    if number is None:
        wanted = "an int, a text or None" if name == "color" else "an int or None"
        raise UsageError(f"split: {name}={value!r} is not {wanted}")
    return number


def _by_color(contributions: Sequence[_Contribution]) -> list[Members]:
    """Return the ranks of each color, ordered by key and then by rank."""
    parts: dict[int | str, list[int]] = {}
    for rank, each in enumerate(contributions):
        if each.color is not None:
            parts.setdefault(each.color, []).append(rank)
    return [
        tuple(sorted(part, key=lambda rank: contributions[rank].key)) for part in parts.values()
    ]


def _leaders(contributions: Sequence[_Contribution]) -> list[Members]:
    """Return one group, of the first rank of each color."""
    return [tuple(sorted(min(part) for part in _by_color(contributions)))]


def _check_colors(
    operation: str, contributions: Sequence[_Contribution], messages: Sequence[Message]
) -> None:
    """Reject colors of different types, on every rank.

    Args:
        operation: the operation that the user called.
        contributions: what each rank sent.
        messages: the messages that carried ``contributions``.

    Raises:
        CollectiveError: types differ; it names the ranks that differ from the first rank that has
            a color.
    """
    kinds = {
        rank: type(each.color) for rank, each in enumerate(contributions) if each.color is not None
    }
    first = next(iter(kinds), 0)
    failures = {}
    for rank, kind in kinds.items():
        if kind is not kinds[first]:
            reason = (
                f"its color is of type {kind.__name__}, "
                f"that of rank {first} is {kinds[first].__name__}"
            )
            called = line_of(messages[rank].header.call_site)
            failures[rank] = RankFailure(rank, "TypeError", reason, called)
    if failures:
        raise CollectiveError(operation, failures)


def _divided(
    operation: Operation,
    color: int | str | None,
    key: int,
    parts_of: Callable[[Sequence[_Contribution]], list[Members]],
    *,
    name: str,
    group: GroupLike,
    timeout: Timeout,
    is_always_new: bool = False,
) -> "dist.ProcessGroup":
    """Return this rank's part of a group, as a process group that all its members have."""
    called = operation.name.lower()
    deadline = resolve(group, called).deadline(called, timeout)
    parent = process_group_of(group) if is_initialized() else None
    living = _children.living(parent) if parent is not None and not is_always_new else {}
    own = _Contribution(color, key, uuid.uuid4().hex, [each.group_name for each in living.values()])
    with plain_call(operation, name=name, group=group, timeout=timeout) as call:
        contributions = _exchanged(call, own)
    if operation in (Operation.NODE_GROUP, Operation.LEADERS):
        resolve(group).hosts = tuple(str(each.color) for each in contributions)
    parts = {members: _name(members, contributions) for members in parts_of(contributions)}
    mine = next((members for members in parts if call.rank in members), None)
    # torch has no type for a non-member, or for a missing torch.distributed.
    nothing = cast("dist.ProcessGroup", NOBODY if mine is None else None)
    if parent is None:
        return nothing
    old = {each for known in contributions for each in known.names}
    if old.issuperset(parts.values()):
        return nothing if mine is None else living[mine]
    is_lacking = mine is not None and parts[mine] not in old
    plan = (mine, parts[mine]) if mine is not None and is_lacking else None
    made = connected(operation, name, plan, group, deadline)
    if made is None:
        return nothing if mine is None else living[mine]
    if mine is not None and not is_always_new:
        _children.add(parent, mine, made)
    return made


def _exchanged(call: Call, own: _Contribution) -> list[_Contribution]:
    """Send this rank's contribution to all ranks, and return those of all ranks."""
    if call.is_alone:
        return [own]
    mine = call.message(own, tuple)
    with call.exchange as exchange:
        messages = routes.all_gather(exchange, mine)
    call.raise_failures(messages)
    contributions = [contribution_of(call.decode(message)) for message in messages]
    _check_colors(call.operation, contributions, messages)
    return contributions


def contribution_of(plain: Any) -> _Contribution:
    """Validate what a rank sent, and return it.

    Raises:
        DecodeError: it is malformed.
    """
    if isinstance(plain, (tuple, list)) and len(plain) == len(_Contribution._fields):
        color, key, fresh, names = plain
        is_right = (
            (color is None or type(color) in {int, str})
            and type(key) is int
            and isinstance(fresh, str)
            and isinstance(names, list)
            and all(isinstance(name, str) for name in names)
        )
        if is_right:
            return _Contribution(color, key, fresh, names)
    raise DecodeError("msgpack", "a rank did not send a color, a key and names")


def _name(members: Members, contributions: Sequence[_Contribution]) -> str:
    """Return a name that all members already have for their group, or a new name."""
    known = set.intersection(*(set(contributions[rank].names) for rank in members))
    stem = fresh_name(members, "")
    new = stem + contributions[members[0]].fresh
    return min((name for name in known if name.startswith(stem)), default=new)


def fresh_name(members: Members, fresh: str) -> str:
    """Return a name for a new group; ``fresh`` is unique, and the same on all ``members``."""
    number = fingerprint(",".join(map(str, members)))
    return _NAME.format(members=number, fresh=fresh)


def connected(  # noqa: C901  # one linear sequence of steps
    operation: Operation,
    name: str,
    plan: tuple[Members, str] | None,
    group: GroupLike,
    deadline: Deadline,
    *,
    decide: Callable[[bool], bool] = bool,
) -> "dist.ProcessGroup | None":
    """Create the process group of ``plan``; return it once every rank of ``group`` has its own.

    Every rank of ``group`` calls this if any rank needs a new group; a rank without a plan gets
    None.

    Args:
        operation: the operation that the user called.
        name: the name of this call.
        plan: the ranks within ``group`` of this rank's new group, and its name.
        group: the ranks that call this.
        deadline: how long all of this may take.
        decide: called once this rank has its new group; its argument says whether all other ranks
            are known to have theirs. Returns whether all keep them; by default, each decides alone.
    """
    made: list[dist.ProcessGroup] = []

    def check_room(_: None) -> None:
        if plan is not None:
            see_room_for(len(plan[0]) if has_gloo(resolve(group).process_group) else 1)

    def check(_: None) -> None:
        if failed:
            raise failed.pop()  # not held by a local: the traceback keeps this frame

    failed: list[BaseException] = []
    begin = functools.partial(plain_call, operation, name=name, group=group)
    # One rank may have received everything before another, and connecting blocks in C++. So ranks
    # connect only once all are known to arrive and to have enough file descriptors, and within this
    # call, so that the watchdog notices a death, and other ranks can be told where this rank is.
    with begin(timeout=deadline.seconds_left, must_agree="meet") as call:
        all_gather_in(call, None, check=check_room)()
        if plan is not None:
            outcome = _made(call, plan, group, deadline)
            error = outcome.exception()
            if error is None:
                made.append(outcome.result())
            else:
                failed.append(error)  # raised in ``check``, for all ranks
            del outcome, error
    try:
        with begin(timeout=deadline.seconds_left, must_agree="connect") as call:
            all_gather_in(call, None, check=check)()
        decide(True)  # noqa: FBT003  # a callback's only argument
    except BaseException as error:
        is_kept = bool(made) and decide(False)  # noqa: FBT003  # likewise
        if not is_kept or not isinstance(error, Exception):
            for each in made:
                dist.destroy_process_group(each)
            raise
    finally:
        failed.clear()  # an error's traceback keeps this frame alive
    for each in made:
        _forget_address(each)
    return made[0] if made else None


def _forget_address(made: Any) -> None:
    """Remove this rank's address in a new group from the store: all members have connected."""
    name, rank = made.group_name, made.rank()
    board_thread_of(process_group_of(None)).submit(lambda board: board.forget_address(name, rank))


def _made(
    call: Call, plan: tuple[Members, str], group: GroupLike, deadline: Deadline
) -> "Future[dist.ProcessGroup]":
    """Create the process group, wait until its members have connected, and return the outcome."""
    members, name = plan
    parent = resolve(group)  # in new_group, only the members' part of the group
    ranks = [parent.ranks[member] for member in members]
    log.debug("%s makes group %r of ranks %s", call.operation, name, ranks)
    world = process_group_of(None)
    clients = board_thread_of(world).clients_of_groups
    # Half, so that a rank that fails can report it before the others give up.
    limit = deadline.seconds_left / 2
    place = DevicePlace()

    def make() -> Any:
        with place:
            store = clients.take(store_of(world), settings().lost_after)
            made = create(
                parent.process_group,
                name,
                ranks,
                limit=timedelta(seconds=limit),
                timeout=timedelta(seconds=parent.deadline("", None).seconds),
                purpose=call.operation,
                store=store,
            )
        if dist.get_backend(made) == dist.Backend.GLOO:  # others may use it to connect later
            clients.give_back(store)
        return made

    if call.is_alone:
        outcome: Future[dist.ProcessGroup] = Future()
        carried_out(make, outcome)
        return outcome
    return call.exchange.apart(_LONGER * limit, make, dist.destroy_process_group)
