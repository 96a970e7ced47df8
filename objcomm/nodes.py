"""What runs once on each host: ``run_once_per_node`` and its decorator."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from objcomm.absence import Region, acts_alone
from objcomm.call import Call
from objcomm.errors import CollectiveError
from objcomm.frames import Operation
from objcomm.group import Timeout
from objcomm.sharing import (
    bound,
    computed_in,
    decorated,
    post_everywhere,
    post_on_others,
    share_outcome,
)
from objcomm.subgroups import near_group
from objcomm.world import GroupLike, resolve

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def run_once_per_node(  # noqa: PLR0917  # SpeechBrain's positions
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    post_func: Callable[..., object] | None = None,
    post_args: Sequence[Any] | None = None,
    post_kwargs: Mapping[str, Any] | None = None,
    run_post_on_all: bool = False,  # noqa: FBT001, FBT002  # SpeechBrain's position for it
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
) -> T:
    """Run a function on the first rank of each host, and share its result with the ranks there.

    Every rank of ``group`` must call this. What a host is, ``node_group`` tells, so no environment
    variable plays a part. In ``func`` calls of objcomm act as in ``main_only``, but those among
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
        group: who takes part; None for the world.
        timeout: for each wait, seconds or timedelta; the group's own if None. It must leave room
            for ``func``, and again for ``post_func``; it may be longer than the group's.

    Returns:
        What ``func`` returned on this host: the identical object on its first rank, an independent
        copy elsewhere.

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
    result, firsts = _once(operation, produce, group, timeout)
    if post is None:
        return result
    if run_post_on_all:
        post_everywhere(operation, post, group, timeout)
    elif firsts:
        post_on_others(operation, post, firsts, group, timeout)
    return result


def _once(
    operation: Operation, produce: Callable[[], R], group: GroupLike, timeout: Timeout
) -> tuple[R, frozenset[int]]:
    """This host's result, and the first rank of each host; none of them in a region."""
    whole = resolve(group)
    whole.deadline(operation.name.lower(), timeout)
    if acts_alone(operation.name.lower(), whole.ranks, whole.rank):
        return produce(), frozenset()
    node = near_group(group=group, timeout=timeout)
    firsts = frozenset(whole.ranks[whole.hosts.index(host)] for host in set(whole.hosts))
    region = Region(operation.name.lower(), later=frozenset(whole.ranks) - firsts, is_local=True)
    try:
        call = Call(operation, group=node, timeout=timeout, has_root=True)
        result = call.carry_out(computed_in(call, region, produce))
    except BaseException as error:
        share_outcome(operation, _own(operation, error), group, timeout)
        raise
    share_outcome(operation, None, group, timeout)
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
