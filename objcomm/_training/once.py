"""What runs once: on one rank for all, or on one rank of each host for the ranks there.

All of it is one pattern: a rank computes in a region while the others wait for its message. Then
come functions on other ranks, and what went wrong on any of them is raised on all.
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
from objcomm._observe.tracing import keep_eager
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
    options: CallOptions = {"name": name, "group": group, "timeout": timeout}
    produce = _bound(operation, func, args, kwargs)
    post = None if post_func is None else _bound(operation, post_func, post_args, post_kwargs)
    # A rank that cannot decode the result does not come to what follows: all must know.
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
        UsageError: it is not a function, or it gives a coroutine or a generator, which cannot be
            shared. When it is decorated. A wrong ``rank`` raises when it is called.

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
    """Run a function on the first rank of each host, and share its result with the ranks there.

    Every rank of ``group`` must call this. Hosts are what ``node_group`` finds, so no environment
    variable plays a part. In ``func`` calls of objcomm act as in ``run_on_main``, but those among
    first ranks of hosts go on. In ``post_func`` the first ranks take part in no call, unless
    ``run_post_on_all`` is set: then ranks may talk in it as anywhere.

    Args:
        func: called once on each host; returns anything that can be encoded.
        args: its positional arguments.
        kwargs: its keyword arguments.
        post_func: called on the other ranks, after ``func`` has ended on all hosts; its result is
            dropped.
        post_args: its positional arguments.
        post_kwargs: its keyword arguments.
        run_post_on_all: whether the first ranks call ``post_func`` too.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: for each wait, seconds or timedelta; the group's own if None. It must leave room
            for ``func``, and again for ``post_func``; it may be longer than the group's.

    Returns:
        What ``func`` returned on this host. On its first rank the identical object, elsewhere an
        independent copy.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        CollectiveError: ``func`` or ``post_func`` raised on some rank, or a result could not be
            encoded or decoded. Every rank of all hosts, with each failing rank's type, message and
            traceback; there from its own exception. Later calls work.
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
    """Make a function run once on each host, with its result on every rank there: a decorator.

    Every rank of ``group`` must call the function. Arguments are used on the first rank of each
    host alone. Where one such function calls another, or one of ``main_process_only``, the inner
    one runs locally.

    Args:
        function: what to decorate; ``@once_per_node`` alone, or with options in parentheses.
        group: who takes part; None for the world.
        timeout: of each call's waits, seconds or timedelta; the group's own if None. It must leave
            room for the function.

    Returns:
        A function of the same type, which returns and raises as ``run_once_per_node`` does.

    Raises:
        UsageError: as ``main_process_only``. When it is decorated.

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
    """A function with its arguments, as the user gave them; called before a call is begun.

    Raises:
        UsageError: it is not a function, or they are not arguments.
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
    """A decorator, or the function that it has decorated.

    Args:
        operation: the decorator's.
        share: given a function with a call's arguments, has it run where it should, and returns
            what the call returns.
        function: what to decorate; None for a decorator with options in parentheses.

    Raises:
        UsageError: it is not a function, or its result can't be shared.
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

        keep_eager([run])  # before it is dressed: dynamo looks at the code of what it wraps
        return folded(functools.update_wrapper(run, function))

    return decorate if function is None else decorate(function)


def _on_one(
    operation: Operation,
    produce: Callable[[], R],
    root: tuple[str, int | None, int | None],
    **options: Unpack[Options],
) -> tuple[R, frozenset[int]]:
    """What one rank computes, on every rank; and the global ranks that need compute no more.

    Args:
        operation: what the user has called.
        produce: called on the root.
        root: what the user's call names it, and what it was given, as global and as group rank.
        options: the user's own.
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
    """What this host's first rank computes, on every rank here; and the first rank of each host."""
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
    """What the root of a call computes in a region, on every rank.

    The time limit begins after that on the root, before it elsewhere.
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
    """Call something on all ranks, or on those that have not run; an error is everybody's."""
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
    else:  # in which ranks may talk
        with failing_together(operation, **options):
            post()


@contextlib.contextmanager
def near_traffic(
    operation: Operation, near: GroupLike, **options: Unpack[CallOptions]
) -> Iterator[None]:
    """Tell other hosts, which wait at the end, what goes wrong between the ranks of one.

    Args:
        operation: what the user has called.
        near: those ranks; nobody else waits if it is the whole group.
        options: of the call that this is part of.
    """
    try:
        yield
    except BaseException as error:
        # What the first rank of a host raised, that rank alone tells.
        is_shared = isinstance(error, CollectiveError) and error.operation == operation.name.lower()
        if near is not options["group"]:
            share_outcome(operation, error.__cause__ if is_shared else error, **options)
        raise


@contextlib.contextmanager
def outcome_shared(operation: Operation, **options: Unpack[CallOptions]) -> Iterator[None]:
    """A block after which all ranks meet, and raise what went wrong in it on any."""
    try:
        yield
    except BaseException as error:
        share_outcome(operation, error, **options)
        raise
    share_outcome(operation, None, **options)


def share_outcome(
    operation: Operation, error: BaseException | None, **options: Unpack[CallOptions]
) -> None:
    """Meet all ranks, and raise on each what went wrong on any.

    Args:
        operation: what the user has called.
        error: what went wrong here, if anything did.
        options: of the call that this is part of.

    Raises:
        CollectiveError: something went wrong somewhere; from ``error`` where there is one.
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
