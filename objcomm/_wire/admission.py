"""Decides which messages of a call this rank accepts, by its limits, codecs and key.

All checks happen before memory for a message is allocated, and before it is decoded. Knows headers,
but nothing of links or of what messages mean.
"""

from collections.abc import Sequence

import torch

from objcomm._codecs.buffers import room
from objcomm._config import Settings
from objcomm._wire.header import (
    BLANK,
    EVERYONE,
    INLINE_NBYTES,
    WINDOW_NBYTES,
    Flag,
    Header,
    Status,
    check_same_call,
    signed_part,
)
from objcomm._wire.message import Message, head_of, open_body
from objcomm._wire.signing import Newest, environment_secret, signer_for
from objcomm.errors import (
    AuthenticationError,
    DecodeError,
    ObjcommError,
    WireError,
    not_accepted,
    sent_at,
)

# Looking up an enum member takes longer than everything else that is done with it.
_VALUE, _BUNDLE = int(Status.VALUE), int(Status.BUNDLE)
_WHOLE = int(Flag.WHOLE)


class Gate:
    """The gate of one call on this rank: signs sent messages, and checks received ones.

    Without a key, nothing is signed, and signed messages are refused.

    Attributes:
        settings: the options of the call.
        signer: signs and verifies; None without a key.
    """

    __slots__ = ("_devices", "_nbytes", "_rank", "_seen", "_sent", "settings", "signer")

    def __init__(
        self,
        chosen: Settings,
        purpose: str,
        rank: int = EVERYONE,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """Create the gate of a call.

        Args:
            chosen: the options of the call.
            purpose: what signatures depend on, such as the mesh's session, to which each of its
                ranks has contributed a new random number.
            rank: this rank within the group.
            devices: devices for ``BufferKind.DEVICE`` buffers, see ``open_body``.

        Raises:
            UsageError: the environment names a key file that can't be used.
        """
        self.settings = chosen
        self._rank = rank
        self._devices = devices
        self._nbytes = 0
        self.signer = None
        secret = chosen.secret or environment_secret()
        if secret is not None:
            self.signer = signer_for(secret, purpose)
            self._sent = 0
            self._seen: set[tuple[int, int]] = set()

    def head_of(self, message: Message, destination: int = EVERYONE) -> bytes | memoryview:
        """Return the bytes of a message's head; see ``pieces_of``."""
        pieces = self.pieces_of(message, destination)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pieces_of(self, message: Message, destination: int = EVERYONE) -> list[bytes | memoryview]:
        """Return a message's head in pieces, signed if there is a key and this rank created it.

        The content of a whole message is not copied: none of it is on a device, see
        ``Message.make_whole``.

        Args:
            message: the message to send; a received one is forwarded unchanged.
            destination: the only rank that may take it.
        """
        if message.arrived is not None:
            return [message.arrived]
        signer, body = self.signer, message.body
        if signer is None:
            packed = message.header.pack()
        else:
            self._sent += 1
            if message.header.digest == BLANK:
                digest = signer.digest(message.content())
                message.header = message.header._replace(digest=digest)
            header = message.header._replace(destination=destination, number=self._sent)
            packed = header.pack(signer.sign)
        if message.header.flags & _WHOLE:
            return [packed, *message.content()]
        return [packed + body if len(body) <= INLINE_NBYTES else packed]

    def header_in(self, raw: bytes | bytearray | memoryview, sender: int | None = None) -> Header:
        """Return the header of a received message after verifying its origin.

        Args:
            raw: the first bytes of the message.
            sender: the rank that must have created it, for an error's text; None if no rank did.

        Raises:
            AuthenticationError: this rank has a key, which did not sign this header; or it has
                none, but the header is signed.
            WireError: the bytes are not a header.
        """
        try:
            header = Header.unpack(raw)
        except WireError as error:
            if sender is None:
                raise
            reason = f"rank {sender} sent rank {self._rank} data that it cannot read: {error}"
            raise WireError(reason) from error
        if self.signer is None:
            if header.signature != BLANK:
                raise AuthenticationError(
                    f"{header.position} signs its messages, but this rank has no key; see "
                    "objcomm.configure(key=)"
                )
        elif header.signature == BLANK:
            raise AuthenticationError(
                f"{header.position} sent a message without a signature, but this rank has a key"
            )
        elif not self.signer.is_signed(signed_part(raw), header.signature):
            raise AuthenticationError(
                f"a message claiming to come from {header.position} has a bad signature"
            )
        return header

    def check_call(self, mine: Header, theirs: Header, sender: int) -> None:
        """Compare a verified header with this rank's own.

        Args:
            mine: the header that this rank would have sent.
            theirs: the received header.
            sender: the rank that must have created it.

        Raises:
            AuthenticationError: it is an earlier message, this rank's own, or one for another rank.
            DesyncError: the other rank is in another operation or call, or has another root, name
                or options.
            WireError: the message belongs to another group, lane or sender.
        """
        signer = self.signer
        if signer is None:
            check_same_call(mine, theirs, sender)
            return
        if theirs.sender == self._rank != sender:
            raise AuthenticationError(f"this rank's own message came back to it: {theirs.position}")
        newest = signer.newest.setdefault((theirs.lane, theirs.sender), Newest(theirs.sequence))
        if newest.sequence < theirs.sequence:
            newest.sequence, newest.numbers = theirs.sequence, set()
        is_old = theirs.sequence < newest.sequence or (
            theirs.sequence < mine.sequence and theirs.number in newest.numbers
        )
        if not is_old:
            newest.numbers.add(theirs.number)
            check_same_call(mine, theirs, sender)
        message = (theirs.sender, theirs.number)
        if is_old or message in self._seen or (mine.flags ^ theirs.flags) & Flag.ACKNOWLEDGEMENT:
            raise AuthenticationError(f"an old message was replayed: {theirs.position}")
        if theirs.destination not in (EVERYONE, self._rank):
            raise AuthenticationError(f"{theirs.position} sent this to rank {theirs.destination}")
        self._seen.add(message)

    def check_addressed(self, header: Header) -> None:
        """Check that a message between two ranks is addressed to this rank.

        Raises:
            AuthenticationError: it was signed for another use in the same call.
        """
        if self.signer is not None and header.destination != self._rank:
            raise AuthenticationError(f"{header.position} did not address this to a single rank")

    def take_in(self, raw: bytes | memoryview, header: Header, heads_max: int = 1) -> Message:
        """Accept a message, or begin to, if this rank's options permit it.

        A message that arrived completely with its head is opened. If the options refuse it, it is
        only marked, because no more of it will come; ``Message.check`` then raises.

        Args:
            raw: the received bytes; those after the head are ignored.
            header: the result of ``header_in``.
            heads_max: how many heads a bundle may contain.

        Raises:
            DecodeError: its codec is not accepted here; nothing was allocated for it.
            WireError: it is larger than a limit, and nothing was allocated; or it was cut off or
                damaged.
        """
        message = head_of(raw, header)
        message.signer = self.signer
        refusal = self.refusal(header, heads_max)
        if refusal is not None:
            if isinstance(refusal, DecodeError):
                sent_at(refusal, header.position)
            if not message.is_all_head:
                raise refusal
            message.refusal = refusal
        elif message.is_all_head:
            open_body(message, self._devices)
        elif not header.is_inline:
            message.body = room(header.body_nbytes)
        return message

    def refusal(self, header: Header, heads_max: int = 1) -> ObjcommError | None:
        """Return why a message's header is refused, or None; call this once for each message."""
        chosen = self.settings
        nbytes = header.body_nbytes + header.payload_nbytes
        status = header.status
        if status == _VALUE:
            accepted = chosen.accept
            # A message without a value, such as a barrier's, has no codec.
            has_codec = header.codec or header.meta_nbytes
            if accepted is not None and has_codec and header.codec not in accepted:
                return not_accepted(header.codec, accepted)
        elif header.is_all_head:
            return None  # a window at most, and this rank needs it
        most = chosen.max_nbytes
        if status == _BUNDLE:  # none of the messages in it is larger than a window
            most = max(most, heads_max * WINDOW_NBYTES)
        if nbytes > most:
            return _too_large(header, f"a message of {nbytes} bytes", "nbytes", chosen)
        if header.buffer_count > chosen.max_buffers:
            return _too_large(header, f"{header.buffer_count} buffers", "buffers", chosen)
        if status != _BUNDLE:  # its members are counted separately
            self._nbytes += nbytes
            if self._nbytes > chosen.max_operation_nbytes:
                what = f"{self._nbytes} bytes with those of this operation before"
                return _too_large(header, what, "operation_nbytes", chosen)
        return None


def _too_large(header: Header, what: str, option: str, chosen: Settings) -> WireError:
    most = getattr(chosen, f"max_{option}")
    return WireError(
        f"{header.position} announces {what}, more than the limit of {most}; see "
        f"objcomm.configure(max_{option}=)"
    )
