"""What has come and was not taken: probe and iprobe."""

from typing import NamedTuple

from objcomm.coding import Coding
from objcomm.group import Timeout
from objcomm.receiving import Receive
from objcomm.transport.mailbox import Arrival
from objcomm.world import GroupLike


class Envelope(NamedTuple):
    """What is known of a message that has come and was not taken.

    Attributes:
        src: global rank of the sender.
        group_src: the same as a rank within the group.
        tag: its tag.
        nbytes: its length on the wire; 0 if this rank sent it to itself.
    """

    src: int
    group_src: int
    tag: int
    nbytes: int


def probe(
    src: int | None = None,
    *,
    group_src: int | None = None,
    tag: int | None = 0,
    group: GroupLike = None,
    timeout: Timeout = None,
) -> Envelope:
    """Wait until there is a message that ``recv`` with the same arguments would take.

    Args:
        src: global rank of the sender; neither this nor the next: any rank.
        group_src: the same as a rank within the group.
        tag: of the message; None for any.
        group: to which both belong; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        Who sent it, its tag and length. It stays for a ``recv``; of several threads that receive
        another one may take it first.

    Raises:
        ObjcommError: whatever ``objcomm.recv`` raises before a message has come.

    Examples:
        >>> import objcomm
        >>> objcomm.send("which?", 0, tag=5)
        >>> found = objcomm.probe(tag=None)
        >>> objcomm.recv(found.src, tag=found.tag)
        'which?'
    """
    errand = Receive(
        group=group,
        timeout=timeout,
        coding=Coding(None, None, None, None),
        tag=tag,
        global_peer=src,
        group_peer=group_src,
        name="probe",
    )
    with errand:
        return _envelope(errand, errand.awaited(is_probe=True))


def iprobe(
    src: int | None = None,
    *,
    group_src: int | None = None,
    tag: int | None = 0,
    group: GroupLike = None,
) -> Envelope | None:
    """Whether there is a message that ``recv`` with the same arguments would take now.

    Never waits. The first call begins to listen, so a message that is under way shows later.

    Args:
        src: global rank of the sender; neither this nor the next: any rank.
        group_src: the same as a rank within the group.
        tag: of the message; None for any.
        group: to which both belong; None for the world.

    Returns:
        Who sent it, its tag and length, or None if there is none.

    Raises:
        ObjcommError: whatever ``objcomm.recv`` raises before it waits.

    Examples:
        >>> import objcomm
        >>> print(objcomm.iprobe(tag=9))
        None
    """
    errand = Receive(
        group=group,
        timeout=None,
        coding=Coding(None, None, None, None),
        tag=tag,
        global_peer=src,
        group_peer=group_src,
        name="iprobe",
    )
    # Neither counted nor recorded: a program that asks again and again would see nothing else.
    found = errand.peek()
    return None if found is None else _envelope(errand, found)


def _envelope(errand: Receive, arrival: Arrival) -> Envelope:
    return Envelope(errand.group.ranks[arrival.peer], arrival.peer, arrival.tag, arrival.nbytes)
