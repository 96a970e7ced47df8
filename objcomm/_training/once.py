"""Code that not every rank runs: functions that run once, and blocks that ranks skip or wait for.

A function that runs once does so on one rank for all ranks, or on one rank of each host. All such
functions follow one pattern: one rank computes in a region while the others wait for its message.
Other ranks may then run a second function, and an error on any of them is raised on all. The blocks
are context managers for code that only some ranks run, or that one rank runs before the others.
"""

import contextlib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, Unpack, overload

from objcomm._algorithms import routes
from objcomm._calls.call import Call
from objcomm._calls.exclusive_regions import Region, acts_alone, inside, is_in_order
from objcomm._calls.group import Group, resolve
from objcomm._collectives.broadcast import broadcast
from objcomm._collectives.fail_together import failing_together
from objcomm._collectives.gather import kept
from objcomm._collectives.split import near_group
from objcomm._config import (
    Allowed,
    CallOptions,
    DeviceLike,
    GroupLike,
    Options,
    Timeout,
    check_name,
)
from objcomm._observe.published import folded
from objcomm._wire.failure_message import failure_of, raise_together
from objcomm._wire.header import Operation, Status
from objcomm._world import is_initialized
from objcomm._world import rank as rank_in
from objcomm.errors import CollectiveError, UsageError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")


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
    """Call a function on one rank and broadcast the result to every rank.

    Every rank of ``group`` must call this. Inside ``fn``, objcomm calls act as in the ``func`` of
    ``run_on_main``.

    Args:
        fn: called once, on the source; returns anything that can be encoded.
        src: global rank of the source.
        group_src: rank within the group, as an alternative to ``src``; defaults to the group's
            first rank.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own. It must be long enough for
            ``fn``, because the other ranks wait for it.
        codec: name of the codec that encodes the result.
        device: the device to place received tensors on.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.

    Returns:
        What ``fn`` returned, with its exact value and type. On the source this is the same object,
        elsewhere an independent copy.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: ``fn`` raised, or its result could not be encoded. Raised on every rank,
            with the type, message and traceback; on the source, chained to its own exception.
        ObjcommError: whatever else ``objcomm.broadcast`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.compute_and_broadcast(lambda: 2**24 + 1)
        16777217
    """
    operation = Operation.COMPUTE_AND_BROADCAST
    return _on_one(
        operation,
        _bound(operation, fn),
        ("src", src, group_src),
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        accept=accept,
        allow=allow,
    )[0]


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
    """Run a function on the first rank, or on ``rank``, and broadcast its result to every rank.

    Every rank of ``group`` must call this. Inside ``func``, objcomm calls act locally: ``barrier``
    returns immediately, ``broadcast`` returns its argument, functions like this one run their
    function here, and all other calls raise UsageError. Calls inside ``post_func`` must not need
    the rank that ran ``func``, unless ``run_post_on_main`` is set: then the ranks may communicate
    in it as usual.

    Args:
        func: called once, on ``rank``; returns anything that can be encoded.
        args: its positional arguments.
        kwargs: its keyword arguments.
        post_func: called on the other ranks after ``func``, for example to load a file that
            ``func`` wrote; its result is discarded.
        post_args: its positional arguments.
        post_kwargs: its keyword arguments.
        run_post_on_main: whether ``rank`` calls ``post_func`` too.
        rank: global rank that runs ``func``; the same on every rank.
        group_rank: rank within the group, as an alternative to ``rank``; defaults to the group's
            first rank.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: for each of the two waits, seconds or timedelta; defaults to the group's own. It
            must be long enough for ``func`` and for ``post_func``, and may be longer than the
            group's.

    Returns:
        What ``func`` returned. On ``rank`` this is the same object, elsewhere an independent copy.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: ``func`` raised, its result could not be encoded, or ``post_func`` raised
            on some rank. Raised on every rank, with each failing rank's type, message and
            traceback; on a failing rank, chained to its own exception. Later calls work.
        DecodeError: the result could not be rebuilt. Raised on that rank only; with a
            ``post_func``, every rank raises CollectiveError instead.
        ObjcommError: whatever else ``objcomm.broadcast`` raises, on the same ranks.

    Examples:
        >>> import objcomm
        >>> objcomm.run_on_main(sorted, args=[[3, 1, 2]], kwargs={"reverse": True})
        [3, 2, 1]
    """
    operation = Operation.RUN_ON_MAIN
    options: CallOptions = {"name": name, "group": group, "timeout": timeout}
    produce = _bound(operation, func, args, kwargs)
    post = None if post_func is None else _bound(operation, post_func, post_args, post_kwargs)
    # A rank that can't decode the result never reaches ``post_func``, so all ranks must know.
    confirm = post is not None
    result, ran = _on_one(
        operation, produce, ("rank", rank, group_rank), confirm=confirm, **options
    )
    _call_after(operation, post, ran, is_for_all=run_post_on_main, **options)
    return result


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
    """Decorate a function to run on the first rank only, or on ``rank``.

    Every rank of ``group`` must call the function, and every rank gets its result. Only the rank
    that runs it uses the arguments. If one such function calls another, or itself, the inner call
    runs locally.

    Args:
        function: the function to decorate; use ``@main_process_only`` alone, or with options in
            parentheses.
        rank: global rank that runs the function; the same on every rank.
        group_rank: rank within the group, as an alternative to ``rank``; defaults to the group's
            first rank.
        group: the participating ranks; defaults to the world.
        timeout: for each call, seconds or timedelta; defaults to the group's own. It must be long
            enough for the function.

    Returns:
        A function of the same type, which returns and raises as ``run_on_main`` does.

    Raises:
        UsageError: ``function`` is not a function, or returns a coroutine or a generator, which
            can't be shared. Raised when it is decorated; for a wrong ``rank``, when it is called.

    Examples:
        >>> import objcomm
        >>> @objcomm.main_process_only
        ... def fibonacci(n: int) -> int:
        ...     return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
        >>> fibonacci(10)
        55
    """
    operation = Operation.MAIN_PROCESS_ONLY
    root = "rank", rank, group_rank

    def share(produce: Callable[[], Any]) -> Any:
        return _on_one(operation, produce, root, group=group, timeout=timeout)[0]

    return _decorator(operation, share, function)


