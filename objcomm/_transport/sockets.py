"""Makes the kernel detect that the host at the other end of a connection is out of reach.

A host that loses power or its network closes nothing. By Linux's own limits, a sender learns of
that after a quarter of an hour, and a receiver never does. So the kernel is told to probe objcomm's
own connections, and those on which no answer came for too long are ended. The other kernel answers
the probes, so a process that computes or is stopped counts as alive.
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

# Linux's errors for a connection that it has given up on: a timeout, or what a router or the local
# host reported last.
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

# From Linux's struct tcp_info: how often the oldest packet was retransmitted, number of unanswered
# probes, number of unacknowledged packets, milliseconds since something was sent and since the last
# answer, and number of bytes not sent yet.
_TCP_INFO = struct.Struct("=2xBB20xI16xI8xI84xI")
# As long as its process is scheduled, a watchdog checks four times a second.
_LATE_SECONDS = 1.0
_PAUSE_SECONDS = 0.001
# A network may lose a packet, which is sent again after 0.2 s, 0.4 s and 0.8 s.
_REPEATED_MAX = 2

# Number of probes within the time limit.
_QUESTIONS = 4
_MOST_QUESTIONS = 127
_TCP_RTO_MAX_MS = 44  # linux/tcp.h; Python 3.11 has no name for it
_RTO_MAX_MS = 120_000
_LONGEST_PAUSE_SECONDS = 32767  # Linux takes no more, see tcp(7)
_LONGEST_SECONDS = 2_000_000  # TCP_USER_TIMEOUT has 31 bits for milliseconds


def open_sockets() -> dict[int, int]:
    """Return this process's sockets: descriptors by inode; empty if the system lists none."""
    found = {}
    with contextlib.suppress(OSError):  # not Linux
        for entry in Path("/proc/self/fd").iterdir():
            descriptor = int(entry.name)
            with contextlib.suppress(OSError):  # closed in the meantime
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = descriptor
    return found


def notice_outages(before: Collection[int], seconds: float, port: int = 0) -> None:
    """Make connections end if nothing was heard from their other ends for ``seconds``.

    Torch does not expose its sockets, so this applies to all new ones. They may include one that
    a thread of the user's opens within the same milliseconds: it, too, will be ended if its host
    becomes unreachable, but is not affected otherwise.

    Args:
        before: inodes of earlier sockets, which are skipped.
        seconds: time limit; infinity for none.
        port: remote port; connections to other ports are skipped unless it is 0.
    """
    if math.isinf(seconds):
        return
    for inode, descriptor in open_sockets().items():
        if inode not in before:
            with contextlib.suppress(OSError):
                _limit(inode, os.dup(descriptor), seconds, port)


def other_ends(before: Collection[int], port: int) -> set[Any]:
    """Return the addresses with this port to which new connections of this process lead.

    Args:
        before: inodes of sockets that are not new.
        port: remote port.
    """
    found = {address for inode, address, _ in _connections() if inode not in before}
    return {address for address in found if address[1] == port}


def addresses_towards(port: int) -> set[str]:
    """Return this host's addresses from which this process is connected to a remote port.

    Args:
        port: remote port.
    """
    found = {end.getsockname()[0] for _, address, end in _connections() if address[1] == port}
    return {address.removeprefix("::ffff:") for address in found}


def connected(before: Collection[int], port: int = 0) -> dict[int, int]:
    """Return new connections of this process, to ``port`` unless it is 0: descriptors by inode."""
    new = {
        inode
        for inode, address, _ in _connections()
        if inode not in before and port in {0, address[1]}
    }
    return {inode: descriptor for inode, descriptor in open_sockets().items() if inode in new}


def listens_on(port: int) -> bool:
    """Return whether this process accepts connections to a port."""
    return any(
        end.getsockname()[1] == port and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        for _, end in _network_sockets()
    )


class Silence:
    """Measures how long the host at the other end of a connection has left packets unanswered.

    TCP_USER_TIMEOUT is not an alternative: it also ends a connection whose other end reads nothing,
    although that host answers.
    """

    def __init__(self, end: socket.socket, limit_seconds: float) -> None:
        """Make the kernel probe the connection when it is idle.

        Args:
            end: this process's end.
            limit_seconds: how long is too long; infinity for the system's own limits.
        """
        self._end = end
        self._limit_seconds = limit_seconds
        self._since = self._looked_at = 0.0
        ask_when_idle(end, limit_seconds)

    def is_too_long(self) -> bool:
        """Return whether the limit has passed; call this several times a second."""
        if math.isinf(self._limit_seconds):
            return False
        try:
            repeated, probes, unanswered, sent_before, heard_before, _ = _tcp_state_of(self._end)
        except OSError:  # closed in the meantime
            return False
        now = time.monotonic()
        # What was just sent may be answered a moment later. Data for which the other end has no
        # buffer is sent again ever more rarely, and its host answers each time, except that it may
        # skip one window probe (tcp_invalid_ratelimit). And this process may not have been running
        # since it last checked.
        is_asked = probes > 1 or (unanswered and repeated and heard_before > sent_before)
        is_late = now - self._looked_at > max(_LATE_SECONDS, self._limit_seconds / 4)
        self._looked_at = now
        if is_late or not is_asked:
            self._since = 0.0
            return False
        self._since = max(self._since or now, now - heard_before / 1000)
        return now - self._since > self._limit_seconds


