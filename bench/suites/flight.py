"""Asynchronous operations that are outstanding while a rank does something else."""

from collections.abc import Callable
from typing import Any

import torch

from bench.case import Target, case
from bench.measure import Beside
from bench.peers import Peer

# Rank 0 computes for about as long as the broadcast took on the author's machine.
_PRODUCTS = 60
_SIDE = 384


@case(
    "64 MiB array",
    peers=("objcomm", "objcomm idle", "raw"),
    worlds=(2, 4),
    samples=30,
    targets=(
        Target(1.25, against="objcomm idle", world=2),
        Target(1.15, against="raw", world=2),
    ),
)
def loop_beside_broadcast(peer: Peer, mine: Any) -> Callable[[], object]:
    """Multiply matrices on rank 0 with and without an outstanding broadcast."""
    factor = torch.rand(_SIDE, _SIDE)

    def loop() -> None:
        for _ in range(_PRODUCTS if peer.rank == 0 else 0):
            torch.mm(factor, factor)

    return Beside(lambda: peer.begin_broadcast(mine), loop)


@case("64 MiB array", peers=("objcomm", "raw"), worlds=(2, 4), samples=30)
def broadcast_in_flight(peer: Peer, mine: Any) -> Callable[[], object]:
    """Start the same broadcast and wait for it, without other work."""

    def whole() -> object:
        wait = peer.begin_broadcast(mine)
        return wait()

    return whole


@case(
    "small dict",
    peers=("objcomm", "objcomm in turn", "raw"),
    worlds=(2, 4),
    targets=(Target(1.35, against="objcomm in turn"),),
)
def all_gather_in_flight(peer: Peer, mine: Any) -> Callable[[], object]:
    """Start to gather every rank's object and wait for it; "in turn" gathers synchronously."""
    return lambda: peer.all_gather_in_flight(mine)