def run_once_per_node(  # noqa: PLR0917  # SpeechBrain's positions
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    post_func: Callable[..., object] | None = None,
    post_args: Sequence[Any] | None = None,
    post_kwargs: Mapping[str, Any] | None = None,
    run_post_on_all: bool = False,  # noqa: FBT001, FBT002  # SpeechBrain's position for it
    *,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> T:
    """Run a function on the first rank of each host, and broadcast its result to the ranks there.

    Every rank of ``group`` must call this. Hosts are detected as in ``node_group``, not from
    environment variables. Inside ``func``, objcomm calls act as in the ``func`` of ``run_on_main``,
    but calls that need only the first ranks of the hosts work as usual. Calls inside ``post_func``
    must not need those first ranks, unless ``run_post_on_all`` is set: then the ranks may
    communicate in it as usual.

    Args:
        func: called once on each host; returns anything that can be encoded.
        args: its positional arguments.
        kwargs: its keyword arguments.
        post_func: called on the other ranks after ``func`` has returned on all hosts; its result
            is discarded.
        post_args: its positional arguments.
        post_kwargs: its keyword arguments.
        run_post_on_all: whether the first ranks call ``post_func`` too.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: for each wait, seconds or timedelta; defaults to the group's own. It must be long
            enough for ``func`` and for ``post_func``, and may be longer than the group's.

    Returns:
        What ``func`` returned on this host. On the host's first rank this is the same object,
        elsewhere an independent copy.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        CollectiveError: ``func`` or ``post_func`` raised on some rank, or a result could not be
            encoded or decoded. Raised on every rank of all hosts, with each failing rank's type,
            message and traceback; on a failing rank, chained to its own exception. Later calls
            work.
        ObjcommError: whatever else ``objcomm.node_group`` or ``objcomm.broadcast`` raises.

    Examples:
        >>> import objcomm
        >>> objcomm.run_once_per_node("unpacked to {}".format, ["/scratch"])
        'unpacked to /scratch'
    """
    operation = Operation.RUN_ONCE_PER_NODE
    options: CallOptions = {"name": name, "group": group, "timeout": timeout}
    produce = _bound(operation, func, args, kwargs)
    post = None if post_func is None else _bound(operation, post_func, post_args, post_kwargs)
    result, ran = _on_each_host(operation, produce, **options)
    _call_after(operation, post, ran, is_for_all=run_post_on_all, **options)
    return result


@overload
def once_per_node(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def once_per_node(
    *, group: GroupLike = None, timeout: Timeout = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def once_per_node(
    function: Callable[P, R] | None = None,
    /,
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to run once on each host.

    Every rank of ``group`` must call the function, and every rank gets the result of its host. Only
    the first rank of each host uses the arguments. If one such function calls another, or one
    decorated with ``main_process_only``, the inner call runs locally.

    Args:
        function: the function to decorate; use ``@once_per_node`` alone, or with options in
            parentheses.
        group: the participating ranks; defaults to the world.
        timeout: for each wait of a call, seconds or timedelta; defaults to the group's own. It must
            be long enough for the function.

    Returns:
        A function of the same type, which returns and raises as ``run_once_per_node`` does.

    Raises:
        UsageError: as in ``main_process_only``. Raised when the function is decorated.

    Examples:
        >>> import objcomm
        >>> @objcomm.once_per_node
        ... def unpacked(name: str) -> str:
        ...     return f"/scratch/{name}"
        >>> unpacked("speech")
        '/scratch/speech'
    """
    operation = Operation.ONCE_PER_NODE

    def share(produce: Callable[[], Any]) -> Any:
        return _on_each_host(operation, produce, name="", group=group, timeout=timeout)[0]

    return _decorator(operation, share, function)


def _bound(
    operation: Operation,
    func: Callable[..., R],
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Callable[[], R]:
    """Bind a function to its arguments, as the user passed them, before the call begins.

    Raises:
        UsageError: ``func`` is not callable, or ``args`` or ``kwargs`` are of a wrong type.
    """
    name = operation.name.lower()
    if not callable(func):
        raise UsageError(f"{name}: {func!r} is not callable; pass a function")
    try:
        return functools.partial(func, *(() if args is None else args), **(kwargs or {}))
    except TypeError as error:
        raise UsageError(
            f"{name}: arguments are a sequence and a mapping of names to values, "
            f"not {type(args).__name__} and {type(kwargs).__name__}"
        ) from error


def _decorator(
    operation: Operation,
    share: Callable[[Callable[[], Any]], Any],
    function: Callable[P, R] | None,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator or, if ``function`` is given, the decorated function.

    Args:
        operation: the decorator's operation.
        share: takes a function without arguments, runs it on the right ranks, and returns the
            result of the call.
        function: the function to decorate; None for a decorator with options in parentheses.

    Raises:
        UsageError: ``function`` is not callable, or its result can't be shared.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = operation.name.lower()
        _bound(operation, function)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(
                f"{name}: {function!r} is async; decorate a function that does not await"
            )
        if inspect.isgeneratorfunction(function):
            raise UsageError(
                f"{name}: {function!r} is a generator function, and a generator can't be "
                "sent to other ranks"
            )

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = share(functools.partial(function, *args, **kwargs))
            return result

        return folded(run, like=function)

    return decorate if function is None else decorate(function)


def _on_one(
    operation: Operation,
    produce: Callable[[], R],
    root: tuple[str, int | None, int | None],
    **options: Unpack[Options],
) -> tuple[R, frozenset[int]]:
    """Compute something on one rank and return it on every rank.

    Args:
        operation: the operation that the user called.
        produce: called on the root.
        root: the name of the user's argument for the root, and its value as global and as group
            rank.
        options: the user's own.

    Returns:
        The result, and the global ranks that have computed it.
    """
    argument, global_root, group_root = root
    call = Call(
        operation,
        root_argument=argument,
        global_root=global_root,
        group_root=group_root,
        has_root=True,
        **options,
    )
    ranks = frozenset(call.ranks)
    ran = ranks if call.is_alone else frozenset({call.ranks[call.root]})
    region = Region(call.operation, later=ranks - ran, is_local=True)
    return _computed_in(call, region, produce), ran


def _on_each_host(
    operation: Operation, produce: Callable[[], R], **options: Unpack[CallOptions]
) -> tuple[R, frozenset[int]]:
    """Compute something on the first rank of each host and return it on every rank there.

    Returns:
        The result, and the global ranks that have computed it.
    """
    name, group, timeout = options["name"], options["group"], options["timeout"]
    called = operation.name.lower()
    whole = resolve(group, called)
    whole.deadline(called, timeout)
    check_name(name, called)
    ranks = frozenset(whole.ranks)
    if acts_alone(called, whole.ranks, whole.rank):
        return produce(), ranks
    node = near_group(**options)
    firsts = frozenset(whole.ranks[whole.hosts.index(host)] for host in set(whole.hosts))
    region = Region(called, later=ranks - firsts, is_local=True)
    with near_traffic(operation, node, **options):
        call = Call(operation, name=name, group=node, timeout=timeout, has_root=True)
        result = _computed_in(call, region, produce)
    share_outcome(operation, None, **options)
    return result, firsts


def _computed_in(call: Call, region: Region, produce: Callable[[], R]) -> R:
    """Compute something in a region on the root of a call, and return it on every rank.

    The timeout starts after the computation on the root, and before it on the other ranks.
    """
    own: list[R] = []
    with call:
        if call.is_alone:
            return call.alone(produce)
        mine = None
        if call.is_root:
            with inside(region):
                mine = call.message(produce, lambda produce: kept(own, produce()))
        with call.exchange as exchange:
            message = routes.broadcast(exchange, mine, call.root)
        return call.result([message], lambda: own[0] if own else call.decode(message))


def _call_after(
    operation: Operation,
    post: Callable[[], object] | None,
    ran: frozenset[int],
    *,
    is_for_all: bool,
    **options: Unpack[CallOptions],
) -> None:
    """Call ``post`` on all ranks, or on those not in ``ran``; an error is raised on all ranks."""
    if post is None:
        return
    called = operation.name.lower()
    whole = resolve(options["group"])
    if not is_for_all and ran.issuperset(whole.ranks):
        return
    if not is_for_all:
        region = Region(called, later=ran)
        with ended(lambda error: share_outcome(operation, error, **options)), inside(region):
            if whole.ranks[whole.rank] not in ran:
                post()
    elif acts_alone(called, whole.ranks, whole.rank):
        post()
    else:  # ranks may communicate in it
        with failing_together(operation, **options):
            post()


@contextlib.contextmanager
def near_traffic(
    operation: Operation, near: GroupLike, **options: Unpack[CallOptions]
) -> Iterator[None]:
    """Report an error among the ranks of one host to the other hosts, which wait at the end.

    Args:
        operation: the operation that the user called.
        near: the ranks of this host; if it is the whole group, no other rank waits.
        options: the options of the enclosing call.
    """
    try:
        yield
    except BaseException as error:
        # An error raised by the first rank of a host is reported by that rank alone.
        is_shared = isinstance(error, CollectiveError) and error.operation == operation.name.lower()
        if near is not options["group"]:
            share_outcome(operation, error.__cause__ if is_shared else error, **options)
        raise


@contextlib.contextmanager
def ended(end: Callable[[BaseException | None], object]) -> Iterator[None]:
    """Run a block, and then ``end`` with the block's error, if there is one."""
    try:
        yield
    except BaseException as error:
        end(error)
        raise
    end(None)


def share_outcome(
    operation: Operation, error: BaseException | None, **options: Unpack[CallOptions]
) -> None:
    """Wait for all ranks, and raise the errors of any rank on every rank.

    Args:
        operation: the operation that the user called.
        error: this rank's error, if there is one.
        options: the options of the enclosing call.

    Raises:
        CollectiveError: a rank has an error; chained to ``error`` if this rank has one.
    """
    with Call(operation, must_agree="outcome", **options) as call:
        if call.is_alone:
            if error is not None:
                raise_together(call.operation, {0: failure_of(error, 0, call.call_site)}, error, 0)
            return
        mine = call.announcement(Status.VALUE) if error is None else call.failure(error)
        with call.exchange as exchange:
            messages = routes.all_gather(exchange, mine)
        call.raise_failures(messages)


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

    Blocks may be nested, and do not affect other threads. If a generator yields inside a block,
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
        options: CallOptions = {"group": self._group_like, "timeout": self._timeout}
        with (
            ended(lambda error: share_outcome(Operation.ZERO_ONLY, error, **options)),
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
        region = Region(called, later=others) if is_first else Region(called, earlier=main)
        with ended(end), inside(region):
            yield


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
