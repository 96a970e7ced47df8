"""The cost of importing the package, and of its first call."""

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
    """Import in new interpreters, without peers; ``bench.startup`` does this."""
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
    """Wait for every rank for the first time; torch creates a new group for this."""
    return peer.first_barrier
