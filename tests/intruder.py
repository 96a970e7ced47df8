"""A stranger that floods ranks: ``python -m tests.intruder unix``, or ``tcp ADDRESS FIRST LAST``.

It connects to every listener that it finds, as fast as it can, sends nothing, part of a message, or
a whole one that is wrong, and keeps its connections open. Knows nothing of objcomm except how its
sockets are named. Runs until it is killed; ``unix`` runs as the user nobody.
"""

import contextlib
import itertools
import os
import resource
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

_NOBODY = 65534
_KEPT_MAX = 800
_FILES_MAX = 1024
_WORDS = (b"", b"x", bytes(36), b"\x01\0\0\0" + bytes(32), bytes(500))


def _unix() -> Iterator[tuple[int, str]]:
    """Yield the listeners on this host, which the kernel shows to every user."""
    for line in Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines():
        name = line.split()[-1]
        if name.startswith("@objcomm/"):
            yield socket.AF_UNIX, "\0" + name[1:]


def _tcp(address: str, first: int, last: int) -> Iterator[tuple[int, tuple[str, int]]]:
    for port in range(first, last + 1):
        yield socket.AF_INET, (address, port)


def besiege(doors: Iterable[tuple[int, object]], kept: deque[socket.socket], word: bytes) -> None:
    """Connect to each listener once."""
    for family, door in doors:
        if len(kept) >= _KEPT_MAX:
            kept.popleft().close()
        end = socket.socket(family)
        end.settimeout(0)
        with contextlib.suppress(OSError):
            end.connect_ex(door)  # type: ignore[arg-type]  # each family has its own
            end.send(word)
        kept.append(end)


def main() -> None:
    kind, *where = sys.argv[1:]
    if kind == "unix":
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES_MAX, _FILES_MAX))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    kept: deque[socket.socket] = deque()
    for word in itertools.cycle(_WORDS):
        found = _unix() if kind == "unix" else _tcp(where[0], int(where[1]), int(where[2]))
        besiege(found, kept, word)


if __name__ == "__main__":
    main()
