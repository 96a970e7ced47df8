"""How one call encodes its objects and decodes what arrives: codec, options and device."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from objcomm.codecs import codec_named, copy, decode, encode
from objcomm.config import Allowed, settings_with, using
from objcomm.errors import WireError
from objcomm.frames import Header, Status
from objcomm.memory import DeviceLike, parse_device, readable
from objcomm.message import Message, compose
from objcomm.spans import span

_DIGEST_NBYTES = 32


class Coding:
    """See the module.

    Attributes:
        settings: the options that hold for the call.
        codec_name: of the codec that encodes.
        device: where tensors shall arrive, if the caller said so.
    """

    __slots__ = ("_codec", "codec_name", "device", "settings")

    def __init__(
        self,
        codec: str | None,
        device: DeviceLike,
        accept: Iterable[str] | None,
        allow: Iterable[Allowed] | None,
    ) -> None:
        """Begin; the arguments are the caller's own.

        Raises:
            UsageError: one of them is wrong.
        """
        self.settings = settings_with(accept, allow)
        self._codec = codec_named(codec or self.settings.codec)
        self.codec_name = self._codec.name
        self.device = parse_device(device)

    def message(
        self, header: Header, produce: Callable[[], object], device_type: str | None = None
    ) -> Message:
        """What ``produce`` returns, as a message; what it raises passes through.

        Args:
            header: of the message, but for its sizes.
            produce: gives the object.
            device_type: the type of memory that travels over a device link, if there is one.
        """
        obj = produce()
        with span("encode"):
            encoded = encode(self._codec, obj, device_type=device_type)
            return compose(header, encoded.meta, encoded.buffers, codec=self.codec_name)

    def digest(self, obj: object) -> bytes:
        """Equal for two objects only if they would be sent as the same bytes."""
        with span("encode"):
            encoded = encode(self._codec, obj)
            digest = hashlib.blake2b(self.codec_name.encode(), digest_size=_DIGEST_NBYTES)
            for part in (encoded.meta, *(readable(each.flat) for each in encoded.buffers)):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
            return digest.digest()

    def copy(self, obj: object) -> Any:
        """An independent copy of an object."""
        return copy(self._codec, obj)

    def decode(self, message: Message) -> Any:
        """The object in a message that carries one.

        Raises:
            DecodeError: it can't be rebuilt here.
            WireError: it carries none, or what its sender did not sign.
        """
        message.check()
        if message.header.status != Status.VALUE:
            raise WireError(f"{message.header.position} sent status {message.header.status}")
        owners = [buffer.owner for buffer in message.buffers]
        with span("decode"), using(self.settings):
            return decode(message.header.codec, message.meta, owners, device=self.device)
