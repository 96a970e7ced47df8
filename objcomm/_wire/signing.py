"""Proof of where a message comes from: keyed BLAKE2b signatures under a key that all ranks share.

Knows keys and bytes; knows no message, rank or codec. The shared key itself signs nothing: each
mesh of connections has a key derived from it and from the mesh's session, a name to which each of
its ranks has given a fresh number (``transport.rendezvous``). So what was signed for one group,
or in an earlier run, proves nothing in another.
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

#: Names a file that holds the key, where the program itself sets none.
KEY_FILE_VARIABLE = "OBJCOMM_KEY_FILE"
_KEY_FILE_MAX_NBYTES = 1 << 16
_MESHES_REMEMBERED = 256
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(slots=True)
class Newest:
    """The last that a sender has proved to have reached.

    Attributes:
        sequence: of its call.
        numbers: of its messages in that call.
    """

    sequence: int
    numbers: set[int] = field(default_factory=set)


class Signer:
    """Signs and checks under one derived key; serves all threads at once.

    Attributes:
        newest: by (lane, sender), so that an older message is known for a replay.
    """

    __slots__ = ("_key", "newest")

    def __init__(self, secret: bytes, purpose: str) -> None:
        """Derive the key.

        Args:
            secret: what ``secret_of`` gave.
            purpose: what the derived key is for; another purpose gives another key.
        """
        self._key = hashlib.blake2b(purpose.encode(), key=secret, person=b"objcomm key").digest()
        self.newest: dict[tuple[int, int], Newest] = {}

    def sign(self, header: bytes | bytearray) -> bytes:
        """The signature of a header."""
        return self._hashed(b"objcomm header", [header])

    def is_signed(self, header: bytes | bytearray, signature: bytes) -> bool:
        """Whether this key made the signature; takes the same time for every wrong one."""
        return hmac.compare_digest(self.sign(header), signature)

    def digest(self, parts: Iterable[Any]) -> bytes:
        """What a signed header says of the bytes that follow it.

        Args:
            parts: their pieces, in order, with the buffer protocol; they are not copied.
        """
        return self._hashed(b"objcomm content", parts)

    def _hashed(self, person: bytes, parts: Iterable[Any]) -> bytes:
        state = hashlib.blake2b(key=self._key, digest_size=SIGNATURE_NBYTES, person=person)
        for part in parts:
            state.update(part)
        return state.digest()


@functools.lru_cache(maxsize=_MESHES_REMEMBERED)
def signer_for(secret: bytes, purpose: str) -> Signer:
    """The one ``Signer`` of this process for a key and a purpose."""
    return Signer(secret, purpose)


def read_key_file(path: str) -> bytes:
    """The secret of the key that a file holds; a line end behind it does not belong to it.

    Raises:
        UsageError: it can't be read, or somebody else can read or replace it.
    """
    try:
        # Not blocking, so that a pipe of that name can't make the program wait.
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


@functools.cache  # an error is not kept: the next call reads the file again
def environment_secret() -> bytes | None:
    """The secret of the key that ``OBJCOMM_KEY_FILE`` names; read once, None without it.

    Raises:
        UsageError: the variable is set, and the file does not serve.
    """
    path = os.environ.get(KEY_FILE_VARIABLE)
    return None if path is None else read_key_file(path)
