"""What Python believes of an exception's arguments when it makes one, or prints it.

A Unicode error reads its text at positions that it was given, and a negative one ends the process
(CPython 3.11); the traceback of a syntax error has as many marks as it was told; and syntax errors
and groups walk through an argument, which might be a range of any length.
"""

from typing import Any

from objcomm.errors import DecodeError

_NAME = "msgpack"
_UNICODE_ERRORS = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
_COLUMN_MAX = 1 << 20
_LISTS = frozenset({list, tuple})


def check_arguments(cls: type, args: tuple[Any, ...]) -> None:
    """Refuse an exception that could not be made or printed in proportion to its bytes.

    Args:
        cls: its class.
        args: what it is made of.

    Raises:
        DecodeError: its positions lie outside of its text, or what it walks through is no list.
    """
    if issubclass(cls, _UNICODE_ERRORS):
        text, start, end = args[-4:-1] if len(args) >= 4 else ("", 0, -1)  # noqa: PLR2004  # and why
        is_right = type(start) is type(end) is int and type(text) in {str, bytes, bytearray}
        if not (is_right and 0 <= start <= end <= len(text)):
            raise DecodeError(_NAME, "the positions of a Unicode error lie outside of its text")
    elif issubclass(cls, SyntaxError):
        parts = args[1] if len(args) > 1 else ()
        if type(parts) not in {*_LISTS, str}:
            raise DecodeError(_NAME, "the place of a syntax error is no list")
        if any(type(part) is int and not -1 <= part <= _COLUMN_MAX for part in parts):
            raise DecodeError(_NAME, f"a syntax error lies beyond column {_COLUMN_MAX}")
    elif issubclass(cls, BaseExceptionGroup) and type(args[-1] if args else None) not in _LISTS:
        raise DecodeError(_NAME, "a group of exceptions is not made of a list")
