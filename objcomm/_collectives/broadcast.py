"""From one rank to all: ``broadcast``; and none goes on before all have come: ``barrier``.

A function whose name ends in ``_in`` is the first step of a call that was entered: it encodes. What
it returns is the second, to be called at once or given to ``call.later``. Others build on it.
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
    """The keywords of a call that has a source and returns its result."""


class SourceAsync(ShownAsyncOptions, WithSource):
    """The keywords of a call that has a source and returns a work."""


class SourceMaybeAsync(ShownMaybeAsyncOptions, WithSource):
    """The keywords of a call that has a source and returns a work or its result."""


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
        obj: on the source what to share; elsewhere ignored, so ``None`` will do.
        src: global rank of the source.
        group_src: the same as a rank within the group; give one. Neither: the group's first rank.
        name: of this call, the same on every rank. Calls of different names raise instead of
            meeting; calls of one name may be on different lines of the program, and those without
            are known by their line: see ``objcomm.configure``, ``check``.
        group: who takes part: a process group, a one-dimensional device mesh, None for the world.
        timeout: seconds or timedelta, shorter or longer than the group's own; that if None.
        codec: what encodes the object on the source; ``"pickle"``, ``"msgpack"`` or a registered
            name. A receiver takes it from the message.
        device: the device to place received tensors on; if None, on the current
            device of the type they had. A type for which the group has a backend of its own, such
            as NCCL for CUDA, also makes large members travel over that: the first such type.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        progress: let the group's first rank show a bar of the object's bytes, with rate and time
            left, if that takes more than half a second; give it on every rank. Needs tqdm.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in
            ``obj`` must not change before its ``wait`` returns.

    Returns:
        The source's object. On the source the identical one, elsewhere an independent and writable
        copy.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        MissingDependencyError: ``progress`` without tqdm. Every rank that lacks it, before any
            traffic.
        CollectiveError: the source could not encode its object. Every rank. With ``confirm``
            also: some rank could not decode it.
        DecodeError: the object could not be rebuilt. That rank only; later calls work.
        DesyncError: ranks are in different operations, or in calls of different names. Every rank,
            once: where it waits, or in its next call.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

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
    """``broadcast`` for a call that was already begun.

    Args:
        call: the call.
        obj: what the source shares.
        check: returns it, or raises, on the source; an error travels as that rank's failure.
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
    """Wait until every rank of the group has come here.

    Every rank of ``group`` must call this.

    Args:
        name: barriers of different names do not release each other: they raise.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        async_op: return a work at once, whose ``wait`` returns when every rank has come.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        DesyncError: ranks are in different operations, or in barriers of different names. Every
            rank, once: where it waits, or in its next call.
        TransportTimeout: the limit passed. Every rank that still waited, with all that are missing.
        TransportError: a rank died. Every rank that waited for it.

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
