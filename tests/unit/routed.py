"""What tests of routes send, and one operation on every rank of a link between threads."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from objcomm._algorithms.exchange import Exchange
from objcomm._codecs.buffers import Buffer, BufferKind, readable
from objcomm._wire.message import Message, compose
from tests.unit.memory_link import (
    MemoryLink,
    Wires,
    exchange_on,
    header_of,
    new_lane,
    on_every_rank,
)

LARGE_NBYTES = 1_200_000


def message_of(
    rank: int, shape: str, kind: BufferKind = BufferKind.TENSOR, flags: int = 0
) -> Message:
    """A message whose content depends on ``rank`` and whose way depends on ``shape``."""
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
    size: int,
    body: Callable[[Exchange], Any],
    hosts: Sequence[int] = (),
    sharing: Collection[int] = (),
) -> list[Any]:
    """Run one operation on every rank; nothing may be left on the wires."""
    wires = Wires(size, hosts, sharing)

    def on_rank(rank: int) -> Any:
        exchange = exchange_on(MemoryLink(wires, rank), new_lane())
        result = body(exchange)
        exchange.finish()
        return result

    results = on_every_rank(size, on_rank)
    assert wires.left_over() == 0
    return results
