"""Something else for each rank: scatter."""

import functools
import operator
from collections.abc import Generator, Iterable, Sequence
from typing import Literal, TypeVar, Unpack, overload

from objcomm.call import Call, Options
from objcomm.collectives import DeviceLike
from objcomm.config import Allowed
from objcomm.errors import UsageError
from objcomm.frames import Operation, Status
from objcomm.group import Timeout
from objcomm.message import Message
from objcomm.transport import routes
from objcomm.work import Work
from objcomm.world import GroupLike

T = TypeVar("T")


@overload
def scatter(
    objs: Sequence[T] | None,
    src: int | None = None,
    *,
    group_src: int | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[Options],
) -> T: ...
@overload
def scatter(
    objs: Sequence[T] | None,
    src: int | None = None,
    *,
    group_src: int | None = None,
    async_op: Literal[True],
    **options: Unpack[Options],
) -> Work[T]: ...
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
    async_op: bool = False,
) -> T | Work[T]:
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
        async_op: return at once; the result is the work's. Buffers of tensors and arrays in
            ``objs`` must not change before its ``wait`` returns.

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
    call = Call(
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
    )
    return call.run(_scatter(call, objs), async_op=async_op)


def _scatter(call: Call, objs: Sequence[T] | None) -> Generator[None, None, T]:
    if call.is_alone:
        return call.alone(lambda: _one_each(call, objs)[0])
    own: list[T] = []
    messages = _encode_each(call, objs, own) if call.is_root else None
    yield
    with call.traffic() as exchange:
        message = routes.scatter(exchange, messages, call.root)

    def conclude() -> T:
        call.raise_failures([message])
        mine: T = own[0] if call.is_root else call.decode(message)
        return mine

    return call.settle(conclude)


def _one_each(call: Call, objs: Sequence[T] | None) -> Sequence[T]:
    if objs is None or isinstance(objs, str) or len(objs) != call.size:
        given = "None" if objs is None else f"{type(objs).__name__} of {len(objs)}"
        raise UsageError(
            f"{call.name}: give one object for each of {call.size} ranks, not a {given}"
        )
    return objs


def _encode_each(call: Call, objs: Sequence[T] | None, own: list[T]) -> list[Message]:
    """A message for each rank; where one can't be made all say why.

    Args:
        call: whose.
        objs: one for each rank.
        own: gets this rank's, which stays here as the object itself.
    """
    try:
        each = _one_each(call, objs)
        own.append(each[call.rank])
    except Exception as error:  # noqa: BLE001  # it travels, and is raised afterwards
        return [call.failure(error)] * call.size
    messages = []
    for peer in range(call.size):
        if peer == call.rank:
            message = call.announcement(Status.VALUE)
        else:
            message = call.message(functools.partial(operator.getitem, each, peer))
        if message.header.status == Status.FAILURE:
            return [message] * call.size
        messages.append(message)
    return messages
