"""Defines the frames of a stream, and how far a sender may be ahead of its receiver.

A frame is a header with a kind, a tag, a length and a number. Some kinds are followed by bytes:

- ``MESSAGE``: a message of at most 1.5 MiB, sent eagerly. The system or the receiving link buffers
  it until it is asked for. The first messages of a lane are counted: a sender is never more than 16
  of them, or 2 MiB, ahead of its receiver. The deadlock search looks back that far, and the byte
  limit bounds the memory of an idle receiver. Of later messages, only tiny ones are sent eagerly.
- ``OFFER``: announces a message that may not be sent eagerly. It stays in the sender's memory until
  the receiver answers with ``TAKE``.
- ``TAKE``: the receiver has a buffer for an offered message.
- ``CONTENT``: the offered message, from the sender's memory into the receiver's without a buffer in
  between.
- ``SHARE``: offers memory that a peer on the same host may map, and carries its descriptors. The
  answer is ``HELD``, or ``TAKE`` if the descriptors were lost because the receiving process can't
  open more.
- ``HELD``: the receiver has the descriptors of the shared memory.
- ``CREDIT``: the number of first messages of a lane that were taken. A first message in the other
  direction carries that number as well, and saves a separate credit, which would only wake its
  receiver.
- ``FAREWELL``: identifies the rank whose loss makes the sender close the connection, in bytes that
  the link does not interpret. It is the last frame.
"""

from collections.abc import Collection
from enum import IntEnum
from struct import Struct

#: Kind, tag, length of the message, and number of the offer or of first messages taken.
HEADER = Struct("<IIQQ")

#: The longest eager first message. Beyond about 2 MB, memory that all receivers map reaches 3 ranks
#: faster.
UNASKED_MAX_NBYTES = 3 << 19
#: The longest eager message that is not a first message.
TINY_MAX_NBYTES = 64
#: In how many lanes a peer's first messages may wait here, and how many other small messages and
#: offers may wait in total. No program comes near these limits. A malicious rank can make another
#: one hold at most 150 MiB.
WAITING_LANES_MAX = 64
WAITING_MAX = 1 << 14
#: How many first messages of a lane, and how many bytes, a sender may be ahead of its receiver.
AHEAD_MAX = 16
AHEAD_MAX_NBYTES = 2 << 20
#: A receiver grants credit after this many messages, or after one longer than
#: ``CREDIT_FROM_NBYTES``, so that messages without credit always leave room for one of the longest.
#: Credit for every second message cost each rank a third of its processor time in a series of
#: broadcasts.
CREDIT_EACH = 8
CREDIT_FROM_NBYTES = (AHEAD_MAX_NBYTES - UNASKED_MAX_NBYTES) // CREDIT_EACH
#: The longest farewell. None is sent if it would be longer or the system's buffer is full.
FAREWELL_MAX_NBYTES = 4096
#: How many files may wait for a peer that takes nothing; a process can often open only 1,024.
LENT_FILES_MAX = 64


class Kind(IntEnum):
    """The kind of a frame; see the module docstring."""

    MESSAGE = 1
    OFFER = 2
    TAKE = 3
    CONTENT = 4
    CREDIT = 5
    SHARE = 6
    HELD = 7
    FAREWELL = 8


def may_be_ahead(lengths: Collection[int], nbytes: int) -> bool:
    """Return whether one more first message may be sent ahead of its receiver.

    Args:
        lengths: of the messages that are ahead already.
        nbytes: length of the new message.
    """
    return len(lengths) < AHEAD_MAX and sum(lengths) + nbytes <= AHEAD_MAX_NBYTES
