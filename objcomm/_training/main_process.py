"""Familiar helpers around who computes what: one rank for all, or one rank before the others."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, ParamSpec, TypeVar, overload

from objcomm._algorithms import routes
from objcomm._calls.absence import Region, acts_alone, inside, is_in_order
from objcomm._calls.call import Call
from objcomm._calls.group import Group, resolve
from objcomm._collectives.broadcast import broadcast
from objcomm._collectives.split import near_group
from objcomm._config import Allowed, DeviceLike, GroupLike, Timeout
from objcomm._training.once import (
    bound,
    computed_in,
    decorated,
    post_everywhere,
    post_on_others,
    share_outcome,
)
from objcomm._wire.header import Operation, Status
from objcomm._world import is_initialized
from objcomm._world import rank as rank_in

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


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


def compute_and_broadcast(
    fn: Callable[[], T],
    src: int | None = None,
    *,
    group_src: int | None = None,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
) -> T:
    """Compute something on one rank, and share it with every rank.

    Every rank of ``group`` must call this. In ``fn`` calls of objcomm act as in
    ``run_on_main``.

    Args:
        fn: called once, on the source; returns anything that can be encoded.
        src: global rank of the source.
        group_src: the same as a rank within the group; give one. Neither: the group's first rank.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None. It must leave room for ``fn``, for
            which the others wait.
        codec: what encodes the result.
        device: the device to place received tensors on.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.

    Returns:
        What ``fn`` returned, with its exact value and type. On the source the identical object,
        elsewhere an independent copy.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: ``fn`` raised, or its result could not be encoded. Every rank, with the
            type, message and traceback; on the source from its own exception.
        ObjcommError: whatever else ``objcomm.broadcast`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.compute_and_broadcast(lambda: 2**24 + 1)
        16777217
    """
    produce = bound(Operation.COMPUTE_AND_BROADCAST, fn)
    call = Call(
        Operation.COMPUTE_AND_BROADCAST,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        global_root=src,
        group_root=group_src,
        has_root=True,
        accept=accept,
        allow=allow,
    )
    return _result(call, produce)


def run_on_main(  # noqa: PLR0917  # SpeechBrain's positions
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    post_func: Callable[..., object] | None = None,
    post_args: Sequence[Any] | None = None,
    post_kwargs: Mapping[str, Any] | None = None,
    run_post_on_main: bool = False,  # noqa: FBT001, FBT002  # SpeechBrain's position for it
    *,
    rank: int | None = None,
    group_rank: int | None = None,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> T:
    """Run a function on the first rank, or another one, and share its result with every rank.

    Every rank of ``group`` must call this. In ``func`` calls of objcomm act as on one
    rank alone: ``barrier`` returns at once, ``broadcast`` gives back its argument, others raise
    UsageError. In ``post_func`` the rank that ran it takes part in no call, unless
    ``run_post_on_main`` is set: then ranks may talk in it as anywhere.

    Args:
        func: called once, on ``rank``; returns anything that can be encoded.
        args: its positional arguments.
        kwargs: its keyword arguments.
        post_func: called on the other ranks, after ``func``, such as a load of what it has made;
            its result is dropped.
        post_args: its positional arguments.
        post_kwargs: its keyword arguments.
        run_post_on_main: whether ``rank`` calls ``post_func`` too.
        rank: global rank of the one that runs ``func``, the same on every rank.
        group_rank: the same as a rank within the group; give one. Neither: the group's first rank.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: for each of the two waits, seconds or timedelta; the group's own if None. It must
            leave room for ``func``, and again for ``post_func``; it may be longer than the group's.

    Returns:
        What ``func`` returned. On ``rank`` the identical object, elsewhere an independent copy.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: ``func`` raised, or its result could not be encoded, or ``post_func``
            raised on some rank. Every rank, with each failing rank's type, message and traceback;
            there from its own exception. Later calls work.
        DecodeError: the result could not be rebuilt. That rank only; with a ``post_func`` it is a
            CollectiveError on every rank.
        ObjcommError: whatever else ``objcomm.broadcast`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.run_on_main(sorted, args=[[3, 1, 2]], kwargs={"reverse": True})
        [3, 2, 1]
    """
    operation = Operation.RUN_ON_MAIN
    produce = bound(operation, func, args, kwargs)
    post = None if post_func is None else bound(operation, post_func, post_args, post_kwargs)
    # Whoever cannot decode the result does not come to what follows: all must know.
    confirm = post is not None
    call = _computing(operation, rank, group_rank, group, timeout, name=name, confirm=confirm)
    is_alone, runner = call.is_alone, call.ranks[call.root]
    result = _result(call, produce)
    if post is None:
        return result
    if run_post_on_main:
        post_everywhere(operation, post, group, timeout, name=name)
    elif not is_alone:
        post_on_others(operation, post, {runner}, group, timeout, name=name)
    return result


def _computing(
    operation: Operation,
    rank: int | None,
    group_rank: int | None,
    group: GroupLike,
    timeout: Timeout,
    *,
    name: str = "",
    confirm: bool = False,
) -> Call:
    """The call in which one rank computes for all."""
    return Call(
        operation,
        name=name,
        group=group,
        timeout=timeout,
        global_root=rank,
        group_root=group_rank,
        root_argument="rank",
        has_root=True,
        confirm=confirm,
    )


def _result(call: Call, produce: Callable[[], T]) -> T:
    """What the root has computed, on every rank."""
    others = frozenset(call.ranks) - {call.ranks[call.root]}
    region = Region(call.operation, later=others, is_local=True)
    with call:
        return computed_in(call, region, produce)


@overload
def main_process_only(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def main_process_only(
    *,
    rank: int | None = None,
    group_rank: int | None = None,
    group: GroupLike = None,
    timeout: Timeout = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def main_process_only(
    function: Callable[P, R] | None = None,
    /,
    *,
    rank: int | None = None,
    group_rank: int | None = None,
    group: GroupLike = None,
    timeout: Timeout = None,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function run on the first rank only, or another one: a decorator.

    Every rank of ``group`` must call the function, and gets its result. Arguments are used on the
    rank that runs it alone. Where one such function calls another, or itself, the inner one runs
    locally.

    Args:
        function: what to decorate; ``@main_process_only`` alone, or with options in parentheses.
        rank: global rank of the one that runs it, the same on every rank.
        group_rank: the same as a rank within the group; give one. Neither: the group's first rank.
        group: who takes part; None for the world.
        timeout: of each call, seconds or timedelta; the group's own if None. It must leave room
            for the function.

    Returns:
        A function of the same type, which returns and raises as ``run_on_main`` does.

    Raises:
        UsageError: it is no function, or one that gives a coroutine or a generator, which cannot
            be shared. When it is decorated. A wrong ``rank`` is told when it is called.

    Examples:
        >>> import objcomm
        >>> @objcomm.main_process_only
        ... def fibonacci(n: int) -> int:
        ...     return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
        >>> fibonacci(10)
        55
    """
    operation = Operation.MAIN_PROCESS_ONLY

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        def share(produce: Callable[[], R]) -> R:
            return _result(_computing(operation, rank, group_rank, group, timeout), produce)

        return decorated(operation, function, share)

    return decorate if function is None else decorate(function)


