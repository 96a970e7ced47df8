"""Functions that run once: on one rank for all ranks, or on one rank of each host.

All follow one pattern: one rank computes in a region while the others wait for its message. Other
ranks may then run a second function, and an error on any of them is raised on all.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from objcomm._algorithms import routes
from objcomm._calls.absence import Region, acts_alone, inside
from objcomm._calls.call import Call
from objcomm._calls.group import resolve
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
from objcomm.errors import CollectiveError, UsageError

T = TypeVar("T")
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
    """Return a decorator, or the decorated function if there is one already.

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
        with outcome_shared(operation, **options), inside(Region(called, later=ran)):
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
def outcome_shared(operation: Operation, **options: Unpack[CallOptions]) -> Iterator[None]:
    """Run a block, after which all ranks meet and raise the errors of any rank."""
    try:
        yield
    except BaseException as error:
        share_outcome(operation, error, **options)
        raise
    share_outcome(operation, None, **options)


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
