"""Point-to-point messages between two ranks."""

from collections.abc import Callable
from typing import Any

from bench.case import LARGE, Target, case
from bench.peers import Peer


@case(
    "8 MiB array per rank",
    peers=("objcomm", "torch", "raw", "mpi4py", "mpi4py pkl5"),
    worlds=(2,),
    samples=3 * LARGE,
    targets=(
        Target(
            0.5,
            against="torch",
            world=2,
            why_missed=("torch's time varies most: 16 to 84 ms in other runs."),
        ),
    ),
)
@case(
    "small dict",
    worlds=(2,),
    targets=(
        Target(
            0.5,
            against="torch",
            world=2,
            why_missed=(
                "The Python of each rank: 181 calls of functions there and back, where the same "
                "written without options, failures or records takes 12."
            ),
        ),
    ),
)
def there_and_back(peer: Peer, mine: Any) -> Callable[[], object]:
    """Send rank 0's object to rank 1 and back: two messages."""
    return lambda: peer.there_and_back(mine)


@case(
    "10,000 small dicts",
    peers=("objcomm", "objcomm in turn", "torch", "mpi4py"),
    worlds=(2,),
    samples=3,
    targets=(Target(3.0, against="objcomm in turn", world=2),),
)
def requests(peer: Peer, mine: Any) -> Callable[[], object]:
    """Exchange small dicts as asynchronous messages; peers without these make round trips."""
    return lambda: peer.requests(mine)
