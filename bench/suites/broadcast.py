"""One object from rank 0 to everyone, and the memory that it costs."""

from collections.abc import Callable
from typing import Any

from bench.case import LARGE, Target, case
from bench.payloads import COPIED_NBYTES
from bench.peers import Peer

_OF_THE_ARRAY = "× the array"


@case(
    "one element of a 1 GB tensor",
    peers=("objcomm",),
    worlds=(4,),
    measure="sent",
    samples=1,
    targets=(
        Target(4095, against=1, unit="bytes", metric="root sent_nbytes"),
        Target(0, against=1, unit="wrong results", metric="others mistakes"),
    ),
)
@case(
    "2^31 + 1 bytes",
    peers=("objcomm",),
    worlds=(2,),
    measure="exact",
    samples=1,
    targets=(Target(0, against=1, unit="wrong results", metric="others mistakes", world=2),),
)
@case(
    "100 MB array",
    peers=("objcomm", "torch"),
    worlds=(2,),
    measure="copies",
    samples=2,
    targets=(
        Target(0.02, COPIED_NBYTES, _OF_THE_ARRAY, metric="root fresh_nbytes", world=2),
        Target(0, COPIED_NBYTES, _OF_THE_ARRAY, metric="root elsewhere_nbytes", world=2),
        Target(1.02, COPIED_NBYTES, _OF_THE_ARRAY, metric="others fresh_nbytes", world=2),
        Target(0, COPIED_NBYTES, _OF_THE_ARRAY, metric="others elsewhere_nbytes", world=2),
    ),
)
@case(
    "128 MiB tensor",
    peers=("objcomm", "torch", "raw", "raw warm", "mpi4py"),
    samples=LARGE,
    targets=(Target(0.35, against="torch"), Target(1.15, against="raw")),
)
@case(
    '{"w": 128 MiB ndarray}',
    peers=("objcomm", "torch", "raw", "raw warm", "mpi4py", "mpi4py pkl5"),
    samples=LARGE,
    targets=(Target(0.45, against="torch"), Target(1.15, against="raw")),
)
@case(
    "config dict, 1 KiB",
    peers=("objcomm", "objcomm msgpack", "torch", "raw", "mpi4py"),
    targets=(
        Target(
            0.40,
            against="torch",
            why_missed=(
                "Python of four ranks shares two cores. A bare send and receive took 299 µs in a "
                "run of its own, 463 µs with 80 µs of Python added on each rank, objcomm 611 µs, "
                "torch 2,443 µs (its median varies most: 1.6 ms in the run shown here)."
            ),
        ),
    ),
)
def broadcast(peer: Peer, mine: Any) -> Callable[[], object]:
    """Share rank 0's object."""
    return lambda: peer.broadcast(mine)
