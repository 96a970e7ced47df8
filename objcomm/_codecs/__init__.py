"""Codecs convert an object to the codec's own bytes and a list of raw buffers, and back.

They know nothing of groups, ranks or messages.
"""

from objcomm._codecs.base import codec_named, copy, decode, encode, register_codec
from objcomm._codecs.msgpack import MsgpackCodec
from objcomm._codecs.pickle5 import PickleCodec
from objcomm._codecs.types import register

__all__ = ["codec_named", "copy", "decode", "encode", "register", "register_codec"]

register_codec(PickleCodec())
register_codec(MsgpackCodec())
