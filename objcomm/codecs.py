"""What a codec of one's own is made of, and how it is registered.

``objcomm.register`` teaches the codecs that there are another class.
"""

from objcomm._codecs.base import Codec, Encoded, register_codec
from objcomm._observe.published import publish

__all__ = [
    "Codec",
    "Encoded",
    "register_codec",
]

globals().update(publish(__name__, {name: globals()[name] for name in __all__}))
