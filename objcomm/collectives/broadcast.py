"""The same for all ranks: broadcast, gather, all_gather and barrier."""

from collections.abc import Callable, Iterable
from typing import Literal, TypeVar, Unpack, overload

from objcomm.algorithms import routes
from objcomm.calls.call import Call
from objcomm.calls.work import Work
from objcomm.collectives.patterns import all_gather_in, broadcast_in, gather_in
from objcomm.config import Allowed, DeviceLike, GroupLike, ShownOptions, Timeout
from objcomm.errors import UsageError
from objcomm.wire.header import Operation, Status

T = TypeVar("T")


@overload
def broadcast(
    obj: T,
    src: int | None = None,
    *,
    group_src: int | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[ShownOptions],
) -> T: ...
@overload
def broadcast(
    obj: T,
    src: int | None = None,
    *,
    group_src: int | None = None,
    async_op: Literal[True],
    **options: Unpack[ShownOptions],
) -> Work[T]: ...
@overload
def broadcast(
    obj: T,
    src: int | None = None,
    *,
    group_src: int | None = None,
    async_op: bool,
    **options: Unpack[ShownOptions],
) -> T | Work[T]: ...
def broadcast(
    obj: T,
    src: int | None = None,
    *,
    group_src: int | None = None,
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
        group: who takes part: a process group, a one-dimensional device mesh, None for the world.
        timeout: seconds or timedelta; the group's own if None. Shorter or longer, both hold.
        codec: what encodes the object on the source; ``"pickle"``, ``"msgpack"`` or a registered
            name. A receiver takes it from the message.
        device: where tensors inside the object shall lie on receivers; if None, on the current
            device of the type they had. A CUDA device also makes large members travel over NCCL.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        progress: let the group's first rank show a bar of the object's bytes, with rate and time
            left, if that takes more than half a second; give it on every rank. Needs tqdm.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in
            ``obj`` must not change before its ``wait`` returns.

    Returns:
        The source's object: the identical one there, an independent and writable copy elsewhere.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is no member of ``group``.
        MissingDependencyError: ``progress`` without tqdm. Every rank that lacks it, before any
            traffic.
        CollectiveError: the source could not encode its object. Every rank. With ``confirm``
            also: some rank could not decode it.
        DecodeError: the object could not be rebuilt. That rank only; later calls work.
        DesyncError: ranks are in different operations. Every rank, once: where it waits, or in its
            next call.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.broadcast({"lr": 0.1, "layers": (64, 10)})
        {'lr': 0.1, 'layers': (64, 10)}
    """
    with Call(
        Operation.BROADCAST,
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
        return call.run(broadcast_in(call, obj))


@overload
def gather(
    obj: T,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[ShownOptions],
) -> list[T] | None: ...
@overload
def gather(
    obj: T,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: Literal[True],
    **options: Unpack[ShownOptions],
) -> Work[list[T] | None]: ...
@overload
def gather(
    obj: T,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    async_op: bool,
    **options: Unpack[ShownOptions],
) -> list[T] | Work[list[T] | None] | None: ...
def gather(
    obj: T,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    confirm: bool = False,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    progress: bool = False,
    async_op: bool = False,
) -> list[T] | Work[list[T] | None] | None:
    """Collect one object from every rank onto one.

    Every rank of ``group`` must call this. Each contribution travels at its own size. A rank that
    only sends returns when its contribution was taken, which may be before ``dst`` calls.

    Args:
        obj: this rank's contribution.
        dst: global rank that receives.
        group_dst: the same as a rank within the group; give one. Neither: the group's first rank.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes this rank's contribution.
        device: where tensors inside received objects shall lie.
        confirm: make every rank wait, and raise, if any contribution was missing or unreadable.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        progress: let the group's first rank show a bar of the bytes that it receives, or sends
            where another rank is the destination; as in ``objcomm.broadcast``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in
            ``obj`` must not change before its ``wait`` returns.

    Returns:
        On the destination one object per rank, in the order of group ranks; its own is the
        identical one. ``None`` elsewhere.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is no member of ``group``.
        MissingDependencyError: ``progress`` without tqdm. Every rank that lacks it, before any
            traffic.
        CollectiveError: some rank could not encode its object. The destination and that rank.
        DecodeError: an object could not be rebuilt. The destination, after the traffic.
        DesyncError: ranks are in different operations. Every rank, once: where it waits, or in its
            next call.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.gather({"rank": 0, "correct": 41})
        [{'rank': 0, 'correct': 41}]
    """
    with Call(
        Operation.GATHER,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        global_root=dst,
        group_root=group_dst,
        has_root=True,
        confirm=confirm,
        accept=accept,
        allow=allow,
        progress=progress,
        async_op=async_op,
    ) as call:
        return call.run(gather_in(call, lambda: obj))


@overload
def all_gather(
    obj: T,
    *,
    async_op: Literal[False] = False,
    **options: Unpack[ShownOptions],
) -> list[T]: ...
@overload
def all_gather(
    obj: T,
    *,
    async_op: Literal[True],
    **options: Unpack[ShownOptions],
) -> Work[list[T]]: ...
@overload
def all_gather(
    obj: T,
    *,
    async_op: bool,
    **options: Unpack[ShownOptions],
) -> list[T] | Work[list[T]]: ...
def all_gather(
    obj: T,
    *,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    confirm: bool = False,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    progress: bool = False,
    async_op: bool = False,
) -> list[T] | Work[list[T]]:
    """Collect one object from every rank onto every rank.

    Every rank of ``group`` must call this. Each contribution travels at its own size.

    Args:
        obj: this rank's contribution.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes this rank's contribution.
        device: where tensors inside received objects shall lie.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        progress: let the group's first rank show a bar of the bytes that it receives, and of its
            own as they reach all others; as in ``objcomm.broadcast``.
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in
            ``obj`` must not change before its ``wait`` returns.

    Returns:
        One object per rank, in the order of group ranks; this rank's own is the identical one.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is no member of ``group``.
        MissingDependencyError: ``progress`` without tqdm. Every rank that lacks it, before any
            traffic.
        CollectiveError: some rank could not encode its object. Every rank.
        DecodeError: an object could not be rebuilt. That rank only; later calls work.
        DesyncError: ranks are in different operations. Every rank, once: where it waits, or in its
            next call.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.all_gather("shard-0.parquet")
        ['shard-0.parquet']
    """
    with Call(
        Operation.ALL_GATHER,
        group=group,
        timeout=timeout,
        codec=codec,
        device=device,
        confirm=confirm,
        accept=accept,
        allow=allow,
        progress=progress,
        async_op=async_op,
    ) as call:
        return call.run(all_gather_in(call, obj))


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
        NotInGroupError: this rank is no member of ``group``.
        DesyncError: ranks are in different operations, or in barriers of different names. Every
            rank, once: where it waits, or in its next call.
        TransportTimeout: the limit passed. Every rank that still waited, with all that are missing.
        TransportError: a rank died. Every rank that waited for it.

    Examples:
        >>> import objcomm
        >>> objcomm.barrier("data is ready")
    """
    if not isinstance(name, str):
        raise UsageError(f"barrier: name={name!r} is no text")
    with Call(
        Operation.BARRIER, group=group, timeout=timeout, must_agree=name, async_op=async_op
    ) as call:
        return call.run(_barrier(call))


def _barrier(call: Call) -> Callable[[], None]:
    if call.is_alone:
        return lambda: None
    mine = call.announcement(Status.VALUE)

    def rest() -> None:
        with call.traffic() as exchange:
            routes.all_meet(exchange, mine)

    return rest
