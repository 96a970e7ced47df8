"""Process groups made of the ranks of one: by colour, as a copy, by host, from a list.

Which ranks form a group is agreed over the wire, and so is whether they have that group already:
what one rank remembers and another does not would leave one waiting for the other.
"""

import collections
import functools
import reprlib
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, cast

import torch.distributed as dist

from objcomm._algorithms import routes
from objcomm._calls.call import Call
from objcomm._calls.group import Group, resolve
from objcomm._calls.work import DevicePlace
from objcomm._collectives.gather import all_gather_in
from objcomm._config import GroupLike, Timeout, check_name, settings, whole_number
from objcomm._environment import machine
from objcomm._failures.watchdog import board_thread_of
from objcomm._observe.log import log
from objcomm._transport.gloo import see_room_for
from objcomm._transport.link import Deadline
from objcomm._transport.threads import done_within
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

#: Ranks of the parent, in the order of the group that they form.
Members: TypeAlias = tuple[int, ...]

# All that travels here is plain data, and taken by ranks that refuse pickles, or all but pickles.
_CODEC = "msgpack"
_call = functools.partial(Call, codec=_CODEC, accept=(_CODEC,))

# How far torch may exceed its limit before we give up on it; its own error is more informative.
_LONGER = 1.2

# A name is the same on all members and says for whom it is; only objcomm makes names like it.
_NAME = "objcomm/{members:016x}/{fresh}"


class _Word(NamedTuple):
    """What one rank tells the others."""

    color: int | str | None
    key: int
    fresh: str  # what the name of a new group ends in, if this rank is the first of its members
    names: list[str]  # of the groups that this rank has already


class _Children:
    """The groups that were made of each group, on this rank; holds none of them alive."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of: weakref.WeakKeyDictionary[Any, dict[Members, weakref.ref[Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def living(self, parent: Any) -> "dict[Members, dist.ProcessGroup]":
        """Those that were not destroyed; what was is forgotten."""
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
    """Divide a group: ranks that give the same colour form a new group.

    Every rank of ``group`` must call this, and no other: several groups may be divided at once.
    The new group has the backend and the time limit of ``group``, and connections of its own. The
    same division of the same group gives the same object again, for as long as no member has
    destroyed it.

    Args:
        color: an int or a text, of one type on all ranks; None or a negative int on a rank that
            shall be in no group.
        key: an int; ranks are ordered by it, and by their rank in ``group`` where it is equal.
            None is 0.
        name: of this call, as in ``objcomm.broadcast``.
        group: what to divide: a process group, a one-dimensional device mesh, None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        A ``torch.distributed.ProcessGroup``, which torch's functions take too. On a rank without
        a colour ``dist.GroupMember.NON_GROUP_MEMBER``, which every call of objcomm refuses with
        NotInGroupError. Without torch.distributed None: a world of one.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: colours of two types, or some rank could not connect. Every rank; no
            rank has the new group then.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

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
    """Make another group of the same ranks, with connections of its own.

    Every rank of ``group`` must call this. What is sent in one group cannot meet what is sent in
    the other: a library can talk in a copy of the group that its user passed in. Each call makes a
    new group; ``dist.destroy_process_group`` ends it.

    Args:
        name: of this call, as in ``objcomm.broadcast``.
        group: what to copy; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        A ``torch.distributed.ProcessGroup`` with the ranks of ``group`` in the same order. Without
        torch.distributed None: a world of one.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: some rank could not connect. Every rank; no rank has the new group then.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

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
    """The ranks of ``group`` that run on this rank's host.

    Every rank of ``group`` must call this. Each rank tells the name of its host; no environment
    variable plays a part. Containers with different host names, network or shared memory count as
    different hosts, even on one machine. ``split`` takes any other name of a place.

    Args:
        name: of this call, as in ``objcomm.broadcast``.
        group: whose ranks; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        A ``torch.distributed.ProcessGroup`` of the ranks of one host in the order of ``group``;
        the same object each time, as with ``split``. Without torch.distributed None: a world of
        one.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: some rank could not connect. Every rank; no rank has the new group then.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

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
    """Make a group of the ranks in a list; no other rank need call this.

    Every rank in ``ranks`` must call this, with the same list. The others need not; one that does
    is told at once that it is outside. Each call makes a new group, with the backend and the time
    limit of ``group``, and connections of its own; ``dist.destroy_process_group`` ends it.
    ``dist.new_group`` asks every rank of the world instead, in one order.

    The members meet by themselves, so a rank outside may have died. What they agree on travels over
    connections that the first call for a list makes, and later ones for the same list use again.

    Args:
        ranks: global ranks, in the order that they have in the new group.
        name: of this call, as in ``objcomm.broadcast``.
        group: of which group they are ranks; None for the world.
        timeout: seconds or timedelta; the limit of ``group`` if None.

    Returns:
        A ``torch.distributed.ProcessGroup``, which torch's functions take too. On a rank that is
        not in ``ranks`` ``dist.GroupMember.NON_GROUP_MEMBER``, which every call of objcomm refuses
        with NotInGroupError. Without torch.distributed None: a world of one.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        DesyncError: members gave other lists and wait for each other. Those that do.
        TransportTimeout: some member did not come. Every member that waited for it.
        CollectiveError: some member could not connect. Every member; none has the new group then.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks. Ranks in any
            of these errors count as in the new group.

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
        return cast("dist.ProcessGroup", NOBODY)  # torch has no type for who is outside
    if not is_initialized():
        return cast("dist.ProcessGroup", None)  # accepted as ``group=``, which means this rank
    part: Any = whole.part(members)
    word = _Word(None, 0, uuid.uuid4().hex, [])
    with _call(operation, name=name, group=part, timeout=timeout) as call:
        words = _told(call, word)
    everyone = tuple(range(part.size))
    made = _connected(operation, name, (everyone, _name(everyone, words)), part, deadline)
    return cast("dist.ProcessGroup", made)


def _members(ranks: Iterable[SupportsIndex], whole: Group) -> Members:
    """The ranks in a list of global ones, as ranks within the group.

    Raises:
        UsageError: they are no such list.
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
    """Whole numbers; None if there is anything else, or if it is nothing to go through."""
    try:
        numbers = [whole_number(each) for each in values]
    except TypeError:
        return None
    whole = [each for each in numbers if each is not None]
    return whole if len(whole) == len(numbers) else None


