"""Objects in, objects out: broadcast, gather, all_gather, scatter and barrier."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from objcomm.call import Call
from objcomm.config import Allowed
from objcomm.errors import UsageError
from objcomm.frames import Operation, Status
from objcomm.group import Timeout
from objcomm.message import Message
from objcomm.transport import routes
from objcomm.world import GroupLike

T = TypeVar("T")

DeviceLike = torch.device | str | int | None


def _unchecked(obj: T) -> T:
    return obj


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
) -> T:
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

    Returns:
        The source's object: the identical one there, an independent and writable copy elsewhere.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is no member of ``group``.
        CollectiveError: the source could not encode its object. Every rank. With ``confirm``
            also: some rank could not decode it.
        DecodeError: the object could not be rebuilt. That rank only; later calls work.
        DesyncError: another rank is in another operation. The rank that sees it.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Example:
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
    ) as call:
        if call.is_alone:
            return obj
        mine = call.message(lambda: obj) if call.is_root else None
        with call.traffic() as exchange:
            message = routes.broadcast(exchange, mine, call.root)
        return call.settle(lambda: _shared(call, message, obj))


def _shared(call: Call, message: Message, obj: T) -> T:
    call.raise_failures([message])
    return obj if call.is_root else call.decode(message)


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
) -> list[T] | None:
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

    Returns:
        On the destination one object per rank, in the order of group ranks; its own is the
        identical one. ``None`` elsewhere.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is no member of ``group``.
        CollectiveError: some rank could not encode its object. The destination and that rank.
        DecodeError: an object could not be rebuilt. The destination, after the traffic.
        DesyncError: another rank is in another operation. The rank that sees it.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Example:
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
    ) as call:
        return gather_in(call, obj)


def gather_in(call: Call, obj: T, check: Callable[[T], T] = _unchecked) -> list[T] | None:
    """``gather`` for a call that was already begun.

    Args:
        call: the call.
        obj: this rank's contribution.
        check: returns it, or raises; an error travels as this rank's failure.
    """
    if call.is_alone:
        return [call.alone(lambda: check(obj))]
    mine = call.message(lambda: check(obj))
    with call.traffic() as exchange:
        messages = routes.gather(exchange, mine, call.root)
    return call.settle(lambda: _collected(call, messages, obj))


def _collected(call: Call, messages: list[Message] | None, obj: T) -> list[T] | None:
    call.raise_failures(messages or ())
    return None if messages is None else decode_others(call, messages, obj)


def decode_others(call: Call, messages: Sequence[Message], own: T) -> list[T]:
    """The objects of all ranks, this rank's own being the identical one."""
    return [
        own if rank == call.rank else call.decode(message) for rank, message in enumerate(messages)
    ]


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
) -> list[T]:
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

    Returns:
        One object per rank, in the order of group ranks; this rank's own is the identical one.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is no member of ``group``.
        CollectiveError: some rank could not encode its object. Every rank.
        DecodeError: an object could not be rebuilt. That rank only; later calls work.
        DesyncError: another rank is in another operation. The rank that sees it.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Example:
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
    ) as call:
        return all_gather_in(call, obj)


def all_gather_in(call: Call, obj: T, check: Callable[[T], T] = _unchecked) -> list[T]:
    """``all_gather`` for a call that was already begun; arguments as in ``gather_in``."""
    if call.is_alone:
        return [call.alone(lambda: check(obj))]
    mine = call.message(lambda: check(obj))
    with call.traffic() as exchange:
        messages = routes.all_gather(exchange, mine)

    def conclude() -> list[T]:
        call.raise_failures(messages)
        return decode_others(call, messages, obj)

    return call.settle(conclude)


def scatter(
    objs: Sequence[T] | None,
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
) -> T:
    """Give each rank one object of the source's.

    Every rank of ``group`` must call this. Each object travels to its own rank only, at its own
    size.

    Args:
        objs: on the source one object per rank, in the order of group ranks; elsewhere ignored.
        src: global rank of the source.
        group_src: the same as a rank within the group; give one. Neither: the group's first rank.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes the objects on the source.
        device: where tensors inside the object shall lie on receivers.
        confirm: wait until every rank has decoded, and raise everywhere if one could not.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.

    Returns:
        This rank's object: the identical one on the source, an independent copy elsewhere.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is no member of ``group``.
        CollectiveError: the source gave another number of objects, or could not encode one.
            Every rank.
        DecodeError: the object could not be rebuilt. That rank only; later calls work.
        DesyncError: another rank is in another operation. The rank that sees it.
        TransportTimeout: the limit passed. Every rank that still waited.
        TransportError: a rank died. Every rank that waited for it.

    Example:
        >>> import objcomm
        >>> objcomm.scatter([{"files": ["a", "b"]}])
        {'files': ['a', 'b']}
    """
    with Call(
        Operation.SCATTER,
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
    ) as call:
        if call.is_alone:
            return call.alone(lambda: _one_each(objs, 1)[0])
        messages = _encode_each(call, objs) if call.is_root else None
        with call.traffic() as exchange:
            message = routes.scatter(exchange, messages, call.root)

        def conclude() -> T:
            call.raise_failures([message])
            mine: T = (
                _one_each(objs, call.size)[call.rank] if call.is_root else call.decode(message)
            )
            return mine

        return call.settle(conclude)


def _one_each(objs: Sequence[T] | None, size: int) -> Sequence[T]:
    if objs is None or isinstance(objs, str) or len(objs) != size:
        given = "None" if objs is None else f"{type(objs).__name__} of {len(objs)}"
        raise UsageError(
            f"scatter: the source must give one object for each of {size} ranks, not a {given}"
        )
    return objs


def _encode_each(call: Call, objs: Sequence[Any] | None) -> list[Message]:
    """A message for each rank; where one can't be made all say why."""
    try:
        each = _one_each(objs, call.size)
    except Exception as error:  # noqa: BLE001  # it travels, and is raised afterwards
        return [call.failure(error)] * call.size
    messages = []
    for peer in range(call.size):
        if peer == call.rank:
            message = call.announcement(Status.VALUE)  # stays here, as the object itself
        else:
            message = call.message(functools.partial(operator.getitem, each, peer))
        if message.header.status == Status.FAILURE:
            return [message] * call.size
        messages.append(message)
    return messages


def barrier(name: str = "", *, group: GroupLike = None, timeout: Timeout = None) -> None:
    """Wait until every rank of the group has come here.

    Every rank of ``group`` must call this.

    Args:
        name: barriers of different names do not release each other: they raise.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is no member of ``group``.
        DesyncError: another rank is in another operation, or in a barrier of another name. The
            rank that sees it; the others raise TransportError.
        TransportTimeout: the limit passed; the group's first rank names all that are missing.
        TransportError: a rank died. Every rank that waited for it.

    Example:
        >>> import objcomm
        >>> objcomm.barrier("data is ready")
    """
    if not isinstance(name, str):
        raise UsageError(f"barrier: name={name!r} is no text")
    with Call(Operation.BARRIER, group=group, timeout=timeout, must_agree=name) as call:
        if not call.is_alone:
            with call.traffic() as exchange:
                routes.all_meet(exchange, call.announcement(Status.VALUE))