class MainProcessContext:
    """A block whose calls act locally, for code that only some ranks run.

    The body runs on every rank that enters, and no other rank need enter: nothing is sent. Inside,
    ``barrier`` returns at once and ``broadcast`` gives back its argument, as SpeechBrain's do;
    functions that run on the first rank run here. All other calls raise UsageError instead of an
    answer of one rank. Only calls whose group has other ranks of this one are concerned. Blocks may
    be nested; other threads are not in them. Whoever runs a generator that has yielded in a block
    is in it, too.

    Args:
        group: whose ranks are not here; None for the world.

    Raises:
        NotInGroupError: this rank is no member of ``group``. When it is entered.

    Examples:
        >>> import objcomm
        >>> from objcomm.compat.speechbrain import MainProcessContext
        >>> with MainProcessContext():
        ...     objcomm.broadcast("local")
        'local'
    """

    def __init__(self, *, group: GroupLike = None) -> None:
        self._group_like = group
        self._inside: list[inside] = []

    def __enter__(self) -> None:
        whole = resolve(self._group_like, "MainProcessContext")
        others = frozenset(whole.ranks) - {whole.ranks[whole.rank]}
        entered = inside(Region("MainProcessContext", later=others, is_local=True))
        entered.__enter__()
        self._inside.append(entered)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._inside.pop().__exit__(kind, error, traceback)


