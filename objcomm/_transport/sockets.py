"""Lets the kernel notice that the host at the other end of a connection is out of reach.

A host that loses power or its network closes nothing. Who sends to it hears of that after a quarter
of an hour, by Linux' own limits, and who waits for its bytes never does. So the kernel is told to
ask, on connections of objcomm's own, and to end those on which no answer came for so long. It is
the other kernel that answers: a process that computes, or is stopped, is as good as any.
"""

import contextlib
import errno
import math
import os
import select
import socket
import stat
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

# What Linux says of a connection that it gave up: the last is what a router, or the own host, has
# told it meanwhile.
_OUTAGES = [os.strerror(each) for each in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)]

# To ask for more takes as long as what it saves.
_FLOWS_MAX = 16

# How often it asks before it gives up.
_QUESTIONS = 4
_LONGEST_PAUSE_SECONDS = 32767  # Linux takes no more, see tcp(7)
_LONGEST_SECONDS = 2_000_000  # TCP_USER_TIMEOUT has 31 bits for milliseconds


def open_sockets() -> dict[int, int]:
    """This process's sockets: their descriptors by inode; none where the system lists none."""
    found = {}
    with contextlib.suppress(OSError):  # no Linux
        for entry in Path("/proc/self/fd").iterdir():
            descriptor = int(entry.name)
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = descriptor
    return found


def notice_outages(before: Collection[int], seconds: float, port: int = 0) -> None:
    """Let connections end when nothing was heard from their other ends for ``seconds``.

    Torch does not hand out its sockets, so these are all that are new. One that another thread of
    the user's opens in the same milliseconds may be among them: it too is ended by an unreachable
    host, and by nothing else.

    Args:
        before: inodes of sockets that are none of these.
        seconds: infinity for never.
        port: of the other ends; those that lead to another are let be, unless it is 0.
    """
    if math.isinf(seconds):
        return
    for inode, descriptor in open_sockets().items():
        if inode not in before:
            with contextlib.suppress(OSError):
                _limit(inode, os.dup(descriptor), seconds, port)


def other_ends(before: Collection[int], port: int) -> set[Any]:
    """Addresses of this port to which new connections of this process lead.

    Args:
        before: inodes of sockets that are not new.
        port: of the other ends.
    """
    found = {address for inode, address, _ in _connections() if inode not in before}
    return {address for address in found if address[1] == port}


def connected(before: Collection[int], port: int = 0) -> dict[int, int]:
    """New connections of this process, to this port unless it is 0: descriptors by inode."""
    new = {
        inode
        for inode, address, _ in _connections()
        if inode not in before and port in {0, address[1]}
    }
    return {inode: descriptor for inode, descriptor in open_sockets().items() if inode in new}


class Flow:
    """Whether some connections stand, and take more bytes at once."""

    def __init__(self, sockets: dict[int, int]) -> None:
        """Begin.

        Args:
            sockets: descriptors by inode.
        """
        self._sockets = sockets
        self._lock = threading.Lock()  # a poll serves one thread at a time
        self._poll = select.poll()
        for descriptor in sockets.values():
            self._poll.register(descriptor, select.POLLOUT | select.POLLRDHUP)

    def is_free(self) -> bool:
        """Ask the system, which takes 2 µs for each."""
        with self._lock:
            found = self._poll.poll(0)
        if len(found) < len(self._sockets) or any(event != select.POLLOUT for _, event in found):
            return False
        try:  # a number may be another one's by now
            return all(os.fstat(each).st_ino == inode for inode, each in self._sockets.items())
        except OSError:  # closed since
            return False


def flow(before: Collection[int], count: int) -> Flow | None:
    """That of new connections of this process; None where they are too many, or can't be told.

    Args:
        before: inodes of sockets that are not new.
        count: how many connections there are at least.
    """
    if count > _FLOWS_MAX:
        return None
    sockets = connected(before)
    return Flow(sockets) if len(sockets) >= count else None


def has_closed(inode: int, descriptor: int) -> bool:
    """Whether the other end of a connection that this process holds has closed it."""
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_ino != inode:  # the number is another one's by now
            return True
        watched = select.poll()
        watched.register(descriptor, select.POLLRDHUP)
        return bool(watched.poll(0))
    return True


def hang_up(addresses: Collection[Any]) -> None:
    """End this process's connections that lead to these addresses: who waits for one hears so."""
    for _, address, end in _connections():
        if address in addresses:
            end.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[tuple[int, Any, socket.socket]]:
    """This process's connections over a network: inode, the other end's address, and a copy."""
    for inode, descriptor in open_sockets().items():
        # Closed meanwhile, or it leads nowhere.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            if end.family in {socket.AF_INET, socket.AF_INET6}:
                yield inode, end.getpeername(), end


def is_outage(told: str) -> bool:
    """Whether the text of an error has the kernel's words for a host that is out of reach."""
    return any(each in told for each in _OUTAGES)


def _limit(inode: int, descriptor: int, seconds: float, port: int) -> None:
    with socket.socket(fileno=descriptor) as end:  # a copy: closing it ends nothing
        is_it = os.fstat(end.fileno()).st_ino == inode
        is_tcp = end.type == socket.SOCK_STREAM and end.family != socket.AF_UNIX
        if not is_it or not is_tcp or end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        if port and end.getpeername()[1] != port:
            return
        pause = min(math.ceil(seconds / _QUESTIONS), _LONGEST_PAUSE_SECONDS)
        milliseconds = max(1, round(min(seconds, _LONGEST_SECONDS) * 1000))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
        # Also while something is under way, when nothing is asked.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
