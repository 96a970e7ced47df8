"""What it costs to import the package, and what its first call costs."""

from collections.abc import Callable
from typing import Any

from bench.case import FIRST_CALL, MANY_RANKS, Target, case
from bench.peers import Peer


@case(
    "import",
    peers=("torch", "objcomm", "torch, then objcomm"),
    worlds=(1,),
    measure="import",
    samples=9,
    targets=(
        Target(
            0.050,
            against=1,
            unit="s",
            metric="import_seconds",
            world=1,
            why_missed="All of objcomm, on a machine where torch took 1.6 s in the same run.",
        ),
    ),
)
def startup(_peer: Peer, _mine: Any) -> Callable[[], object]:
    """Import in fresh interpreters, which have no peers: ``bench.startup`` does it."""
    raise NotImplementedError


@case(
    "nothing",
    peers=("objcomm", "torch"),
    worlds=MANY_RANKS,
    measure=FIRST_CALL,
    samples=3,
    targets=(
        Target(2.0, against="torch", world=64),
        Target(20, against=1, unit="sockets", metric="root sockets", world=64),
    ),
)
def first_call(peer: Peer, _mine: Any) -> Callable[[], object]:
    """Wait for every rank for the first time; torch's has a group of its own for it."""
    return peer.first_barrier
