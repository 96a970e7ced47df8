"""What ranks leave for each other in the store; anybody who reaches it may replace the bytes.

A record is a named tuple or a dataclass, and what it declares its fields to be is what is taken
for one: no more is checked by whoever reads it.
"""

import functools
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import msgpack

from objcomm.errors import WireError

R = TypeVar("R")

_TEXT_ERRORS = "surrogatepass"  # call sites and messages hold what the file system and users give


def pack(fields: Sequence[Any]) -> bytes:
    """Plain fields as bytes."""
    packed: bytes = msgpack.packb(fields, unicode_errors=_TEXT_ERRORS)
    return packed


def unpack(raw: bytes, kind: type[R], what: str) -> R:
    """The record of which these bytes were made.

    Args:
        raw: what ``pack`` gave.
        kind: the record's type. Its fields are numbers, text, bytes, members of an enum, other
            records, tuples of these, or None instead; ``Annotated`` with a range bounds a number.
        what: the record's name, for the error.

    Raises:
        WireError: another program wrote it, or a field is not what ``kind`` says.
    """
    try:
        make: Callable[[Any], R] = _maker(typing.cast("Any", kind))
        return make(msgpack.unpackb(raw, unicode_errors=_TEXT_ERRORS))
    except (ValueError, TypeError) as error:
        raise WireError(f"the store holds {what} that can't be read") from error


@functools.cache
def _maker(kind: Any) -> Callable[[Any], Any]:
    """What makes a ``kind`` of plain data, or raises ValueError or TypeError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    make: Callable[[Any], Any]
    if origin is typing.Annotated:
        make = functools.partial(_bounded, arguments[1])
    elif origin is types.UnionType:
        make = functools.partial(_optional, _maker(arguments[0]))
    elif origin is tuple and arguments[-1] is ...:
        make = functools.partial(_repeated, _maker(arguments[0]))
    elif origin is tuple:
        make = functools.partial(_fixed, [_maker(each) for each in arguments], _together)
    elif kind is float:
        make = _number
    elif kind in {bool, int, str, bytes}:
        make = functools.partial(_exact, kind)
    elif issubclass(kind, Enum):
        make = functools.partial(_member, kind)
    else:
        hints = typing.get_type_hints(kind, include_extras=True)
        make = functools.partial(_fixed, [_maker(each) for each in hints.values()], kind)
    return make


def _exact(kind: type[R], plain: Any) -> R:
    if type(plain) is not kind:
        raise TypeError
    return plain


def _number(plain: Any) -> float:
    return plain if type(plain) is float else float(_exact(int, plain))


def _member(kind: type[Enum], plain: Any) -> Enum:
    return kind(_exact(int, plain))


def _bounded(bounds: range, plain: Any) -> int:
    if _exact(int, plain) not in bounds:
        raise ValueError
    return int(plain)


def _optional(make: Callable[[Any], Any], plain: Any) -> Any:
    return None if plain is None else make(plain)


def _repeated(make: Callable[[Any], Any], plain: Any) -> tuple[Any, ...]:
    return tuple([make(each) for each in _exact(list, plain)])


def _together(*members: Any) -> tuple[Any, ...]:
    return members


def _fixed(makers: Sequence[Callable[[Any], Any]], kind: Callable[..., Any], plain: Any) -> Any:
    """As many members as there are makers."""
    members = zip(makers, _exact(list, plain), strict=True)
    return kind(*[make(each) for make, each in members])
