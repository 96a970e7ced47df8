"""``broadcast``, from one rank to all, and ``barrier``, which no rank leaves before all arrive.

A function whose name ends in ``_in`` runs the first step of a call that has already been entered:
it encodes, and returns the second step as a function, to be called immediately or passed to
``call.later``. Other operations are built on these functions.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, overload

from objcomm._algorithms import routes
from objcomm._calls.call import Call
from objcomm._calls.work import Work
from objcomm._config import (
    Allowed,
    DeviceLike,
    GroupLike,
    ShownAsyncOptions,
    ShownMaybeAsyncOptions,
    ShownSyncOptions,
    Timeout,
    WithSource,
)
from objcomm._wire.header import Operation, Status

T = TypeVar("T")


class SourceSync(ShownSyncOptions, WithSource):
    """Keywords of a call that has a source and returns its result."""


class SourceAsync(ShownAsyncOptions, WithSource):
    """Keywords of a call that has a source and returns a ``Work``."""


class SourceMaybeAsync(ShownMaybeAsyncOptions, WithSource):
    """Keywords of a call that has a source and returns a ``Work`` or its result."""


@overload
def broadcast(obj: None, src: int | None = None, **options: Unpack[SourceSync]) -> Any: ...
@overload
def broadcast(obj: None, src: int | None = None, **options: Unpack[SourceAsync]) -> Work[Any]: ...
@overload
def broadcast(obj: T | None, src: int | None = None, **options: Unpack[SourceSync]) -> T: ...
@overload
def broadcast(obj: T | None, src: int | None = None, **options: Unpack[SourceAsync]) -> Work[T]: ...
@overload
def broadcast(
    obj: T | None, src: int | None = None, **options: Unpack[SourceMaybeAsync]
) -> T | Work[T]: ...
def broadcast(
    obj: T | None,
    src: int | None = None,
    *,
    group_src: int | None = None,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    confirm: bool = False,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    progress: bool = False,
    async_op: bool = False,
) -> T | Work[T]:
    """Share one rank's object with every rank of the group.

    Every rank of ``group`` must call this, in the same order as its other collectives.

    Args:
        obj: the object to share, on the source. Ignored on other ranks, which may pass ``None``.
        src: global rank of the source.
        group_src: the source as a rank within the group, instead of ``src``. With neither, the
            group's first rank is the source.
        name: name of this call, the same on every rank. Two calls with different names raise an
            error instead of matching. Calls with the same name match even from different lines of
            the program; calls without a name are identified by their line, see ``check`` in
            ``objcomm.configure``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta, shorter or longer than the group's timeout; None uses that.
        codec: name of the codec that encodes the object on the source: ``"pickle"``,
            ``"msgpack"`` or a registered name. Receivers read it from the message.
        device: device on which to place received tensors. With None, each goes to the current
            device of its original type. If the group has a separate backend for a device type,
            such as NCCL for CUDA, passing a device of that type also sends large members in CPU
            memory over that backend; with several such types, only the first does this.
        confirm: wait until every rank has decoded, and raise on every rank if any rank failed to.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        progress: show a progress bar on the group's first rank, with bytes, rate and time left,
            if the transfer takes more than half a second. Pass it on every rank. Requires tqdm.
        async_op: return a ``Work`` immediately; its ``wait`` returns the result. Do not modify
            tensors or arrays in ``obj`` before ``wait`` returns.

    Returns:
        The source's object. On the source it is the object itself, on every other rank an
        independent, writable copy.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        MissingDependencyError: ``progress`` is set and tqdm is not installed. Raised on each rank
            without tqdm, before any traffic.
        CollectiveError: the source could not encode its object or, with ``confirm``, some rank
            could not decode it. Raised on every rank.
        DecodeError: the object could not be rebuilt. Raised on that rank only; later calls work.
        DesyncError: ranks are in different operations, or in calls with different names. Raised
            once on every rank: where it waits, or in its next call.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank that was waiting for it.

    Examples:
        >>> import objcomm
        >>> objcomm.broadcast({"lr": 0.1, "layers": (64, 10)})
        {'lr': 0.1, 'layers': (64, 10)}
    """
    with Call(
        Operation.BROADCAST,
        name=name,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        global_root=src,
        group_root=group_src,
        has_root=True,
        confirm=confirm,
        accept=accept,
        allow=allow,
        progress=progress,
        async_op=async_op,
    ) as call:
        rest: Callable[[], T] = broadcast_in(call, obj)  # type: ignore[arg-type]  # None is not shared
        return call.later(rest) if async_op else rest()


def broadcast_in(call: Call, obj: T, check: Callable[[T], T] | None = None) -> Callable[[], T]:
    """Run ``broadcast`` within a call that has begun.

    Args:
        call: the call.
        obj: the object that the source shares.
        check: called on the source; returns the object to send, or raises. An error is sent as
            the source's failure.
    """
    if call.is_alone:
        return partial(call.alone, lambda: obj if check is None else check(obj))
    mine = call.message(obj, check) if call.is_root else None

    def rest() -> T:
        with call.exchange as exchange:
            message = routes.broadcast(exchange, mine, call.root)
        if call.is_root:
            call.result([message])
            return obj
        result: T = call.result([message], call.decode, message)
        return result

    return rest


@overload
def barrier(
    name: str = "",
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
    async_op: Literal[False] = False,
) -> None: ...
@overload
def barrier(
    name: str = "",
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
    async_op: Literal[True],
) -> Work[None]: ...
@overload
def barrier(
    name: str = "",
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
    async_op: bool,
) -> Work[None] | None: ...
def barrier(
    name: str = "", *, group: GroupLike = None, timeout: Timeout = None, async_op: bool = False
) -> Work[None] | None:
    """Wait until every rank of the group has called this.

    Every rank of ``group`` must call this.

    Args:
        name: name of this barrier. Ranks in barriers with different names raise an error instead
            of releasing each other.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        async_op: return a ``Work`` immediately; its ``wait`` returns when every rank has arrived.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        DesyncError: ranks are in different operations, or in barriers with different names.
            Raised once on every rank: where it waits, or in its next call.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting; it
            lists all missing ranks.
        TransportError: a rank died. Raised on every rank that was waiting for it.

    Examples:
        >>> import objcomm
        >>> objcomm.barrier("data is ready")
    """
    with Call(
        Operation.BARRIER, name=name, group=group, timeout=timeout, async_op=async_op
    ) as call:
        rest = _barrier(call)
        return call.later(rest) if async_op else rest()


def _barrier(call: Call) -> Callable[[], None]:
    if call.is_alone:
        return lambda: None
    mine = call.announcement(Status.VALUE)

    def rest() -> None:
        with call.exchange as exchange:
            routes.all_meet(exchange, mine)

    return rest
