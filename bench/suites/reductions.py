"""Objects of a user's class and tensors, reduced in rank order."""

import operator
import time
from collections.abc import Callable
from typing import Any

from bench.case import LARGE, Target, case
from bench.payloads import Tally
from bench.peers import Peer


@case(
    "small custom object",
    targets=(Target(0.25, against="torch", why_missed="Two rounds; see all_gather."),),
)
def all_reduce(peer: Peer, mine: Any) -> Callable[[], object]:
    """Merge every rank's object; torch gathers all objects and folds them."""
    return lambda: peer.all_reduce(mine, Tally.merge)


@case(
    "dict of 100 tensors, 64 MiB",
    peers=("objcomm", "torch", "raw in place"),
    samples=LARGE,
    # 0.9 of the raw collective's speed.
    targets=(
        Target(
            1 / 0.9,
            against="raw in place",
            why_missed="results take fresh memory, whose pages cost 14 ms of a core for 64 MiB, "
            "because no operand is changed; `sync_gradients` works in place",
        ),
    ),
)
def all_reduce_tensors(peer: Peer, mine: Any) -> Callable[[], object]:
    """Add up every rank's tensors; torch packs, reduces and splits, raw already has one tensor."""
    return lambda: peer.sum_tensors(mine)


@case(
    "1,000 gradients, 4 MiB",
    peers=("objcomm", "objcomm joined", "torch", "raw in place"),
    samples=LARGE,
    targets=(
        Target(
            1.3,
            against="raw in place",
            why_missed="describing, packing and unpacking 1,000 tensors takes some 3 ms of each "
            "rank, and comparing what the ranks have one exchange",
        ),
        Target(0.3, against="torch"),
    ),
)
def sync_gradients(peer: Peer, mine: Any) -> Callable[[], object]:
    """Average gradients in place; torch one by one like flashy, raw and joined as one tensor."""
    return lambda: peer.average_gradients(mine)


_MERGE_SECONDS = 0.005


@case(
    "small custom object",
    peers=("objcomm", "objcomm in turn", "mpi4py"),
    samples=30,
    # Three merges in sequence at world size 8, where a single rank would need seven.
    targets=(Target(5.0, against=_MERGE_SECONDS, unit="merges", world=8),),
)
def all_reduce_slowly(peer: Peer, mine: Any) -> Callable[[], object]:
    """Merge every rank's object with a merge that takes 5 ms; "in turn" merges on one rank."""
    return lambda: peer.all_reduce_slowly(mine, _slow_merge)


def _slow_merge(left: Tally, right: Tally) -> Tally:
    time.sleep(_MERGE_SECONDS)
    return left.merge(right)


_SCANNING = ("objcomm", "objcomm all_gather", "torch", "mpi4py")
_AS_ALL_GATHER = Target(1.5, against="objcomm all_gather")


@case("8 MiB array per rank", peers=_SCANNING, samples=LARGE, targets=(_AS_ALL_GATHER,))
@case("small custom object", peers=_SCANNING, targets=(_AS_ALL_GATHER,))
def scan(peer: Peer, mine: Any) -> Callable[[], object]:
    """Merge every rank's object with those of lower ranks; torch gathers and folds."""
    merge = _merge_of(mine)
    return lambda: peer.scan(mine, merge)


_REDUCING = ("objcomm", "torch", "mpi4py")


@case("8 MiB array per rank", peers=_REDUCING, samples=LARGE)
@case("small custom object", peers=_REDUCING)
def reduce_scatter(peer: Peer, mine: Any) -> Callable[[], object]:
    """Merge all ranks' objects for each rank; the other peers exchange all objects and fold."""
    merge = _merge_of(mine)
    return lambda: peer.reduce_scatter(mine, merge)


def _merge_of(mine: Any) -> Callable[[Any, Any], Any]:
    return Tally.merge if isinstance(mine, Tally) else operator.add
