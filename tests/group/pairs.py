"""What tests of messages from rank to rank share."""

import objcomm
from tests.workers import here

LARGE = bytes(3_000_000)


def assert_pair_works() -> None:
    """Ranks 0 and 1 still talk, with small and large messages."""
    if here().rank < 2:
        other = 1 - here().rank
        for obj in (here().rank, bytes([here().rank]) * 200_000):
            assert len(str(objcomm.sendrecv(obj, other, other, tag=77))) == len(str(obj))
