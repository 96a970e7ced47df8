"""Frames: what travels over a stream, and how much of it a peer may send before it is asked.

A frame is a header, which holds a kind, a tag, a length and a number, and then perhaps bytes:

- ``MESSAGE``: a message of at most 1.5 MiB, sent at once. The system or the receiving link keeps it
  until somebody asks for it. First messages of a lane are counted, and a sender is never more than
  16 of them, and 2 MiB, ahead of its receiver: 16 because that is how far the search for the reason
  of a wait can see, and the bytes so that an idle receiver needs little memory. Of what follows
  first messages, only tiny ones are sent this way.
- ``OFFER``: there is a message that may not be sent at once. It stays in its sender's memory until
- ``TAKE``: there is room for it now. Then it travels as
- ``CONTENT``: from the sender's memory into the receiver's, without a buffer in between.
- ``SHARE``: an offer of memory that a peer on the same host may map; its descriptors come along.
  The answer is
- ``HELD``, or ``TAKE`` if the descriptors got lost because the receiving process can't have more.
- ``CREDIT``: so many first messages of a lane have been taken. A first message that goes the other
  way says so in its number, and then no credit is due: it would wake its receiver for nothing.
- ``FAREWELL``: whose loss makes the sender close the connection, in bytes that the link does not
  read. Nothing may follow it.
"""

from collections.abc import Collection
from enum import IntEnum
from struct import Struct

#: Kind and tag; length of the message; number of the offer, or of first messages taken.
HEADER = Struct("<IIQQ")

#: A first message is not longer. More than some 2 MB reach 3 ranks faster in memory that all of
#: them map.
UNASKED_MAX_NBYTES = 3 << 19
#: What is not a first message is sent unasked up to this length.
WORD_MAX_NBYTES = 64
#: A peer's first messages may wait here in so many lanes, and so many words and offers in all. No
#: program comes near that. A malicious rank can make another one hold 150 MiB at most.
WAITING_LANES_MAX = 64
WAITING_MAX = 1 << 14
#: How many first messages of a lane, and bytes, a sender may be ahead of its receiver.
AHEAD_MAX = 16
AHEAD_MAX_NBYTES = 2 << 20
#: A sender gets credit after so many messages were taken, or after one that is longer than
#: ``CREDIT_FROM_NBYTES``: so the messages for which it has no credit yet still leave room for one
#: of the longest. Credit for every second message cost each rank of a row of broadcasts a third of
#: its processor time.
CREDIT_EACH = 8
CREDIT_FROM_NBYTES = (AHEAD_MAX_NBYTES - UNASKED_MAX_NBYTES) // CREDIT_EACH
#: A farewell is not longer; if it would be, or the system has no room for it, none is sent.
FAREWELL_MAX_NBYTES = 4096
#: So many files may wait for a peer that takes nothing; a process may often have 1,024 open.
LENT_FILES_MAX = 64


class Kind(IntEnum):
    """What a frame is; see the module."""

    MESSAGE = 1
    OFFER = 2
    TAKE = 3
    CONTENT = 4
    CREDIT = 5
    SHARE = 6
    HELD = 7
    FAREWELL = 8


def may_be_ahead(lengths: Collection[int], nbytes: int) -> bool:
    """Whether one more first message may be ahead of its receiver.

    Args:
        lengths: of those that are.
        nbytes: its length.
    """
    return len(lengths) < AHEAD_MAX and sum(lengths) + nbytes <= AHEAD_MAX_NBYTES
