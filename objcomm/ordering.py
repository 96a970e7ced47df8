"""``main_first`` and ``node_first``: one rank goes through a block before the others."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar

from objcomm.absence import Region, acts_alone, inside, is_in_order
from objcomm.call import Call
from objcomm.frames import Operation, Status
from objcomm.group import Group, Timeout
from objcomm.sharing import share_outcome
from objcomm.subgroups import near_group
from objcomm.transport import routes
from objcomm.world import GroupLike, resolve


class _Ordered(ABC):
    """What the blocks have in common: they may be entered again within themselves."""

    _operation: ClassVar[Operation]  # what the user has called, which errors show

    def __init__(self, *, group: GroupLike = None, timeout: Timeout = None) -> None:
        self._group_like = group
        self._timeout = timeout
        self._blocks: list[_Block | None] = []

    def __enter__(self) -> None:
        self._blocks.append(self._begun(self._group_like, self._timeout))

    @abstractmethod
    def _begun(self, group: GroupLike, timeout: Timeout) -> "_Block | None":
        """This rank's turn, once it has come; None if the order holds already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        block = self._blocks.pop()
        if block is not None:
            block.end(error)


class main_first(_Ordered):  # noqa: N801  # used as a function, like contextlib's
    """A block that the first rank goes through before the others, which then enter together.

    Every rank of ``group`` must enter it. Such as: the first rank prepares a dataset and leaves it
    in a cache, the others find it there. At the end all ranks meet. Where the first rank fails, the
    others do not run their bodies. Nested blocks, and a block in ``main_only``, need no traffic:
    the order holds already.

    No call inside can have an answer from ranks that wait: whichever needs one raises UsageError.
    ``zero_first`` is the same under another name, which its errors show.

    Args:
        group: who takes part; None for the world.
        timeout: for each wait, seconds or timedelta; the group's own if None. It must leave room
            for the first rank's body, and then for the others'.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, when it is entered.
        CollectiveError: the body raised on some rank. Every rank: where the first rank failed the
            others raise when they enter, in all other cases at the end. With each failing rank's
            type, message and traceback; there from its own exception. Later calls work.
        ObjcommError: whatever else ``objcomm.barrier`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> with objcomm.main_first():
        ...     print("prepared, or found")
        prepared, or found
    """

    _operation = Operation.MAIN_FIRST

    def _begun(self, group: GroupLike, timeout: Timeout) -> "_Block | None":
        whole = resolve(group)
        if is_in_order(self._operation.name.lower(), whole.ranks, whole.rank):
            return None
        return _Block(self._operation, group, group, timeout)


class zero_first(main_first):  # noqa: N801  # used as a function, like contextlib's
    """Another name of ``main_first``, which its errors show."""

    _operation = Operation.ZERO_FIRST


class node_first(_Ordered):  # noqa: N801  # used as a function, like contextlib's
    """A block that the first rank of each host goes through before the other ranks there.

    Every rank of ``group`` must enter it. What a host is, ``node_group`` tells. At the end the
    ranks of all hosts meet. All else is as in ``main_first``. In a ``main_first`` block it works
    where ``node_group`` was called before and all ranks share one host.

    Args:
        group: who takes part; None for the world.
        timeout: for each wait, seconds or timedelta; the group's own if None. It must leave room
            for the bodies of the first ranks, and then for the others'.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, when it is entered.
        CollectiveError: the body raised on some rank. Every rank of all hosts; see ``main_first``.
        ObjcommError: whatever else ``objcomm.node_group`` or ``objcomm.barrier`` raises.

    Examples:
        >>> import objcomm
        >>> with objcomm.node_first():
        ...     print("unpacked to the local disk")
        unpacked to the local disk
    """

    _operation = Operation.NODE_FIRST

    def _begun(self, group: GroupLike, timeout: Timeout) -> "_Block | None":
        whole = resolve(group)
        name = self._operation.name.lower()
        whole.deadline(name, timeout)
        if _is_open(name, whole):
            return None
        node = near_group(group=group, timeout=timeout)
        return _Block(self._operation, node, group, timeout)


def _is_open(name: str, whole: Group) -> bool:
    """Whether the first rank of this host runs before the others already.

    Raises:
        UsageError: it does not, and other ranks make no call now.
    """
    if whole.hosts:
        near = [rank for rank, host in enumerate(whole.hosts) if host == whole.hosts[whole.rank]]
        ranks = [whole.ranks[rank] for rank in near]
        if is_in_order(name, ranks, near.index(whole.rank)):
            return True
    return acts_alone(name, whole.ranks, whole.rank)


class _Block:
    """One entry into such a block on this rank."""

    def __init__(
        self, operation: Operation, near: GroupLike, group: GroupLike, timeout: Timeout
    ) -> None:
        """Wait until it is this rank's turn.

        Args:
            operation: what the user has called.
            near: the ranks of which the first goes before the others.
            group: all that meet at the end.
            timeout: in seconds.

        Raises:
            CollectiveError: the first rank has failed.
        """
        self._operation, self._group_like, self._timeout = operation, group, timeout
        self._is_local_first = near is not group
        self._call: Call | None = None
        members = resolve(near)
        name = operation.name.lower()
        members.deadline(name, timeout)
        first, *others = members.ranks
        region = Region(name, later=frozenset(others))
        if members.rank > 0:
            self._wait(near)
            region = Region(name, earlier=frozenset({first}))
        elif others:
            # Begun here, for what is wrong already; the others wait for its message.
            self._call = self._begun(near)
        self._inside = inside(region)
        self._inside.__enter__()

    def _begun(self, near: GroupLike) -> Call:
        return Call(self._operation, group=near, timeout=self._timeout, has_root=True)

    def _wait(self, near: GroupLike) -> None:
        """Wait for the first rank; if it has failed, raise what all raise."""
        try:
            with self._begun(near) as call, call.traffic() as exchange:
                message = routes.broadcast(exchange, None, call.root)
        except BaseException as error:
            self._tell_other_hosts(error)
            raise
        if message.header.status == Status.FAILURE:
            self._share(None)
            call.raise_failures([message])

    def end(self, error: BaseException | None) -> None:
        """Let the others in, if this is the first rank; then meet all."""
        self._inside.__exit__(None, None, None)
        if self._call is not None:
            try:
                self._let_in(self._call, error)
            except BaseException as trouble:
                self._tell_other_hosts(trouble)
                raise
        self._share(error)

    def _let_in(self, call: Call, error: BaseException | None) -> None:
        with call:
            mine = call.announcement(Status.VALUE) if error is None else call.failure(error)
            with call.traffic() as exchange:
                routes.broadcast(exchange, mine, call.root)

    def _tell_other_hosts(self, error: BaseException) -> None:
        """They wait at the end, and see nothing of what went wrong between ranks of this one."""
        if self._is_local_first:
            self._share(error)

    def _share(self, error: BaseException | None) -> None:
        share_outcome(self._operation, error, self._group_like, self._timeout)