def ask_when_idle(end: socket.socket, seconds: float) -> None:
    """Make the kernel probe the other end of an idle connection, a few times in ``seconds``.

    It gives up after about 30 times as long, so that an outage does no harm while no thread waits
    for the other end. While one does, ``Silence`` counts the unanswered probes.

    Args:
        end: this process's end.
        seconds: time limit; infinity for none.
    """
    if math.isinf(seconds):
        return
    _have_asked(end, seconds)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_QUESTIONS)
    # Otherwise the pauses between retries grow to two minutes, even if the network is back.
    longest = max(1000, min(round(seconds / _QUESTIONS * 1000), _RTO_MAX_MS))
    with contextlib.suppress(OSError):  # Linux before 6.15
        end.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, longest)


def _have_asked(end: socket.socket, seconds: float) -> None:
    """Make the kernel probe the other end of an idle connection a few times in ``seconds``."""
    pause = min(math.ceil(seconds / _QUESTIONS), _LONGEST_PAUSE_SECONDS)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)


def await_delivery(
    ends: Collection[socket.socket], until: float, *, is_draining: bool = False
) -> None:
    """Wait until the other ends' hosts have received all that was sent, or do not answer.

    Closing a connection with unread data discards what has yet to be sent.

    Args:
        ends: this process's ends; non-blocking.
        until: when to return at the latest (``time.monotonic``).
        is_draining: whether to discard data that arrives meanwhile, so that none is left unread.
    """
    left = list(ends)
    while left := [end for end in left if _is_on_its_way(end, is_draining=is_draining)]:
        if time.monotonic() > until:
            return
        time.sleep(_PAUSE_SECONDS)


def _is_on_its_way(end: socket.socket, *, is_draining: bool) -> bool:
    try:
        repeated, _, unanswered, _, _, not_sent = _tcp_state_of(end)
        if repeated > _REPEATED_MAX or not (unanswered or not_sent):
            return False
        with contextlib.suppress(BlockingIOError):
            if is_draining:
                return bool(end.recv(1 << 20))  # no bytes if the other end has closed it
    except OSError:
        return False
    return True


def _tcp_state_of(end: socket.socket) -> tuple[int, ...]:
    """Return what the system reports about a connection, see ``_TCP_INFO``."""
    state = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    return _TCP_INFO.unpack(state.ljust(_TCP_INFO.size, b"\0"))


def has_closed(inode: int, descriptor: int, seconds: float = 0.0) -> bool:
    """Return whether the other end of a connection of this process closes it within ``seconds``."""
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_ino != inode:  # the descriptor was reused
            return True
        watched = select.poll()
        watched.register(descriptor, select.POLLRDHUP)
        return bool(watched.poll(seconds * 1000))
    return True


def hang_up(addresses: Collection[Any]) -> None:
    """End this process's connections to these addresses, which wakes threads that wait for one."""
    for _, address, end in _connections():
        if address in addresses:
            end.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[tuple[int, Any, socket.socket]]:
    """Yield this process's network connections: inode, remote address, and a duplicate."""
    for inode, end in _network_sockets():
        with contextlib.suppress(OSError):  # it is not connected
            yield inode, end.getpeername(), end


def _network_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield this process's network sockets: inode, and a duplicate."""
    for inode, descriptor in open_sockets().items():
        # It may have been closed in the meantime.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            if end.family in {socket.AF_INET, socket.AF_INET6}:
                yield inode, end


def is_outage(text: str) -> bool:
    """Return whether an error's text is the kernel's for a host that is out of reach."""
    return any(each in text for each in _OUTAGES)


def _limit(inode: int, descriptor: int, seconds: float, port: int) -> None:
    with socket.socket(fileno=descriptor) as end:  # a duplicate: closing it ends nothing
        is_it = os.fstat(end.fileno()).st_ino == inode
        is_tcp = end.type == socket.SOCK_STREAM and end.family != socket.AF_UNIX
        if not is_it or not is_tcp or end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        if port and end.getpeername()[1] != port:
            return
        if end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):  # stream links use ``Silence``
            return
        milliseconds = max(1, round(min(seconds, _LONGEST_SECONDS) * 1000))
        _have_asked(end, seconds)
        # Also while data is unacknowledged, when the kernel sends no probes.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
