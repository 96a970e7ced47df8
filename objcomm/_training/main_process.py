"""Familiar helpers around blocks: code that some ranks run, or one rank before the others."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import ClassVar, Generic, TypeVar

from objcomm._algorithms import routes
from objcomm._calls.absence import Region, acts_alone, inside, is_in_order
from objcomm._calls.call import Call
from objcomm._calls.group import Group, resolve
from objcomm._collectives.broadcast import broadcast
from objcomm._collectives.split import near_group
from objcomm._config import CallOptions, GroupLike, Timeout
from objcomm._training.once import near_traffic, outcome_shared, share_outcome
from objcomm._wire.header import Operation, Status
from objcomm._world import is_initialized
from objcomm._world import rank as rank_in

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def ddp_broadcast(communication_object: T | None, src: int = 0) -> T:
    """Share an object of the world's rank ``src`` with every rank, as SpeechBrain's does.

    Every rank must call this.

    Args:
        communication_object: on ``src`` what to share; elsewhere ignored.
        src: global rank of the source.

    Returns:
        The source's object. On the source the identical one, elsewhere an independent copy.

    Raises:
        CollectiveError: the source could not encode its object. Every rank.
        ObjcommError: whatever ``objcomm.broadcast`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.ddp_broadcast({"seed": 7})
        {'seed': 7}
    """
    return broadcast(communication_object, src)


def rank_prefixed_message(message: str, *, group: GroupLike = None) -> str:
    """A text with this rank before it, for logs; unchanged without torch.distributed.

    Never raises and never communicates.

    Args:
        message: any text.
        group: whose rank to show; None for the world.

    Examples:
        >>> import objcomm
        >>> objcomm.rank_prefixed_message("epoch 3 done")
        'epoch 3 done'
    """
    return f"[rank: {rank_in(group)}] {message}" if is_initialized() else message


class _Block(ABC, Generic[T_co]):
    """What the blocks have in common: they may be entered again within themselves."""

    def __init__(self, *, group: GroupLike = None, timeout: Timeout = None) -> None:
        self._group_like = group
        self._timeout = timeout
        self._entries: list[AbstractContextManager[T_co]] = []

    @abstractmethod
    def _entry(self) -> AbstractContextManager[T_co]:
        """One entry into the block on this rank."""

    def __enter__(self) -> T_co:
        entry = self._entry()
        value = entry.__enter__()
        self._entries.append(entry)
        return value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entries.pop().__exit__(kind, error, traceback)


class MainProcessContext(_Block[None]):
    """A block whose calls act locally, for code that only some ranks run.

    The body runs on every rank that enters, and no other rank need enter: nothing is sent. Inside,
    ``barrier`` returns at once and ``broadcast`` gives back its argument, as SpeechBrain's do;
    functions that run on the first rank run here. All other calls raise UsageError instead of an
    answer of one rank. Only calls whose group has other ranks of this one are concerned. Blocks may
    be nested; other threads are not in them. Code that runs a generator which has yielded in a
    block is in it, too.

    Args:
        group: whose ranks are not here; None for the world.

    Raises:
        NotInGroupError: this rank is not a member of ``group``. When it is entered.

    Examples:
        >>> import objcomm
        >>> from objcomm.compat.speechbrain import MainProcessContext
        >>> with MainProcessContext():
        ...     objcomm.broadcast("local")
        'local'
    """

    def __init__(self, *, group: GroupLike = None) -> None:
        super().__init__(group=group)

    def _entry(self) -> AbstractContextManager[None]:
        return _without_others(
            "MainProcessContext", resolve(self._group_like, "MainProcessContext")
        )


class zero_only(_Block[bool]):  # noqa: N801  # used as a function, like contextlib's
    """A block that knows whether it is the first rank's, and whose failure is everybody's.

    Every rank of ``group`` must enter it. No context manager can skip its body, so the body runs on
    every rank, and its value says which one this is: put the work under ``if``. At the end all
    ranks meet and learn whether any of them has failed. Inside, calls act as in
    ``objcomm.run_on_main``.

    Args:
        group: who takes part; None for the world.
        timeout: for the meeting at the end, seconds or timedelta; the group's own if None. It must
            leave room for the work.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, when it is entered.
        CollectiveError: the body raised on some rank. Every rank, at the end, with each failing
            rank's type, message and traceback; there from its own exception. Later calls work.
        ObjcommError: whatever else ``objcomm.barrier`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> from objcomm.compat.axolotl import zero_only
        >>> with zero_only() as is_zero:
        ...     if is_zero:
        ...         print("written once")
        written once
    """

    @contextlib.contextmanager
    def _entry(self) -> Iterator[bool]:
        whole = resolve(self._group_like, "zero_only")
        whole.deadline("zero_only", self._timeout)  # a wrong one is raised here, not at the end
        if acts_alone("zero_only", whole.ranks, whole.rank):
            yield True
            return
        with (
            outcome_shared(Operation.ZERO_ONLY, group=self._group_like, timeout=self._timeout),
            _without_others("zero_only", whole),
        ):
            yield whole.rank == 0


def _without_others(operation: str, whole: Group) -> inside:
    """A region in which calls act locally."""
    others = frozenset(whole.ranks) - {whole.ranks[whole.rank]}
    return inside(Region(operation, later=others, is_local=True))


class _Ordered(_Block[None]):
    """A block that one rank goes through before others."""

    _operation: ClassVar[Operation]  # what the user has called, which errors show

    @contextlib.contextmanager
    def _in_turn(self, near: GroupLike, first: int = 0) -> Iterator[None]:
        """Wait for this rank's turn, let the others in after it, and meet all at the end.

        Args:
            near: the ranks of which one goes before the others; all meet at the end.
            first: that one, a rank within ``near``.

        Raises:
            CollectiveError: it has failed.
        """
        operation, timeout = self._operation, self._timeout
        options: CallOptions = {"group": self._group_like, "timeout": timeout}
        called = operation.name.lower()
        members = resolve(near)
        members.deadline(called, timeout)
        main = frozenset({members.ranks[first]})
        others = frozenset(members.ranks) - main

        def begun() -> Call:
            return Call(operation, group=near, timeout=timeout, group_root=first, has_root=True)

        call = None
        if members.rank != first:
            with (
                near_traffic(operation, near, **options),
                begun() as waiting,
                waiting.exchange as exchange,
            ):
                message = routes.broadcast(exchange, None, waiting.root)
            if message.header.status == Status.FAILURE:
                share_outcome(operation, None, **options)
                waiting.raise_failures([message])
        elif others:
            call = begun()  # here, for what is wrong already; the others wait for its message

        def end(error: BaseException | None) -> None:
            if call is not None:
                with near_traffic(operation, near, **options), call:
                    mine = call.announcement(Status.VALUE) if error is None else call.failure(error)
                    with call.exchange as exchange:
                        routes.broadcast(exchange, mine, call.root)
            share_outcome(operation, error, **options)

        is_first = members.rank == first
        try:
            with inside(Region(called, later=others) if is_first else Region(called, earlier=main)):
                yield
        except BaseException as error:
            end(error)
            raise
        end(None)


class main_first(_Ordered):  # noqa: N801  # used as a function, like contextlib's
    """A block that one rank goes through before the others, which then enter together.

    Every rank of ``group`` must enter it. Such as: the first rank prepares a dataset and leaves it
    in a cache, the others find it there. At the end all ranks meet. Where the one that goes first
    fails, the others do not run their bodies. Nested blocks of the same order need no traffic:
    the order holds already.

    No call inside can have an answer from ranks that wait: whichever needs one raises UsageError.

    Args:
        rank: global rank of the one that goes first, the same on every rank.
        group_rank: the same as a rank within the group; give one. Neither: the group's first rank.
        group: who takes part; None for the world.
        timeout: for each wait, seconds or timedelta; the group's own if None. It must leave room
            for the body of the one that goes first, and then for the others'.

    Raises:
        UsageError: an argument is wrong, or a block around this one lets another rank go first.
            Every rank that gave it, when it is entered.
        CollectiveError: the body raised on some rank. Every rank: where the one that goes first
            failed the others raise when they enter, in all other cases at the end. With each
            failing rank's type, message and traceback; there from its own exception. Later calls
            work.
        ObjcommError: whatever else ``objcomm.barrier`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> with objcomm.main_first():
        ...     print("prepared, or found")
        prepared, or found
    """

    _operation = Operation.MAIN_FIRST

    def __init__(
        self,
        *,
        rank: int | None = None,
        group_rank: int | None = None,
        group: GroupLike = None,
        timeout: Timeout = None,
    ) -> None:
        super().__init__(group=group, timeout=timeout)
        self._root = rank, group_rank

    def _entry(self) -> AbstractContextManager[None]:
        name = self._operation.name.lower()
        whole = resolve(self._group_like, name)
        first = whole.root(name, *self._root, "rank")
        if is_in_order(name, whole.ranks, whole.rank, first):
            return nullcontext()
        return self._in_turn(self._group_like, first)


class zero_first(main_first):  # noqa: N801  # used as a function, like contextlib's
    """Another name of ``main_first``, which its errors show."""

    _operation = Operation.ZERO_FIRST


class node_first(_Ordered):  # noqa: N801  # used as a function, like contextlib's
    """A block that the first rank of each host goes through before the other ranks there.

    Every rank of ``group`` must enter it. Hosts are what ``node_group`` finds. At the end the
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

    def _entry(self) -> AbstractContextManager[None]:
        name = self._operation.name.lower()
        whole = resolve(self._group_like, name)
        whole.deadline(name, self._timeout)
        if _is_open(name, whole):
            return nullcontext()
        return self._in_turn(near_group(group=self._group_like, timeout=self._timeout))


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
