"""What Python believes of an exception's arguments when it prints one.

A Unicode error reads its text at positions that it was given, and a negative one ends the process
(CPython 3.11); the traceback of a syntax error has as many marks as it was told.
"""

from typing import Any

from objcomm.errors import DecodeError

_UNICODE_ERRORS = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
_COLUMN_MAX = 1 << 20


def check_positions(cls: type, args: tuple[Any, ...]) -> None:
    """Refuse an exception that could not be printed.

    Args:
        cls: its class.
        args: what it is made of.

    Raises:
        DecodeError: its positions lie outside of its text.
    """
    if issubclass(cls, _UNICODE_ERRORS):
        text, start, end = args[-4:-1] if len(args) >= 4 else ("", 0, -1)  # noqa: PLR2004  # and why
        is_right = type(start) is type(end) is int and type(text) in {str, bytes, bytearray}
        if not (is_right and 0 <= start <= end <= len(text)):
            raise DecodeError("msgpack", "the positions of a Unicode error lie outside of its text")
    elif issubclass(cls, SyntaxError):
        parts = args[1] if len(args) > 1 and type(args[1]) is tuple else ()
        if any(type(part) is int and not -1 <= part <= _COLUMN_MAX for part in parts):
            raise DecodeError("msgpack", f"a syntax error lies beyond column {_COLUMN_MAX}")
