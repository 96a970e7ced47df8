"""Define and register a codec.

To make the existing codecs support another class, use ``objcomm.register``.
"""

from objcomm._codecs.base import Codec, Encoded, register_codec
from objcomm._observe.published import publish

__all__ = [
    "Codec",
    "Encoded",
    "register_codec",
]

globals().update(publish(__name__, {name: globals()[name] for name in __all__}))