def near_group(
    *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> "dist.ProcessGroup":
    """As ``node_group``, asked only once on each lane; every rank of ``group`` must call this."""
    found = resolve(group).near
    return found if _is_there(found) else node_group(name=name, group=group, timeout=timeout)


def leaders(
    *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> "dist.ProcessGroup":
    """The first rank of each host, as one group.

    Every rank of ``group`` must call this. What a host is, ``node_group`` tells.

    Args:
        name: of this call, as in ``objcomm.broadcast``.
        group: whose ranks; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        On the first rank of each host a ``torch.distributed.ProcessGroup`` of these ranks, in the
        order of ``group``; the same object each time, as with ``split``. On other ranks
        ``dist.GroupMember.NON_GROUP_MEMBER``, which every call of objcomm refuses with
        NotInGroupError; ``objcomm.rank`` of it is -1. Without torch.distributed None: a world of
        one.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: some rank could not connect. Every rank; no rank has the new group then.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

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
    """A colour as plain data; None for no group.

    Raises:
        UsageError: it is neither a number, a text nor None.
    """
    if color is None or isinstance(color, str):
        return color
    number = _integer("color", color)
    return None if number < 0 else number


def _integer(name: str, value: object) -> int:
    """A whole number.

    Raises:
        UsageError: it is none.
    """
    number = whole_number(value)
    if number is None:
        wanted = "an int, a text or None" if name == "color" else "an int or None"
        raise UsageError(f"split: {name}={value!r} is not {wanted}")
    return number


def _by_color(words: Sequence[_Word]) -> list[Members]:
    """The ranks of each colour, by key and then by rank."""
    parts: dict[int | str, list[int]] = {}
    for rank, word in enumerate(words):
        if word.color is not None:
            parts.setdefault(word.color, []).append(rank)
    return [tuple(sorted(part, key=lambda rank: words[rank].key)) for part in parts.values()]


def _leaders(words: Sequence[_Word]) -> list[Members]:
    """The first rank of each colour, all in one group."""
    return [tuple(sorted(min(part) for part in _by_color(words)))]


def _check_colors(operation: str, words: Sequence[_Word], messages: Sequence[Message]) -> None:
    """Refuse colours of two types, on every rank.

    Args:
        operation: what the user has called.
        words: what the ranks told.
        messages: in which they did.

    Raises:
        CollectiveError: it names the ranks that differ from the first one with a colour.
    """
    kinds = {rank: type(word.color) for rank, word in enumerate(words) if word.color is not None}
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
    parts_of: Callable[[Sequence[_Word]], list[Members]],
    *,
    name: str,
    group: GroupLike,
    timeout: Timeout,
    is_always_new: bool = False,
) -> "dist.ProcessGroup":
    """This rank's part of a group, as a process group that all its members have."""
    called = operation.name.lower()
    deadline = resolve(group, called).deadline(called, timeout)
    parent = process_group_of(group) if is_initialized() else None
    living = _children.living(parent) if parent is not None and not is_always_new else {}
    word = _Word(color, key, uuid.uuid4().hex, [each.group_name for each in living.values()])
    with _call(operation, name=name, group=group, timeout=timeout) as call:
        words = _told(call, word)
    if operation in (Operation.NODE_GROUP, Operation.LEADERS):
        resolve(group).hosts = tuple(str(word.color) for word in words)
    parts = {members: _name(members, words) for members in parts_of(words)}
    mine = next((members for members in parts if call.rank in members), None)
    # Torch has no type for a rank outside, nor for there being no torch.distributed.
    nothing = cast("dist.ProcessGroup", NOBODY if mine is None else None)
    if parent is None:
        return nothing
    old = {each for known in words for each in known.names}
    if old.issuperset(parts.values()):
        return nothing if mine is None else living[mine]
    is_lacking = mine is not None and parts[mine] not in old
    plan = (mine, parts[mine]) if mine is not None and is_lacking else None
    made = _connected(operation, name, plan, group, deadline)
    if made is None:
        return nothing if mine is None else living[mine]
    if mine is not None and not is_always_new:
        _children.add(parent, mine, made)
    return made


def _told(call: Call, word: _Word) -> list[_Word]:
    """What each rank says, in the first call."""
    if call.is_alone:
        return [word]
    mine = call.message(word, tuple)
    with call.exchange as exchange:
        messages = routes.all_gather(exchange, mine)
    call.raise_failures(messages)
    words = [word_of(call.decode(message)) for message in messages]
    _check_colors(call.operation, words, messages)
    return words


def word_of(plain: Any) -> _Word:
    """What a rank told.

    Raises:
        DecodeError: it is no such word.
    """
    if isinstance(plain, (tuple, list)) and len(plain) == len(_Word._fields):
        color, key, fresh, names = plain
        is_right = (
            (color is None or type(color) in {int, str})
            and type(key) is int
            and isinstance(fresh, str)
            and isinstance(names, list)
            and all(isinstance(name, str) for name in names)
        )
        if is_right:
            return _Word(color, key, fresh, names)
    raise DecodeError(_CODEC, "a rank did not send a color, a key and names")


def _name(members: Members, words: Sequence[_Word]) -> str:
    """The name that all members know their group by, or a new one."""
    number = fingerprint(",".join(map(str, members)))
    known = set.intersection(*(set(words[rank].names) for rank in members))
    stem = _NAME.format(members=number, fresh="")
    new = stem + words[members[0]].fresh
    return min((name for name in known if name.startswith(stem)), default=new)


def _connected(
    operation: Operation,
    name: str,
    plan: tuple[Members, str] | None,
    group: GroupLike,
    deadline: Deadline,
) -> "dist.ProcessGroup | None":
    """The new process group of ``plan``, once every rank of ``group`` has made its own.

    Every rank of ``group`` calls this if any needs a new one; a rank with no plan gets None.
    """
    made: list[dist.ProcessGroup] = []

    def check_room(_: None) -> None:
        if plan is not None:
            see_room_for(len(plan[0]) if has_gloo(resolve(group).process_group) else 1)

    def check(_: None) -> None:
        if failed:
            raise failed.pop()  # from no variable: an error's traceback holds its frame

    failed: list[BaseException] = []
    begin = functools.partial(_call, operation, name=name, group=group)
    # A rank may have had every word, and not all have had its own: connecting waits in C++, so it
    # begins when all ranks are known to come, and to have room for it. It is part of this call, so
    # that others are told where this rank is.
    with begin(timeout=deadline.seconds_left, must_agree="meet") as call:
        all_gather_in(call, None, check=check_room)()
        try:
            if plan is not None:
                made.append(_made(operation, plan, group, deadline))
        except BaseException as error:  # noqa: BLE001  # raised in ``check``, which tells the others
            failed.append(error)
    try:
        with begin(timeout=deadline.seconds_left, must_agree="connect") as call:
            all_gather_in(call, None, check=check)()
    except BaseException:
        for each in made:
            dist.destroy_process_group(each)
        raise
    finally:
        failed.clear()  # an error's traceback holds this frame
    for each in made:
        _forget_address(each)
    return made[0] if made else None


def _forget_address(made: Any) -> None:
    """Let this rank's address in a new group go from the store: all members have connected."""
    name, rank = made.group_name, made.rank()
    board_thread_of(process_group_of(None)).submit(lambda board: board.forget_address(name, rank))


def _made(
    operation: Operation, plan: tuple[Members, str], group: GroupLike, deadline: Deadline
) -> Any:
    """The new process group, once its members have connected."""
    members, name = plan
    parent = resolve(group)  # a part of the group for members that come alone
    ranks = [parent.ranks[member] for member in members]
    log.debug("%s makes group %r of ranks %s", operation.name.lower(), name, ranks)
    world = process_group_of(None)
    clients = board_thread_of(world).clients_of_groups
    # A rank that fails before the others give up can still tell them.
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
                purpose=operation.name.lower(),
                store=store,
            )
        if dist.get_backend(made) == dist.Backend.GLOO:  # another may meet later, and wait in it
            clients.give_back(store)
        return made

    # Torch exceeds its limit: Gloo waits 30 s for a rank that has died.
    return done_within(_LONGER * limit, make, dist.destroy_process_group)
