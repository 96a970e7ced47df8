"""What ranks leave for each other in the store; anybody who reaches it may replace the bytes."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgpack

from objcomm.errors import WireError

R = TypeVar("R")

_TEXT_ERRORS = "surrogatepass"  # call sites and messages hold what the file system and users give


def pack(fields: Sequence[Any]) -> bytes:
    """Plain fields as bytes."""
    packed: bytes = msgpack.packb(fields, unicode_errors=_TEXT_ERRORS)
    return packed


def unpack(raw: bytes, make: Callable[..., R], what: str) -> R:
    """What ``make`` builds of the fields.

    Args:
        raw: what ``pack`` gave.
        make: takes the fields; a ValueError or TypeError of its is the record's fault.
        what: the record's name, for the error.

    Raises:
        WireError: another program wrote it.
    """
    try:
        return make(*msgpack.unpackb(raw, unicode_errors=_TEXT_ERRORS))
    except (ValueError, TypeError) as error:
        raise WireError(f"the store holds {what} that can't be read") from error
