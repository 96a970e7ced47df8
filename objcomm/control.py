"""Familiar helpers around who computes what."""

from typing import TypeVar

from objcomm.collectives import broadcast

T = TypeVar("T")


def ddp_broadcast(communication_object: T, src: int = 0) -> T:
    """Share an object of the world's rank ``src`` with every rank, as SpeechBrain's does.

    Every rank must call this.

    Args:
        communication_object: on ``src`` what to share; elsewhere ignored.
        src: global rank of the source.

    Returns:
        The source's object: the identical one there, an independent copy elsewhere.

    Raises:
        CollectiveError: the source could not encode its object. Every rank.
        ObjcommError: whatever ``objcomm.broadcast`` raises, on the same ranks.

    Example:
        >>> import objcomm
        >>> objcomm.ddp_broadcast({"seed": 7})
        {'seed': 7}
    """
    return broadcast(communication_object, src)
