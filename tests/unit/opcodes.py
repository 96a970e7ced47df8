"""Parts of handwritten pickles."""

import pickle
import struct

PROTO = b"\x80\x05"
EMPTY_TUPLE, EMPTY_DICT, NONE, SETITEM = b")", b"}", b"N", b"s"
NEWOBJ, REDUCE, BUILD, STOP = b"\x81", b"R", b"b", b"."


def text(letters: str) -> bytes:
    """Opcodes of a short string."""
    return b"\x8c" + bytes([len(letters)]) + letters.encode()


def named(module: str, name: str) -> bytes:
    """Opcodes that put the object with this module and name on the stack."""
    return text(module) + text(name) + b"\x93"


def called(module: str, name: str, *arguments: bytes) -> bytes:
    """Opcodes of the result of a function that gets one, two or three arguments."""
    tuple_of_all = bytes([0x84 + len(arguments)])
    return named(module, name) + b"".join(arguments) + tuple_of_all + REDUCE


def mapping(**members: bytes) -> bytes:
    """Opcodes of a mapping with these members."""
    return b"}(" + b"".join(text(key) + member for key, member in members.items()) + b"u"


def number(value: int) -> bytes:
    """Opcodes of an integer."""
    raw = pickle.encode_long(value)
    if len(raw) < 256:
        return b"\x8a" + bytes([len(raw)]) + raw
    return b"\x8b" + struct.pack("<i", len(raw)) + raw
