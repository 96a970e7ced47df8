"""How deep a msgpack stream nests, and how many members it claims, before it is decoded.

A list's header of 5 bytes may claim 4 billion members, for which a decoder makes room before it
reads the first; lists of such claims within each other multiply. Knows msgpack's tokens and
nothing of what they mean.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from objcomm.errors import DecodeError

_NAME = "msgpack"

# Lists and mappings: of up to 15 members, of 16 and of 32 bits. Only long lists claim memory.
_OPENERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
_LONG_LISTS = (b"\xdc", b"\xdd")

# What stands between: tokens whose first byte gives their length.
_TOKEN = rb"[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcb\xcf\xd3].{8}|[\xca\xce\xd2].{4}|[\xcd\xd1]..|"
_TOKEN += rb"[\xcc\xd0].|\xd4..|\xd5.{3}|\xd6.{5}|\xd7.{9}|\xd8.{17}|"
_TOKEN += b"|".join(rb"\x%02x.{%d}" % (0xA0 + nbytes, nbytes) for nbytes in range(32))

# Texts, bytes and extensions: the length's own bytes, and what an extension has besides.
_LONG_TOKENS = {
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
}
_LONG_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


class _Stop(NamedTuple):
    """A token that is no part of a run, and the run before it."""

    run_from: int
    run_until: int
    members: int | None  # of a container
    members_from: int = 0


# Lists that begin with these names hold lists that are no containers of the object's; the first one
# is itself none.
_HEAD = b"\xc7"
_NUMBER_HEAD = b"\xc7\x03\x01int"
_DESCRIPTION_HEADS = (
    b"\xc7\x06\x01tensor",
    b"\xc7\x07\x01ndarray",
    b"\xc7\x05\x01dtype",
    b"\xc7\x06\x01scalar",
)


def check_nesting(meta: memoryview, max_depth: int, description_depth: int = 0) -> None:
    """Refuse a stream whose decoding would cost far more than its bytes.

    Args:
        meta: msgpack, well-formed or not: what is not is left to the decoder.
        max_depth: how deep the object's containers may lie in each other.
        description_depth: how much deeper the lists may lie that describe a member.

    Raises:
        DecodeError: it claims more members than it has bytes, or is nested too deep.
    """
    raw = bytes(meta)
    # Bytes of texts and numbers count as well, so this is only an upper bound, in 1 µs for 1 KiB.
    openers = len(raw) - len(raw.translate(None, _OPENERS))
    if openers <= max_depth and not any(mark in raw for mark in _LONG_LISTS):
        return
    containers = members = 0
    for stop in _stops(raw):
        if stop.members is not None:
            containers += 1
            members += stop.members
            if members > len(raw):
                raise DecodeError(_NAME, f"{len(raw)} bytes claim to hold {members} members")
    if containers > max_depth:
        _check_depth(raw, max_depth, description_depth)


@functools.cache  # compiled by the first stream that needs them, which takes a millisecond
def _patterns() -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """One token, and a run of as many as there are."""
    return re.compile(_TOKEN, re.DOTALL), re.compile(b"(?:" + _TOKEN + b")*+", re.DOTALL)


def _stops(raw: bytes) -> Iterator[_Stop]:
    at, end = 0, len(raw)
    _, tokens = _patterns()
    while at < end:
        run = tokens.match(raw, at)
        start, at = at, run.end() if run else at
        if at >= end:
            return
        first = raw[at]
        if first in _LONG_TOKENS:
            width, further = _LONG_TOKENS[first]
            yield _Stop(start, at, None)
            at += 1 + width + further + int.from_bytes(raw[at + 1 : at + 1 + width], "big")
        elif first in _LONG_CONTAINERS:
            width, each = _LONG_CONTAINERS[first]
            members = each * int.from_bytes(raw[at + 1 : at + 1 + width], "big")
            yield _Stop(start, at, members, at + 1 + width)
            at += 1 + width
        elif first & 0xE0 == 0x80:  # noqa: PLR2004  # 0x80 to 0x8f: mappings, 0x90 to 0x9f: lists
            yield _Stop(start, at, (first & 0x0F) * (1 if first & 0x10 else 2), at + 1)
            at += 1
        else:
            return  # cut off, or the byte that means nothing


def _check_depth(raw: bytes, max_depth: int, description_depth: int) -> None:
    token, _ = _patterns()
    # Of each open container: the members that it still lacks, how deep it lies in the object, and
    # whether it is a description.
    due, depths, described = [1], [0], [False]
    for stop in _stops(raw):
        scalars = len(token.findall(raw, stop.run_from, stop.run_until)) + (stop.members is None)
        while scalars and due[0]:
            taken = min(scalars, due[-1])
            due[-1] -= taken
            scalars -= taken
            _close_full(due)
        if stop.members is not None:
            del depths[len(due) :], described[len(due) :]
            is_description, is_counted = described[-1], not described[-1]
            if raw.startswith(_HEAD, stop.members_from):
                is_description |= raw.startswith(_DESCRIPTION_HEADS, stop.members_from)
                is_counted &= not raw.startswith(_NUMBER_HEAD, stop.members_from)
            due.append(stop.members)
            depths.append(depths[-1] + is_counted)
            described.append(is_description)
            if depths[-1] > max_depth or len(due) - 1 > max_depth + description_depth:
                raise DecodeError(
                    _NAME,
                    f"it is nested deeper than {max_depth}; see objcomm.configure(max_depth=)",
                )
            _close_full(due)


def _close_full(due: list[int]) -> None:
    while len(due) > 1 and not due[-1]:
        due.pop()
        due[-1] -= 1
