"""Serialization alone, in one process."""

from collections.abc import Callable
from typing import Any

from bench.case import case
from bench.peers import Peer

_PEERS = ("objcomm", "objcomm msgpack", "torch", "mpi4py")


@case("8 MiB array per rank", peers=_PEERS, worlds=(1,), samples=50)
@case("config dict, 1 KiB", peers=_PEERS, worlds=(1,))
def codecs(peer: Peer, mine: Any) -> Callable[[], object]:
    """Turn an object into a tensor of bytes and back."""
    return lambda: peer.round_trip(mine)
