"""Objects of a user's own, merged in rank order."""

import time
from collections.abc import Callable
from typing import Any

from bench.case import Target, case
from bench.payloads import Tally
from bench.peers import Peer


@case("small custom object", targets=(Target(0.25, against="torch"),))
def all_reduce(peer: Peer, mine: Any) -> Callable[[], object]:
    """Merge every rank's object; torch gathers all of them and folds."""
    return lambda: peer.all_reduce(mine, Tally.merge)


_MERGE_SECONDS = 0.005


@case(
    "small custom object",
    peers=("objcomm", "objcomm in turn", "mpi4py"),
    samples=30,
    # Three merges at world 8 where one rank would make seven.
    targets=(Target(5.0, against=_MERGE_SECONDS, unit="merges", world=8),),
)
def all_reduce_slowly(peer: Peer, mine: Any) -> Callable[[], object]:
    """Merge every rank's object where a merge takes 5 ms; in turn, one rank makes all of them."""
    return lambda: peer.all_reduce_slowly(mine, _slow_merge)


def _slow_merge(left: Tally, right: Tally) -> Tally:
    time.sleep(_MERGE_SECONDS)
    return left.merge(right)