class zero_only:  # noqa: N801  # used as a function, like contextlib's
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

    def __init__(self, *, group: GroupLike = None, timeout: Timeout = None) -> None:
        self._group_like = group
        self._timeout = timeout
        self._inside: list[inside | None] = []

    def __enter__(self) -> bool:
        whole = resolve(self._group_like, "zero_only")
        whole.deadline("zero_only", self._timeout)  # a wrong one is told here, not at the end
        is_alone = acts_alone("zero_only", whole.ranks, whole.rank)
        others = frozenset(whole.ranks) - {whole.ranks[whole.rank]}
        entered = None if is_alone else inside(Region("zero_only", later=others, is_local=True))
        if entered is not None:
            entered.__enter__()
        self._inside.append(entered)
        return is_alone or whole.rank == 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entered = self._inside.pop()
        if entered is not None:
            entered.__exit__(kind, error, traceback)
            share_outcome(Operation.ZERO_ONLY, error, self._group_like, self._timeout)


def rank_prefixed_message(message: str, *, group: GroupLike = None) -> str:
    """A text with this rank before it, for logs; unchanged without torch.distributed.

    Never raises and never communicates.

    Args:
        message: any text.
        group: whose rank to tell; None for the world.

    Examples:
        >>> import objcomm
        >>> objcomm.rank_prefixed_message("epoch 3 done")
        'epoch 3 done'
    """
    return f"[rank: {rank_in(group)}] {message}" if is_initialized() else message


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
        self._rank = rank
        self._group_rank = group_rank

    def _begun(self, group: GroupLike, timeout: Timeout) -> "_Block | None":
        name = self._operation.name.lower()
        whole = resolve(group, name)
        first = whole.root(name, self._rank, self._group_rank, "rank")
        if is_in_order(name, whole.ranks, whole.rank, first):
            return None
        return _Block(self._operation, group, group, timeout, first)


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
        name = self._operation.name.lower()
        whole = resolve(group, name)
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
        self,
        operation: Operation,
        near: GroupLike,
        group: GroupLike,
        timeout: Timeout,
        first: int = 0,
    ) -> None:
        """Wait until it is this rank's turn.

        Args:
            operation: what the user has called.
            near: the ranks of which one goes before the others.
            group: all that meet at the end.
            timeout: in seconds.
            first: the one that goes before the others, a rank within ``near``.

        Raises:
            CollectiveError: that one has failed.
        """
        self._operation, self._group_like, self._timeout = operation, group, timeout
        self._is_local_first = near is not group
        self._first = first
        self._call: Call | None = None
        members = resolve(near)
        name = operation.name.lower()
        members.deadline(name, timeout)
        others = frozenset(members.ranks) - {members.ranks[first]}
        region = Region(name, later=others)
        if members.rank != first:
            self._wait(near)
            region = Region(name, earlier=frozenset({members.ranks[first]}))
        elif others:
            # Begun here, for what is wrong already; the others wait for its message.
            self._call = self._begun(near)
        self._inside = inside(region)
        self._inside.__enter__()

    def _begun(self, near: GroupLike) -> Call:
        return Call(
            self._operation,
            group=near,
            timeout=self._timeout,
            group_root=self._first,
            has_root=True,
        )

    def _wait(self, near: GroupLike) -> None:
        """Wait for the one that goes first; if it has failed, raise what all raise."""
        try:
            with self._begun(near) as call, call.exchange as exchange:
                message = routes.broadcast(exchange, None, call.root)
        except BaseException as error:
            self._tell_other_hosts(error)
            raise
        if message.header.status == Status.FAILURE:
            self._share(None)
            call.raise_failures([message])

    def end(self, error: BaseException | None) -> None:
        """Let the others in, if this rank went first; then meet all."""
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
            with call.exchange as exchange:
                routes.broadcast(exchange, mine, call.root)

    def _tell_other_hosts(self, error: BaseException) -> None:
        """They wait at the end, and see nothing of what went wrong between ranks of this one."""
        if self._is_local_first:
            self._share(error)

    def _share(self, error: BaseException | None) -> None:
        share_outcome(self._operation, error, self._group_like, self._timeout)
