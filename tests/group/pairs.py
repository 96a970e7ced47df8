"""What tests of messages from rank to rank share."""

import time
from collections.abc import Callable
from typing import Any

import pytest

import objcomm
from tests.workers import here

# Promised within 2 s; a loaded machine gets more.
SOON_S = 6.0

LARGE = bytes(3_000_000)


def assert_pair_works() -> None:
    """Ranks 0 and 1 still talk, with small and large messages."""
    if here().rank < 2:
        other = 1 - here().rank
        for obj in (here().rank, bytes([here().rank]) * 200_000):
            assert len(str(objcomm.sendrecv(obj, other, other, tag=77))) == len(str(obj))


def error_in(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """The error that a call must raise, soon."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - began < SOON_S
    return caught.value
