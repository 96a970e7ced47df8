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
    b"\xd9": (1, 0),
    b"\xda": (2, 0),
    b"\xdb": (4, 0),
    b"\xc4": (1, 0),
    b"\xc5": (2, 0),
    b"\xc6": (4, 0),
    b"\xc7": (1, 1),
    b"\xc8": (2, 1),
    b"\xc9": (4, 1),
}
# How many members a head of one byte announces; a mapping has two for each.
_FEW_MEMBERS = {
    bytes([first]): (first & 0x0F) * (1 if first & 0x10 else 2) for first in range(0x80, 0xA0)
}
_HEAD_OF_CONTAINER = rb"[\x80-\x9f]|[\xdc\xde]..|[\xdd\xdf].{4}"
_MAPPINGS_FROM = 0xDE

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
    members = 0
    # Of each open container, behind what stands for the stream: the members that it still lacks,
    # how deep it lies in the object, and whether it is a description.
    due, depths, described = [1], [0], [False]
    for scalars, count, at in _containers(raw):
        members += count
        if members > len(raw):
            raise DecodeError(_NAME, f"{len(raw)} bytes claim to hold {members} members")
        if scalars < due[-1]:
            due[-1] -= scalars
        else:
            _close(due, scalars)
            if not due[0]:
                return  # the rest belongs to nothing, which the decoder refuses
        opened = len(due)
        is_description = described[opened - 1]
        depth = depths[opened - 1] + (not is_description)
        if raw.startswith(_HEAD, at):
            is_description = is_description or raw.startswith(_DESCRIPTION_HEADS, at)
            depth -= raw.startswith(_NUMBER_HEAD, at)
        if depth > max_depth or opened > max_depth + description_depth:
            raise DecodeError(
                _NAME,
                f"it is nested deeper than {max_depth}; see objcomm.configure(max_depth=)",
            )
        if count:
            due.append(count)
            depths[opened:] = (depth,)
            described[opened:] = (is_description,)
        else:
            _close(due, 1)


def _close(due: list[int], scalars: int) -> None:
    """Take so many members, and what is full with them."""
    while scalars and due[0]:
        taken = min(scalars, due[-1])
        due[-1] -= taken
        scalars -= taken
        while len(due) > 1 and not due[-1]:
            due.pop()
            due[-1] -= 1


class _Patterns(NamedTuple):
    token: re.Pattern[bytes]
    run: re.Pattern[bytes]  # as many tokens as there are
    step: re.Pattern[bytes]  # and a container's head behind them


@functools.cache  # compiled by the first stream that needs them, which takes a millisecond
def _patterns() -> _Patterns:
    run = b"(?:" + _TOKEN + b")*+"
    step = b"(" + run + b")(" + _HEAD_OF_CONTAINER + b")"
    return _Patterns(*(re.compile(each, re.DOTALL) for each in (_TOKEN, run, step)))


def _containers(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Each list and mapping: the scalars since the one before, its members, where they begin."""
    token, run, step = _patterns()
    at = scalars = 0
    while True:
        for found in iter(step.scanner(raw, at).match, None):  # type: ignore[attr-defined]  # fast
            before, head = found.groups()
            if before:
                scalars += len(token.findall(before))
            at = found.end()
            count = _FEW_MEMBERS.get(head)
            if count is None:
                count = int.from_bytes(head[1:], "big") * (2 if head[0] >= _MAPPINGS_FROM else 1)
            yield scalars, count, at
            scalars = 0
        rest = run.match(raw, at)
        if rest:
            scalars += len(token.findall(rest[0]))
            at = rest.end()
        if raw[at : at + 1] not in _LONG_TOKENS:
            return  # at its end, cut off, or the byte that means nothing
        while (known := _LONG_TOKENS.get(raw[at : at + 1])) is not None:
            width, further = known
            at += 1 + width + further + int.from_bytes(raw[at + 1 : at + 1 + width], "big")
            scalars += 1
