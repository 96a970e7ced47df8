"""Context managers for code that only some ranks run, or that one rank runs before the others."""

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
    """Broadcast an object from global rank ``src`` to every rank of the world.

    Every rank must call this. It takes the same arguments as SpeechBrain's ``ddp_broadcast``.

    Args:
        communication_object: on ``src``, the object to share; ignored on the other ranks.
        src: global rank of the source.

    Returns:
        The source's object. On the source this is the same object, elsewhere an independent
        copy.

    Raises:
        CollectiveError: the source could not encode its object. Raised on every rank.
        ObjcommError: whatever ``objcomm.broadcast`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.ddp_broadcast({"seed": 7})
        {'seed': 7}
    """
    return broadcast(communication_object, src)


def rank_prefixed_message(message: str, *, group: GroupLike = None) -> str:
    """Put this process's rank before a log message.

    Never raises and never communicates. Returns the message unchanged if torch.distributed is not
    initialized.

    Args:
        message: any text.
        group: the group whose rank to show; defaults to the world.

    Examples:
        >>> import objcomm
        >>> objcomm.rank_prefixed_message("epoch 3 done")
        'epoch 3 done'
    """
    return f"[rank: {rank_in(group)}] {message}" if is_initialized() else message


class _Block(ABC, Generic[T_co]):
    """Base of the context managers, which may be entered again while they are active."""

    def __init__(self, *, group: GroupLike = None, timeout: Timeout = None) -> None:
        self._group_like = group
        self._timeout = timeout
        self._entries: list[AbstractContextManager[T_co]] = []

    @abstractmethod
    def _entry(self) -> AbstractContextManager[T_co]:
        """Create the context manager for one entry on this rank."""

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
    """Make calls act locally in a ``with`` block that only some ranks run.

    The body runs on every rank that enters it. The other ranks need not enter, and nothing is sent.
    Inside, ``barrier`` returns immediately and ``broadcast`` returns its argument, as SpeechBrain's
    do, and functions that would run on the first rank run on this one. All other calls raise
    UsageError rather than return one rank's result. This applies only to calls on groups that
    contain other ranks of ``group``.

    Blocks may be nested, and other threads are not in them. If a generator yields inside a block,
    the code that iterates over it is in the block too.

    Args:
        group: the group whose other ranks are absent; defaults to the world.

    Raises:
        NotInGroupError: this rank is not a member of ``group``. Raised on entry.

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
    """Give a ``with`` block a flag that is True on the first rank, and share its failure.

    Every rank of ``group`` must enter the block. A context manager can't skip its body, so the body
    runs on every rank: put the work under ``if``. At the end all ranks meet and learn whether any
    of them failed. Inside, calls act as in the function of ``objcomm.run_on_main``.

    Args:
        group: the participating ranks; defaults to the world.
        timeout: for the meeting at the end, seconds or timedelta; defaults to the group's own. It
            must be long enough for the work.

    Raises:
        UsageError: an argument is wrong. Raised on entry, on every rank that passed it.
        CollectiveError: the body raised on some rank. Raised at the end on every rank, with each
            failing rank's type, message and traceback; on a failing rank, chained to its own
            exception. Later calls work.
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
        whole.deadline("zero_only", self._timeout)  # a wrong timeout fails here, not at the end
        if acts_alone("zero_only", whole.ranks, whole.rank):
            yield True
            return
        with (
            outcome_shared(Operation.ZERO_ONLY, group=self._group_like, timeout=self._timeout),
            _without_others("zero_only", whole),
        ):
            yield whole.rank == 0


def _without_others(operation: str, whole: Group) -> inside:
    """Create a region in which calls act locally."""
    others = frozenset(whole.ranks) - {whole.ranks[whole.rank]}
    return inside(Region(operation, later=others, is_local=True))


class _Ordered(_Block[None]):
    """A block that one rank runs before the others."""

    _operation: ClassVar[Operation]  # errors show its name

    @contextlib.contextmanager
    def _in_turn(self, near: GroupLike, first: int = 0) -> Iterator[None]:
        """Run a block on one rank of ``near``, then on its other ranks.

        All ranks of the whole group meet at the end.

        Args:
            near: the ranks that wait for ``first``.
            first: rank within ``near`` that runs the block first.

        Raises:
            CollectiveError: the block raised on some rank.
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
            call = begun()  # now, so that a wrong call fails before the block

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
    """Run a ``with`` block on one rank first, then on all other ranks together.

    Every rank of ``group`` must enter the block. For example, the first rank prepares a dataset and
    stores it in a cache, where the others find it. All ranks meet at the end. If the block fails on
    the first rank, the others do not run it. A nested block with the same order needs no traffic.

    Calls inside the block can't get an answer from ranks that are waiting; those that need one
    raise UsageError.

    Args:
        rank: global rank that runs the block first; the same on every rank.
        group_rank: rank within the group, as an alternative to ``rank``; defaults to the group's
            first rank.
        group: the participating ranks; defaults to the world.
        timeout: for each wait, seconds or timedelta; defaults to the group's own. It must be long
            enough for the block on the first rank, and then for the block on the others.

    Raises:
        UsageError: an argument is wrong, or an enclosing block lets another rank go first. Raised
            on entry, on every rank that passed it.
        CollectiveError: the block raised on some rank. Raised on every rank, with each failing
            rank's type, message and traceback; on a failing rank, chained to its own exception. If
            the block failed on the rank that goes first, the others raise on entry; in all other
            cases the error is raised at the end. Later calls work.
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
    """``main_first`` under another name, which its errors show."""

    _operation = Operation.ZERO_FIRST


class node_first(_Ordered):  # noqa: N801  # used as a function, like contextlib's
    """Run a ``with`` block on the first rank of each host, then on the other ranks there.

    Every rank of ``group`` must enter the block. Hosts are detected as in ``node_group``. The ranks
    of all hosts meet at the end. Everything else is as in ``main_first``. Inside a ``main_first``
    block, this works if ``node_group`` was called before and all ranks share one host.

    Args:
        group: the participating ranks; defaults to the world.
        timeout: for each wait, seconds or timedelta; defaults to the group's own. It must be long
            enough for the block on the first ranks, and then for the block on the others.

    Raises:
        UsageError: an argument is wrong. Raised on entry, on every rank that passed it.
        CollectiveError: the block raised on some rank. Raised on every rank of all hosts, as in
            ``main_first``.
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
    """Whether enclosing blocks already let this host's first rank run before the others.

    Raises:
        UsageError: they do not, and other ranks make no call now.
    """
    if whole.hosts:
        near = [rank for rank, host in enumerate(whole.hosts) if host == whole.hosts[whole.rank]]
        ranks = [whole.ranks[rank] for rank in near]
        if is_in_order(name, ranks, near.index(whole.rank)):
            return True
    return acts_alone(name, whole.ranks, whole.rank)
