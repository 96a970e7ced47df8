"""Proof of a message's origin: keyed BLAKE2b signatures under a key that all ranks share.

Knows keys and bytes, but no messages, ranks or codecs. The shared key itself signs nothing. Each
mesh of connections has a key derived from it and from the mesh's session, to which each of its
ranks has contributed a new random number (``transport.rendezvous``). So a signature for one group,
or from an earlier run, proves nothing in another.
"""

import functools
import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from objcomm._config import secret_of
from objcomm.errors import UsageError

SIGNATURE_NBYTES = 32

#: Names a file with the key, for programs that set none themselves.
KEY_FILE_VARIABLE = "OBJCOMM_KEY_FILE"
_KEY_FILE_MAX_NBYTES = 1 << 16
_MESHES_REMEMBERED = 256
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(slots=True)
class Newest:
    """The latest position that a sender is proved to have reached.

    Attributes:
        sequence: number of its call.
        numbers: numbers of its messages in that call.
    """

    sequence: int
    numbers: set[int] = field(default_factory=set)


class Signer:
    """Signs and verifies with one derived key; thread-safe.

    Attributes:
        newest: by (lane, sender), the latest position, so that a replay of an older message is
            detected.
    """

    __slots__ = ("_key", "newest")

    def __init__(self, secret: bytes, purpose: str) -> None:
        """Derive the key.

        Args:
            secret: the result of ``secret_of``.
            purpose: what the derived key is for; another purpose gives another key.
        """
        self._key = hashlib.blake2b(purpose.encode(), key=secret, person=b"objcomm key").digest()
        self.newest: dict[tuple[int, int], Newest] = {}

    def sign(self, header: bytes | bytearray) -> bytes:
        """Return the signature of a header."""
        return self._hashed(b"objcomm header", [header])

    def is_signed(self, header: bytes | bytearray, signature: bytes) -> bool:
        """Return whether this key created the signature; runs in constant time."""
        return hmac.compare_digest(self.sign(header), signature)

    def digest(self, parts: Iterable[Any]) -> bytes:
        """Return the digest with which a signed header covers the bytes that follow it.

        Args:
            parts: the pieces of those bytes, in order, as objects with the buffer protocol; not
                copied.
        """
        return self._hashed(b"objcomm content", parts)

    def _hashed(self, person: bytes, parts: Iterable[Any]) -> bytes:
        state = hashlib.blake2b(key=self._key, digest_size=SIGNATURE_NBYTES, person=person)
        for part in parts:
            state.update(part)
        return state.digest()


@functools.lru_cache(maxsize=_MESHES_REMEMBERED)
def signer_for(secret: bytes, purpose: str) -> Signer:
    """Return this process's only ``Signer`` for a key and a purpose."""
    return Signer(secret, purpose)


def read_key_file(path: str) -> bytes:
    """Return the secret of the key in a file; line ends after the key are ignored.

    Raises:
        UsageError: it can't be read, or another user can read or replace it.
    """
    try:
        # Non-blocking, so that a pipe of that name can't block the program.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(f"the key file can't be read: {error}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"the key file {path!r} is not a regular file")
        if found.st_uid not in (0, os.geteuid()):
            raise UsageError(f"the key file {path!r} belongs to another user ({found.st_uid})")
        if found.st_mode & _OTHERS:
            raise UsageError(f"the key file {path!r} is open to others; run: chmod 600 {path}")
        return secret_of(os.read(descriptor, _KEY_FILE_MAX_NBYTES).rstrip(b"\r\n"))
    finally:
        os.close(descriptor)


@functools.cache  # errors are not cached: the next call reads the file again
def environment_secret() -> bytes | None:
    """Return the secret of the key in the file that ``OBJCOMM_KEY_FILE`` names; None if unset.

    The file is read once.

    Raises:
        UsageError: the variable is set, but the file can't be used.
    """
    path = os.environ.get(KEY_FILE_VARIABLE)
    return None if path is None else read_key_file(path)
