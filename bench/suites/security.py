"""The cost of security: a key that signs every message, and a list of what a pickle may name."""

from collections.abc import Callable
from typing import Any

from bench.case import LARGE, case
from bench.peers import Peer

_KEYED = ("objcomm", "objcomm key")
_LISTED = ("objcomm", "objcomm allow", "objcomm msgpack")


@case("8 MiB array per rank", peers=_KEYED, worlds=(2, 4), samples=LARGE)
@case("config dict, 1 KiB", peers=_KEYED, worlds=(2, 4))
def broadcast_with_key(peer: Peer, mine: Any) -> Callable[[], object]:
    """Broadcast rank 0's object, unsigned and signed."""
    return lambda: peer.broadcast(mine)


@case("8 MiB array per rank", peers=_KEYED, worlds=(2, 4), samples=LARGE)
@case("small dict", peers=_KEYED, worlds=(2, 4))
def all_gather_with_key(peer: Peer, mine: Any) -> Callable[[], object]:
    """Gather every rank's object on every rank, unsigned and signed."""
    return lambda: peer.all_gather(mine)


@case("8 MiB array per rank", peers=_LISTED, worlds=(1,), samples=50)
@case("config dict, 1 KiB", peers=_LISTED, worlds=(1,))
def codecs_with_list(peer: Peer, mine: Any) -> Callable[[], object]:
    """Turn an object into a tensor of bytes and back, with and without ``allow=``."""
    return lambda: peer.round_trip(mine)
