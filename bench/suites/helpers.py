"""The helpers built on the collectives."""

from collections.abc import Callable
from typing import Any

from bench.case import Target, case
from bench.peers import Peer


@case(
    "float",
    targets=(Target(0.20, against="torch", why_missed="The Python of four ranks; see broadcast."),),
)
def gather_scalar(peer: Peer, mine: Any) -> Callable[[], object]:
    """Gather one number per rank on rank 0."""
    return lambda: peer.gather_scalar(mine)


@case("float")
def reduce_and_broadcast(peer: Peer, mine: Any) -> Callable[[], object]:
    """Compute once from every rank's number, and broadcast the result."""
    return lambda: peer.reduce_and_broadcast(lambda: mine, sum)


@case("small dict", peers=("objcomm", "torch"), targets=(Target(0.50, against="torch"),))
def run_on_main(peer: Peer, mine: Any) -> Callable[[], object]:
    """Compute on rank 0 and broadcast, as SpeechBrain's function of this name does."""
    return lambda: peer.run_on_main(lambda: mine)


@case("nothing", peers=("objcomm", "torch", "mpi4py"))
def barrier(peer: Peer, _mine: Any) -> Callable[[], object]:
    """Wait for every rank."""
    return peer.barrier
