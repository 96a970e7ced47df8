"""The cost of checking that all ranks agree on each operation."""

from collections.abc import Callable
from typing import Any

from bench.case import case
from bench.peers import Peer

_CHECKED = ("objcomm", "objcomm check")


@case("config dict, 1 KiB", peers=_CHECKED, worlds=(2, 4))
def broadcast_with_check(peer: Peer, mine: Any) -> Callable[[], object]:
    """Broadcast rank 0's object, without and with ``objcomm.check()``."""
    return lambda: peer.broadcast(mine)


@case("small dict", peers=_CHECKED, worlds=(2, 4))
def all_gather_with_check(peer: Peer, mine: Any) -> Callable[[], object]:
    """Gather every rank's object on every rank, without and with ``objcomm.check()``."""
    return lambda: peer.all_gather(mine)
