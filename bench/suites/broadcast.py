"""Broadcasts of one object from rank 0, and the memory that they use."""

from collections.abc import Callable
from typing import Any

from bench.case import LARGE, Target, case
from bench.payloads import COPIED_NBYTES, MIB
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
    "256 MiB tensor",
    peers=("objcomm", "torch"),
    measure="gained",
    samples=2,
    targets=tuple(
        Target(1.1, 256 * MIB, "× 256 MiB", metric="host gained_nbytes", world=world)
        for world in (2, 4, 8)
    ),
)
@case(
    "100 MB array",
    peers=("objcomm over Gloo", "torch"),
    worlds=(2,),
    measure="copies",
    samples=2,
    targets=tuple(
        Target(most, COPIED_NBYTES, _OF_THE_ARRAY, metric=metric, world=2, peer="objcomm over Gloo")
        for metric, most in {
            "root fresh_nbytes": 0.02,
            "root elsewhere_nbytes": 0,
            "others fresh_nbytes": 1.02,
            "others elsewhere_nbytes": 0,
        }.items()
    ),
)
@case(
    "128 MiB tensor",
    peers=("objcomm", "torch", "raw", "raw warm", "mpi4py"),
    samples=LARGE,
    targets=(
        Target(0.35, against="torch"),
        *(Target(most, "raw", world=world) for world, most in {2: 0.9, 4: 0.5, 8: 0.3}.items()),
    ),
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
                "Python of four ranks shares two cores, and each waits for all before the next "
                "peer's turn, so that all must be woken; see broadcasts, without that."
            ),
        ),
    ),
)
def broadcast(peer: Peer, mine: Any) -> Callable[[], object]:
    """Broadcast rank 0's object."""
    return lambda: peer.broadcast(mine)
