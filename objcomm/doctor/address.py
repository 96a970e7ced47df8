"""What names stand for, whose addresses they are, and whether a port answers."""

import errno
import os
import socket
import time
from collections.abc import Sequence

from objcomm.doctor.bounded import within

_RESOLVE_SECONDS = 5.0
_ATTEMPT_SECONDS = 3.0
_PAUSE_SECONDS = 0.2

_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL}


class UnreachedError(Exception):
    """A port could not be reached; its text says how."""


def resolve(host: str, seconds: float = _RESOLVE_SECONDS) -> tuple[str, ...]:
    """The addresses that a name stands for, in the resolver's order.

    Args:
        host: a name or an address.
        seconds: how long to wait for the resolver.

    Raises:
        UnreachedError: none, or the resolver did not answer.
    """
    try:
        found = within(seconds, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except TimeoutError:
        raise UnreachedError(f"looking up {host!r} took more than {seconds:g} s") from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreachedError(f"{host!r} stands for no address: {reason}") from None
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_own(address: str) -> bool:
    """Whether an address belongs to this host: a socket can be bound to it."""
    try:
        with _socket_for(address) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True


def own_address(host: str) -> str:
    """The first address of this host among those that a name stands for, as Gloo takes it."""
    try:
        return next(filter(is_own, resolve(host)), "")
    except UnreachedError:
        return ""


def reach(addresses: Sequence[str], port: int, deadline: float) -> str:
    """Try until a port of a host accepts a connection, which is closed again.

    Args:
        addresses: of the host; they are tried in turn.
        port: on it.
        deadline: until when, in seconds of ``time.monotonic``.

    Returns:
        The address of this end of the connection.

    Raises:
        UnreachedError: none did; how the last attempts ended.
    """
    while True:
        reasons = []
        for address in addresses:
            limit = min(_ATTEMPT_SECONDS, max(deadline - time.monotonic(), 0.1))
            try:
                return touch(address, port, limit)
            except UnreachedError as error:
                reasons.append(f"{address}: {error}")
        if time.monotonic() + _PAUSE_SECONDS > deadline:
            raise UnreachedError("; ".join(reasons))
        time.sleep(_PAUSE_SECONDS)


def touch(address: str, port: int, seconds: float) -> str:
    """Connect once; returns the address of this end.

    Raises:
        UnreachedError: how it ended.
    """
    try:
        with connect(address, port, seconds) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise UnreachedError(reason_of(error)) from None


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """A connection to a port, whose every wait has that limit.

    Raises:
        OSError: there is none.
    """
    connection = _socket_for(address)
    try:
        connection.settimeout(seconds)
        connection.connect((address, port))
    except BaseException:
        connection.close()
        raise
    return connection


def listen(address: str) -> socket.socket:
    """A socket that listens at an address, at a port that was free.

    Raises:
        OSError: it can't.
    """
    listener = _socket_for(address)
    try:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
    except BaseException:
        listener.close()
        raise
    return listener


def reason_of(error: OSError) -> str:
    """How a connection failed, in a few words."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer"
    if error.errno == errno.ECONNREFUSED:
        return "connection refused"
    if error.errno in _UNREACHABLE:
        return "no route to it"
    return os.strerror(error.errno) if error.errno else str(error)


def _socket_for(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
