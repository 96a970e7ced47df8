"""Lets the kernel notice that the host at the other end of a connection is out of reach.

A host that loses power or its network closes nothing. Who sends to it hears of that after a quarter
of an hour, by Linux' own limits, and who waits for its bytes never does. So the kernel is told to
ask, on connections of objcomm's own, and those on which no answer came for so long are ended. It is
the other kernel that answers: a process that computes, or is stopped, is as good as any.
"""

import contextlib
import errno
import math
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

# What Linux says of a connection that it gave up: the last is what a router, or the own host, has
# told it meanwhile.
_OUTAGES = [
    os.strerror(each)
    for each in (
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.ENETDOWN,
    )
]

# Of Linux' struct tcp_info: how often the oldest packet was sent again, how many questions were
# asked in vain; how many packets are not answered; milliseconds since something was sent, and since
# the last answer; and how many bytes were not sent yet.
_TCP_INFO = struct.Struct("=2xBB20xI16xI8xI84xI")
# A watchdog looks four times a second, if its process gets a turn.
_LATE_SECONDS = 1.0
_PAUSE_SECONDS = 0.001
# A network may lose a packet. The next is sent after 0.2 s, 0.4 s, 0.8 s.
_REPEATED_MAX = 2

# How often it asks before it gives up.
_QUESTIONS = 4
_MOST_QUESTIONS = 127
_TCP_RTO_MAX_MS = 44  # linux/tcp.h; Python 3.11 has no name for it
_RTO_MAX_MS = 120_000
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


def addresses_towards(port: int) -> set[str]:
    """This host's addresses from which connections of this process lead to such a port elsewhere.

    Args:
        port: of the other ends.
    """
    found = {end.getsockname()[0] for _, address, end in _connections() if address[1] == port}
    return {address.removeprefix("::ffff:") for address in found}


def connected(before: Collection[int], port: int = 0) -> dict[int, int]:
    """New connections of this process, to this port unless it is 0: descriptors by inode."""
    new = {
        inode
        for inode, address, _ in _connections()
        if inode not in before and port in {0, address[1]}
    }
    return {inode: descriptor for inode, descriptor in open_sockets().items() if inode in new}


class Silence:
    """For how long the host at the other end of a connection has answered nothing that was asked.

    TCP_USER_TIMEOUT would not do: Linux ends by it also a connection whose other end takes nothing
    in, however often that host answers.
    """

    def __init__(self, end: socket.socket, limit_seconds: float) -> None:
        """Let the kernel ask on a connection that is idle.

        Args:
            end: this process's own.
            limit_seconds: how long is too long; infinity for the system's own limits.
        """
        self._end = end
        self._limit_seconds = limit_seconds
        self._since = self._looked_at = 0.0
        ask_when_idle(end, limit_seconds)

    def is_too_long(self) -> bool:
        """Whether the limit has passed; to be asked some times each second."""
        if math.isinf(self._limit_seconds):
            return False
        try:
            repeated, probes, unanswered, sent_before, heard_before, _ = _told_of(self._end)
        except OSError:  # closed meanwhile
            return False
        now = time.monotonic()
        # What was sent just now may be answered a moment later. What the other end has no room for
        # is sent again more and more rarely, and its host answers each time; of questions whether
        # there is room it may pass over one (tcp_invalid_ratelimit). And this process may have been
        # away since it looked last.
        is_asked = probes > 1 or (unanswered and repeated and heard_before > sent_before)
        is_late = now - self._looked_at > max(_LATE_SECONDS, self._limit_seconds / 4)
        self._looked_at = now
        if is_late or not is_asked:
            self._since = 0.0
            return False
        self._since = max(self._since or now, now - heard_before / 1000)
        return now - self._since > self._limit_seconds


def ask_when_idle(end: socket.socket, seconds: float) -> None:
    """Let the kernel ask an idle connection's other end, a few times in so many seconds.

    It gives up after some 30 times as long: as long as nobody waits for the other end, an outage
    may pass. Where somebody does, ``Silence`` counts what was asked in vain.

    Args:
        end: this process's own.
        seconds: infinity for never.
    """
    if math.isinf(seconds):
        return
    _have_asked(end, seconds)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_QUESTIONS)
    # Else the pauses between its tries grow to two minutes, also where the network is there again.
    longest = max(1000, min(round(seconds / _QUESTIONS * 1000), _RTO_MAX_MS))
    with contextlib.suppress(OSError):  # Linux before 6.15
        end.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, longest)


def _have_asked(end: socket.socket, seconds: float) -> None:
    """Let the kernel ask an idle connection's other end a few times in ``seconds``."""
    pause = min(math.ceil(seconds / _QUESTIONS), _LONGEST_PAUSE_SECONDS)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)


def await_delivery(
    ends: Collection[socket.socket], until: float, *, is_draining: bool = False
) -> None:
    """Wait until the other ends' hosts have all that was sent there, or don't answer.

    A connection that is closed with anything unread forgets what has yet to be sent.

    Args:
        ends: this process's own; they don't block.
        until: when to return at the latest, as ``time.monotonic`` has it.
        is_draining: whether to throw away what comes meanwhile, so that nothing lies unread.
    """
    left = list(ends)
    while left := [end for end in left if _is_on_its_way(end, is_draining=is_draining)]:
        if time.monotonic() > until:
            return
        time.sleep(_PAUSE_SECONDS)


def _is_on_its_way(end: socket.socket, *, is_draining: bool) -> bool:
    try:
        repeated, _, unanswered, _, _, not_sent = _told_of(end)
        if repeated > _REPEATED_MAX or not (unanswered or not_sent):
            return False
        with contextlib.suppress(BlockingIOError):
            if is_draining:
                return bool(end.recv(1 << 20))  # nothing where the other end has closed it
    except OSError:
        return False
    return True


def _told_of(end: socket.socket) -> tuple[int, ...]:
    """What the system says of a connection, see ``_TCP_INFO``."""
    told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    return _TCP_INFO.unpack(told.ljust(_TCP_INFO.size, b"\0"))


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
        if end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):  # a stream's: ``Silence`` does
            return
        milliseconds = max(1, round(min(seconds, _LONGEST_SECONDS) * 1000))
        _have_asked(end, seconds)
        # Also while something is under way, when nothing is asked.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
