"""Gather one object per rank on one or all ranks, and scatter objects to ranks."""

from collections.abc import Callable
from typing import Any

from bench.case import LARGE, Target, case
from bench.payloads import MIB
from bench.peers import Peer

_SKEWED_BYTES = "64 MiB of bytes on rank 1, 1 KiB elsewhere"
_SKEWED_ARRAY = "64 MiB array on rank 1, 1 KiB elsewhere"
_ARRAY_PEERS = ("objcomm", "torch", "raw", "mpi4py pkl5")  # out of band, like objcomm


@case(
    _SKEWED_ARRAY,
    peers=("objcomm", "torch", "mpi4py pkl5"),
    worlds=(4,),
    measure="peak",
    samples=2,
    targets=(Target(1.3, 64 * MIB, "× 64 MiB", metric="root peak_nbytes"),),
)
@case(
    _SKEWED_BYTES,
    peers=("objcomm", "torch", "mpi4py"),
    worlds=(4,),
    measure="peak",
    samples=2,
    targets=(Target(2.1, 64 * MIB, "× 64 MiB", metric="root peak_nbytes"),),
)
@case(_SKEWED_ARRAY, peers=_ARRAY_PEERS, samples=LARGE)
@case(
    _SKEWED_BYTES,
    samples=LARGE,
    targets=(Target(0.35, against="torch"),),
)
@case(
    "small dict",
    targets=(Target(0.20, against="torch", why_missed="The Python of four ranks; see broadcast."),),
)
def gather(peer: Peer, mine: Any) -> Callable[[], object]:
    """Gather every rank's object on rank 0."""
    return lambda: peer.gather(mine)


@case(
    "8 MiB array per rank",
    peers=_ARRAY_PEERS,
    samples=LARGE,
    targets=(
        Target(0.30, against="torch"),
        *(Target(most, "raw", world=world) for world, most in {2: 0.5, 4: 0.25, 8: 0.2}.items()),
    ),
)
@case(
    "small dict",
    peers=("objcomm", "objcomm msgpack", "torch", "raw", "mpi4py"),
    targets=(
        Target(
            0.16,
            against="torch",
            why_missed=(
                "Two rounds, each with the Python of four ranks on two cores; see broadcast."
            ),
        ),
    ),
)
def all_gather(peer: Peer, mine: Any) -> Callable[[], object]:
    """Gather every rank's object on every rank."""
    return lambda: peer.all_gather(mine)


@case("small dict")
def scatter(peer: Peer, mine: Any) -> Callable[[], object]:
    """Scatter rank 0's objects."""
    return lambda: peer.scatter(mine)


@case("8 MiB array per rank", samples=LARGE, targets=(Target(0.50, against="torch"),))
@case("small dict", targets=(Target(0.50, against="torch"),))
def all_to_all(peer: Peer, mine: Any) -> Callable[[], object]:
    """Send one object from every rank to every rank; torch scatters once from each rank."""
    return lambda: peer.all_to_all(mine)
