"""Objects of a user's own, merged in rank order."""

import operator
import time
from collections.abc import Callable
from typing import Any

from bench.case import LARGE, Target, case
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


_SCANNING = ("objcomm", "objcomm all_gather", "torch", "mpi4py")
_AS_ALL_GATHER = Target(1.5, against="objcomm all_gather")


@case("8 MiB array per rank", peers=_SCANNING, samples=LARGE, targets=(_AS_ALL_GATHER,))
@case("small custom object", peers=_SCANNING, targets=(_AS_ALL_GATHER,))
def scan(peer: Peer, mine: Any) -> Callable[[], object]:
    """Merge every rank's object with those of the ranks before it; torch gathers and folds."""
    merge = _merge_of(mine)
    return lambda: peer.scan(mine, merge)


_REDUCING = ("objcomm", "torch", "mpi4py")


@case("8 MiB array per rank", peers=_REDUCING, samples=LARGE)
@case("small custom object", peers=_REDUCING)
def reduce_scatter(peer: Peer, mine: Any) -> Callable[[], object]:
    """Merge for each rank what every rank has for it; the others exchange all and fold."""
    merge = _merge_of(mine)
    return lambda: peer.reduce_scatter(mine, merge)


def _merge_of(mine: Any) -> Callable[[Any, Any], Any]:
    return Tally.merge if isinstance(mine, Tally) else operator.add
