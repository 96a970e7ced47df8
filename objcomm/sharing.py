"""What one rank computes, for all; and what went wrong on any rank, for all.

The patterns under the helpers of ``control`` and ``ordering``.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from objcomm.absence import Region, acts_alone, inside
from objcomm.bodies import kept
from objcomm.call import Call
from objcomm.eager import keep_eager
from objcomm.errors import UsageError
from objcomm.frames import Operation, Status
from objcomm.group import Timeout
from objcomm.outcome import failure_of, raise_together
from objcomm.together import failing_together
from objcomm.transport import routes
from objcomm.world import GroupLike, resolve

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


def computed_in(call: Call, region: Region, produce: Callable[[], R]) -> Generator[None, None, R]:
    """What the root computes, on every rank; to be given to ``call.run``.

    Args:
        call: the call; it has a root.
        region: what the root is in meanwhile.
        produce: called on the root. The time limit begins after it there, before it elsewhere.
    """
    if call.is_alone:
        return call.alone(produce)
    own: list[R] = []
    mine = None
    if call.is_root:
        with inside(region):
            mine = call.message(lambda: kept(own, produce()))
    yield
    with call.traffic() as exchange:
        message = routes.broadcast(exchange, mine, call.root)

    def conclude() -> R:
        call.raise_failures([message])
        result: R = own[0] if own else call.decode(message)
        return result

    return call.settle(conclude)


def share_outcome(
    operation: Operation, error: BaseException | None, group: GroupLike, timeout: Timeout
) -> None:
    """Meet all ranks, and raise on each what went wrong on any.

    Args:
        operation: what the user has called.
        error: what went wrong here, if anything did.
        group: who takes part.
        timeout: in seconds.

    Raises:
        CollectiveError: something went wrong somewhere; from ``error`` where there is one.
    """
    with Call(operation, group=group, timeout=timeout, must_agree="outcome") as call:
        if call.is_alone:
            if error is not None:
                failure = failure_of(error, 0, call.call_site)
                raise_together(call.name, {0: failure}, error, 0)
            return
        mine = call.announcement(Status.VALUE) if error is None else call.failure(error)
        with call.traffic() as exchange:
            messages = routes.all_gather(exchange, mine)
        call.raise_failures(messages)


def post_everywhere(
    operation: Operation, post: Callable[[], object], group: GroupLike, timeout: Timeout
) -> None:
    """Call something on every rank, in which ranks may talk; an error is everybody's."""
    whole = resolve(group)
    if acts_alone(operation.name.lower(), whole.ranks, whole.rank):
        post()
        return
    with failing_together(operation, group, timeout):
        post()


def post_on_others(
    operation: Operation,
    post: Callable[[], object],
    waiting: Collection[int],
    group: GroupLike,
    timeout: Timeout,
) -> None:
    """Call something on all ranks but those that wait for it; an error is everybody's."""
    whole = resolve(group)
    try:
        if whole.ranks[whole.rank] not in waiting:
            with inside(Region(operation.name.lower(), later=frozenset(waiting))):
                post()
    except BaseException as error:
        share_outcome(operation, error, group, timeout)
        raise
    share_outcome(operation, None, group, timeout)
