"""What one rank computes, for all, or one rank of each host; and what went wrong on any rank.

The patterns under the helpers of ``main_process``, and those that run once on each host.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from objcomm._algorithms import routes
from objcomm._calls.absence import Region, acts_alone, inside
from objcomm._calls.call import Call
from objcomm._calls.group import resolve
from objcomm._collectives.fail_together import failing_together
from objcomm._collectives.gather import kept
from objcomm._collectives.split import near_group
from objcomm._config import GroupLike, Timeout, check_name
from objcomm._observe.tracing import keep_eager
from objcomm._wire.failure_message import failure_of, raise_together
from objcomm._wire.header import Operation, Status
from objcomm.errors import CollectiveError, UsageError

R = TypeVar("R")
P = ParamSpec("P")


def bound(
    operation: Operation,
    func: Callable[..., R],
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Callable[[], R]:
    """A function with its arguments, as the user gave them; called before a call is begun.

    Raises:
        UsageError: it is no function, or they are no arguments.
    """
    name = operation.name.lower()
    if not callable(func):
        raise UsageError(f"{name}: {func!r} is not callable; give a function")
    try:
        return functools.partial(func, *(() if args is None else args), **(kwargs or {}))
    except TypeError as error:
        raise UsageError(
            f"{name}: arguments are a sequence and a mapping of names to values, "
            f"not {type(args).__name__} and {type(kwargs).__name__}"
        ) from error


def decorated(
    operation: Operation, function: Callable[P, R], share: Callable[[Callable[[], R]], R]
) -> Callable[P, R]:
    """A function of the same type whose result is shared.

    Args:
        operation: the decorator's.
        function: what it decorates.
        share: given the function with a call's arguments, has it run where it shall, and returns
            what the call returns.

    Raises:
        UsageError: it is no function, or its result can't be shared.
    """
    name = operation.name.lower()
    bound(operation, function)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{name}: {function!r} is async; decorate a function that awaits nothing")
    if inspect.isgeneratorfunction(function):
        raise UsageError(f"{name}: {function!r} is a generator, of which no other rank can get one")

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return share(functools.partial(function, *args, **kwargs))

    keep_eager([run])  # before it is dressed: dynamo looks at the code of what it wraps
    return functools.update_wrapper(run, function)


def computed_in(call: Call, region: Region, produce: Callable[[], R]) -> R:
    """What the root computes, on every rank.

    Args:
        call: the call, which was entered; it has a root.
        region: what the root is in meanwhile.
        produce: called on the root. The time limit begins after it there, before it elsewhere.
    """
    if call.is_alone:
        return call.alone(produce)
    own: list[R] = []
    mine = None
    if call.is_root:
        with inside(region):
            mine = call.message(produce, lambda produce: kept(own, produce()))
    with call.exchange as exchange:
        message = routes.broadcast(exchange, mine, call.root)
    return call.result([message], lambda: own[0] if own else call.decode(message))


def share_outcome(
    operation: Operation,
    error: BaseException | None,
    group: GroupLike,
    timeout: Timeout,
    *,
    name: str = "",
) -> None:
    """Meet all ranks, and raise on each what went wrong on any.

    Args:
        operation: what the user has called.
        error: what went wrong here, if anything did.
        group: who takes part.
        timeout: in seconds.
        name: of the call, if the user gave it one.

    Raises:
        CollectiveError: something went wrong somewhere; from ``error`` where there is one.
    """
    with Call(operation, name=name, group=group, timeout=timeout, must_agree="outcome") as call:
        if call.is_alone:
            if error is not None:
                failure = failure_of(error, 0, call.call_site)
                raise_together(call.operation, {0: failure}, error, 0)
            return
        mine = call.announcement(Status.VALUE) if error is None else call.failure(error)
        with call.exchange as exchange:
            messages = routes.all_gather(exchange, mine)
        call.raise_failures(messages)


def post_everywhere(
    operation: Operation,
    post: Callable[[], object],
    group: GroupLike,
    timeout: Timeout,
    *,
    name: str,
) -> None:
    """Call something on every rank, in which ranks may talk; an error is everybody's."""
    whole = resolve(group)
    if acts_alone(operation.name.lower(), whole.ranks, whole.rank):
        post()
        return
    with failing_together(operation, group, timeout, name=name):
        post()


def post_on_others(
    operation: Operation,
    post: Callable[[], object],
    waiting: Collection[int],
    group: GroupLike,
    timeout: Timeout,
    *,
    name: str,
) -> None:
    """Call something on all ranks but those that wait for it; an error is everybody's."""
    whole = resolve(group)
    try:
        if whole.ranks[whole.rank] not in waiting:
            with inside(Region(operation.name.lower(), later=frozenset(waiting))):
                post()
    except BaseException as error:
        share_outcome(operation, error, group, timeout, name=name)
        raise
    share_outcome(operation, None, group, timeout, name=name)


T = TypeVar("T")


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

    Every rank of ``group`` must call this. What a host is, ``node_group`` tells, so no environment
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
    produce = bound(operation, func, args, kwargs)
    post = None if post_func is None else bound(operation, post_func, post_args, post_kwargs)
    result, firsts = _once(operation, produce, group, timeout, name=name)
    if post is None:
        return result
    if run_post_on_all:
        post_everywhere(operation, post, group, timeout, name=name)
    elif firsts:
        post_on_others(operation, post, firsts, group, timeout, name=name)
    return result


def _once(
    operation: Operation,
    produce: Callable[[], R],
    group: GroupLike,
    timeout: Timeout,
    *,
    name: str = "",
) -> tuple[R, frozenset[int]]:
    """This host's result, and the first rank of each host; none of them in a region."""
    whole = resolve(group, operation.name.lower())
    whole.deadline(operation.name.lower(), timeout)
    check_name(name, operation.name.lower())
    if acts_alone(operation.name.lower(), whole.ranks, whole.rank):
        return produce(), frozenset()
    node = near_group(name=name, group=group, timeout=timeout)
    firsts = frozenset(whole.ranks[whole.hosts.index(host)] for host in set(whole.hosts))
    region = Region(operation.name.lower(), later=frozenset(whole.ranks) - firsts, is_local=True)
    try:
        with Call(operation, name=name, group=node, timeout=timeout, has_root=True) as call:
            result = computed_in(call, region, produce)
    except BaseException as error:
        share_outcome(operation, _own(operation, error), group, timeout, name=name)
        raise
    share_outcome(operation, None, group, timeout, name=name)
    return result, firsts


def _own(operation: Operation, error: BaseException) -> BaseException | None:
    """What this rank has to tell other hosts: the first rank here tells of its own error."""
    is_shared = isinstance(error, CollectiveError) and error.operation == operation.name.lower()
    return error.__cause__ if is_shared else error


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
    if function is None:
        return functools.partial(_decorated, group, timeout)
    return _decorated(group, timeout, function)


def _decorated(group: GroupLike, timeout: Timeout, function: Callable[P, R]) -> Callable[P, R]:
    operation = Operation.ONCE_PER_NODE

    def share(produce: Callable[[], R]) -> R:
        return _once(operation, produce, group, timeout)[0]

    return decorated(operation, function, share)
