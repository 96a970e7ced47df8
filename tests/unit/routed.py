"""Messages for the tests of routes, and one operation on every rank of a link between threads."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from objcomm._algorithms import routes
from objcomm._algorithms.exchange import Exchange
from objcomm._codecs.buffers import Buffer, BufferKind, readable
from objcomm._wire.message import Message, compose
from tests.unit.memory_link import (
    MemoryLink,
    exchange_on,
    header_of,
    linked,
    new_lane,
    on_every_rank,
)

LARGE_NBYTES = 1_200_000


def message_of(
    rank: int, shape: str, kind: BufferKind = BufferKind.TENSOR, flags: int = 0
) -> Message:
    """A message whose content depends on ``rank`` and whose path depends on ``shape``."""
    meta = bytes([rank]) * (40_000 if shape in ("body", "both") else 10)
    buffers = []
    if shape in ("buffers", "both"):
        for nbytes in (5, 50_000 + rank, 0, LARGE_NBYTES):
            flat = torch.full((nbytes,), rank, dtype=torch.uint8)
            buffers.append(Buffer(kind, flat, flat))
    return compose(header_of(rank, flags=flags), meta, buffers, device_types="cpu")


def content_of(message: Message) -> tuple[bytes, list[bytes]]:
    return bytes(message.meta), [bytes(readable(buffer.flat)) for buffer in message.buffers]


@functools.cache
def expected(rank: int, shape: str) -> tuple[bytes, list[bytes]]:
    return content_of(message_of(rank, shape))


def run(
    ranks: int | Sequence[MemoryLink],
    body: Callable[[Exchange], Any],
    hosts: Sequence[int] = (),
    sharing: Collection[int] = (),
    **options: Any,
) -> list[Any]:
    """Run one operation on every rank, or over the given links, and check that nothing is left."""
    links = linked(ranks, hosts, sharing) if isinstance(ranks, int) else ranks

    def on_rank(rank: int) -> Any:
        exchange = exchange_on(links[rank], new_lane(), **options)
        result = body(exchange)
        exchange.finish()
        return result

    results = on_every_rank(len(links), on_rank)
    assert links[0].wires.left_over() == 0
    return results


def brought(
    pattern: str, exchange: Exchange, root: int, make: Callable[[int], Message]
) -> Sequence[Message]:
    """Return the messages that a pattern brings to one rank; ``make(number)`` creates a message."""
    rank, size = exchange.rank, exchange.size
    if pattern == "broadcast":
        return [routes.broadcast(exchange, make(root) if rank == root else None, root)]
    if pattern == "gather":
        return routes.gather(exchange, make(rank), root) or []
    if pattern == "all_gather":
        return routes.all_gather(exchange, make(rank))
    # Every message names this rank as its sender, whatever its content.
    numbers = range(size) if pattern == "scatter" else range(16 * rank, 16 * rank + size)
    mine = [
        Message(each.header._replace(sender=rank), each.body, each.buffers, each.large)
        for each in map(make, numbers)
    ]
    if pattern == "scatter":
        return [routes.scatter(exchange, mine if rank == root else None, root)]
    return routes.all_to_all(exchange, mine)


def to_be_brought(pattern: str, rank: int, size: int, root: int) -> list[int]:
    """Return the numbers of the messages that ``brought`` should return."""
    return {
        "broadcast": [root],
        "gather": [*range(size)] * (rank == root),
        "all_gather": [*range(size)],
        "scatter": [rank],
        "all_to_all": [16 * peer + rank for peer in range(size)],
    }[pattern]


def check_pattern(
    pattern: str,
    ranks: int | Sequence[MemoryLink],
    root: int,
    shape: str,
    hosts: Sequence[int] = (),
    *,
    sharing: Collection[int] = (),
) -> None:
    """Check that every message of a pattern arrives whole where it should, and nowhere else."""
    results = run(
        ranks,
        lambda exchange: brought(pattern, exchange, root, lambda at: message_of(at, shape)),
        hosts,
        sharing,
    )
    for rank, messages in enumerate(results):
        wanted = to_be_brought(pattern, rank, len(results), root)
        assert [content_of(each) for each in messages] == [expected(at, shape) for at in wanted]
