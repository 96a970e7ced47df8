"""A model's bytes copied to all ranks of one host, over a link between threads."""

import functools
import threading
import time
from unittest import mock

import pytest
import torch

from objcomm._algorithms import shared_relay
from objcomm._algorithms.parts import copy
from objcomm._transport.workspace import TURNS, Workspace, part_nbytes
from tests.unit.memory_link import MemoryLink, Wires, exchange_on, new_lane, on_every_rank

# A little more than three turns, in tensors that begin and end in the middle of one.
SIZE = 3
TURN_NBYTES = part_nbytes(SIZE) // TURNS
NUMELS = [0, 1, TURN_NBYTES - 70, 3, 2 * TURN_NBYTES + 1, 0, 12_345]


@functools.cache
def given(rank: int, call: int) -> list[torch.Tensor]:
    """Return what a rank has before a call, and keeps if it is the root."""
    generator = torch.Generator().manual_seed(10 * call + rank)
    return [
        torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator) for numel in NUMELS
    ]


@pytest.mark.parametrize("late", ["root", "others", "nobody"])
@pytest.mark.parametrize("roots", [(0, 0), (1, 2), (2, 1)])
def test_every_byte_arrives_though_the_memory_is_reused(late: str, roots: tuple[int, int]) -> None:
    wires = Wires(SIZE, sharing=(0,))
    roles = threading.local()

    def slowly(flat: torch.Tensor, into: torch.Tensor) -> None:
        if roles.current == late:
            time.sleep(0.02)
        copy(flat, into)

    def on_rank(rank: int) -> list[list[torch.Tensor]]:
        link, lane = MemoryLink(wires, rank), new_lane()
        calls = []
        for call, root in enumerate(roots):
            roles.current = "root" if rank == root else "others"
            exchange = exchange_on(link, lane)
            workspace = exchange.workspace(sum(NUMELS))
            assert isinstance(workspace, Workspace)
            flats = [flat.clone() for flat in given(rank, call)]
            shared_relay.relay(exchange, flats, root, workspace)
            exchange.finish()
            calls.append(flats)
        return calls

    with mock.patch.object(shared_relay, "copy", slowly):
        on_ranks = on_every_rank(SIZE, on_rank)
    for calls in on_ranks:
        for call, root in enumerate(roots):
            assert all(map(torch.equal, calls[call], given(root, call)))
    assert wires.left_over() == 0
