"""Where ranks listen for each other, and the handshake with which they prove who they are.

Ranks on one host find each other by the names of abstract Unix sockets. The kernel reports the
owner of each process, so a process of another user is rejected before it can send anything. Ranks
on other hosts connect by TCP. In both cases, both ends send a handshake, which only a rank that has
met the others can compute: it depends on the meeting's session, which is stored nowhere, and on the
user's key if there is one. Over TCP it also depends on the address that was called, so that a
process at another address can't relay it.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import errno
import hashlib
import os
import random
import re
import secrets
import select
import socket
import struct
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import quote, unquote

from objcomm._config import TRANSPORTS
from objcomm._environment import interface_addresses
from objcomm._transport.rendezvous import damaged
from objcomm._transport.sockets import addresses_towards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from objcomm._config import Transport

_NAME = re.compile("[0-9a-f]{32}")
_PROOF_NBYTES = 16
_HANDSHAKE = struct.Struct(f"<I{_PROOF_NBYTES}s{_PROOF_NBYTES}s")
# Only hosts of containers have more, and those addresses lead nowhere.
_ADDRESSES_MAX = 16
# How long the system waits for a caller's first bytes before it reports the caller.
_FIRST_BYTES_WITHIN_SECONDS = 30
# How many callers a rank accepts before it does anything else.
_TURN = 64
#: Errors whose cause is this process itself, whichever rank it was connecting to.
OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class OtherKeyError(PermissionError):
    """A rank of this meeting has a different key.

    Attributes:
        peer: that rank.
    """

    def __init__(self, peer: int) -> None:
        super().__init__(errno.EACCES, "they have different keys, or only one of them has a key")
        self.peer = peer


class Endpoint(NamedTuple):
    """Where a rank can be reached; encoded as text without spaces for the other ranks.

    Attributes:
        transport: what the rank's user has chosen.
        host: its host's name, for errors.
        name: name of its Unix socket; empty if it has none.
        port: TCP port for other hosts; 0 if it has none.
        lacks: why it has no name or no port; empty if nothing went wrong.
        addresses: addresses of its host, the likeliest first; empty if it has no port.
    """

    transport: Transport
    host: str
    name: str = ""
    port: int = 0
    lacks: str = ""
    addresses: tuple[str, ...] = ()

    def text(self) -> str:
        """Return it as text without spaces."""
        *fields, addresses = self
        return ",".join(quote(str(each), safe=":") for each in (*fields, *addresses))

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the endpoint that ``text`` encodes.

        Raises:
            WireError: no rank wrote it.
        """
        try:
            transport, host, name, port, lacks, *addresses = map(unquote, text.split(","))
            ways = tuple(str(ip_address(each)) for each in addresses)
            found = cls(TRANSPORTS[TRANSPORTS.index(transport)], host, name, int(port), lacks, ways)
        except ValueError:
            raise damaged(text) from None
        is_named = not found.name or _NAME.fullmatch(found.name)
        if not is_named or not 0 <= found.port < 1 << 16 or bool(ways) != bool(found.port):
            raise damaged(text)
        return found


class Door:
    """Where other ranks reach this one while they connect; a context manager that closes it.

    Attributes:
        endpoint: what the others learn about it.
        listeners: sockets on which others call: one for this host, then one for other hosts.
    """

    def __init__(self, endpoint: Endpoint, listeners: tuple[socket.socket, ...] = ()) -> None:
        self.endpoint = endpoint
        self.listeners = listeners

    @classmethod
    def opened(
        cls, transport: Transport, addresses: Sequence[str], ports: Sequence[int] = ()
    ) -> Self:
        """Return a door that others can find; it lacks listeners that the system can't provide.

        Args:
            transport: what the user has chosen.
            addresses: this host's addresses for other hosts.
            ports: allowed ports for other hosts; any if empty.
        """
        endpoint = Endpoint(transport, socket.gethostname())
        if transport == "gloo":
            return cls(endpoint)
        if not hasattr(select, "epoll"):
            return cls(endpoint._replace(lacks="only Linux has what they need"))
        with contextlib.ExitStack() as undo:
            try:
                near = undo.enter_context(socket.socket(socket.AF_UNIX))
                endpoint = endpoint._replace(name=secrets.token_hex(16))
                near.bind(_unix_address(endpoint.name))
                near.listen(socket.SOMAXCONN)  # unknown processes wait there, too
                near.settimeout(0)
            except OSError as error:
                return cls(_without(endpoint._replace(name=""), error))
            listeners = [near]
            try:
                far = undo.enter_context(_listener(addresses, ports))
                listeners.append(far)
                endpoint = endpoint._replace(port=far.getsockname()[1], addresses=tuple(addresses))
            except OSError as error:
                endpoint = _without(endpoint, error)
            undo.pop_all()
        return cls(endpoint, tuple(listeners))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.listeners:
            each.close()


def _without(endpoint: Endpoint, error: OSError) -> Endpoint:
    """Return an endpoint that lacks something; if this process is at fault, all must raise."""
    is_own = error.errno in OWN_FAULTS or error.errno == errno.EADDRINUSE
    return endpoint._replace(
        transport="streams" if is_own else endpoint.transport, lacks=error.strerror or str(error)
    )


def _listener(addresses: Sequence[str], ports: Sequence[int]) -> socket.socket:
    """Return a listener for other hosts, on all of these addresses and one of these ports.

    Raises:
        OSError: there is no such address, or no such port is free.
    """
    if not addresses:
        raise OSError(0, "GLOO_SOCKET_IFNAME names no network interface that reaches other hosts")
    families = {socket.AF_INET6 if ":" in each else socket.AF_INET for each in addresses}
    family = socket.AF_INET6 if socket.AF_INET6 in families else socket.AF_INET
    anywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"  # noqa: S104  # see ``Doors.accept``
    at = addresses[0] if len(addresses) == 1 else anywhere
    for port in random.sample(ports, len(ports)) or [0]:
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family))
            _prepare(listener)  # accepted sockets inherit these options
            # Connections accepted by an earlier listener on this port may not have ended yet.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                is_alone = socket.AF_INET not in families
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, is_alone)
            with contextlib.suppress(OSError):  # a sandbox may not have it
                # A silent caller occupies no descriptor, and accepted ranks have sent a handshake.
                wait = socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _FIRST_BYTES_WITHIN_SECONDS
                listener.setsockopt(*wait)
            try:
                listener.bind((at, port))
                listener.listen(socket.SOMAXCONN)
            except OSError as error:
                if error.errno == errno.EADDRINUSE and ports:
                    continue
                raise
            listener.settimeout(0)
            undo.pop_all()
            return listener
    raise OSError(
        errno.EADDRINUSE, f"none of the ports {ports[0]}-{ports[-1]} is free (OBJCOMM_PORTS)"
    )


def _prepare(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # From the beginning, so that ``sockets.notice_outages`` recognizes it as objcomm's.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def own_addresses(store_port: int) -> list[str]:
    """Return the addresses of this host for ranks on other hosts, the likeliest first.

    These are the addresses of the interface that ``GLOO_SOCKET_IFNAME`` names, or else of all
    interfaces that are up, starting with the one through which this process reaches the store.
    Loopback leads to no other host, so it is used only on a machine that has nothing else.

    Args:
        store_port: the port of the store to which this process is connected; 0 if it has none.
    """
    variable = os.environ.get("GLOO_SOCKET_IFNAME", "")
    interfaces = interface_addresses()
    if len(variable) > 1:  # as torch reads it
        named = interfaces.get(variable.partition(",")[0], [])
        own = [each for each in named if ip_address(each).is_loopback]
        return (_leading_elsewhere(named) or own)[:1]
    towards = addresses_towards(store_port) if store_port else set()
    found = _leading_elsewhere(each for of in interfaces.values() for each in of)
    ways = sorted(found, key=lambda each: each not in towards)
    return ways[:_ADDRESSES_MAX] or ["127.0.0.1"]


def _leading_elsewhere(addresses: Iterable[str]) -> list[str]:
    """Return the addresses at which other hosts may reach this one: IPv4 first, link-local last."""
    found = [ip_address(each) for each in dict.fromkeys(addresses)]
    # To use a link-local IPv6 address, another host must know which of its own interfaces leads
    # there.
    ways = [
        each
        for each in found
        if not each.is_loopback and not (each.version == 6 and each.is_link_local)  # noqa: PLR2004  # IPv6
    ]
    return [str(each) for each in sorted(ways, key=lambda each: (each.is_link_local, each.version))]


def _unix_address(name: str) -> str:
    """Return the address of an abstract socket, which disappears with its process."""
    return f"\0objcomm/{name}"


class Handshakes:
    """Computes the handshakes of pairs of ranks.

    Attributes:
        nbytes: length of a handshake.
    """

    nbytes = _HANDSHAKE.size

    def __init__(self, session: str, secret: bytes | None) -> None:
        """Derive the keys.

        Args:
            session: session of the meeting.
            secret: secret of the user's key, if there is one.
        """
        self._session = bytes.fromhex(session)
        self._key = hashlib.blake2b(
            self._session, key=secret or b"", person=b"objcomm word"
        ).digest()

    def of(self, rank: int, to: int, where: str = "") -> bytes:
        """Return what one rank sends to another.

        Args:
            rank: the sender.
            to: the receiver.
            where: the address that was called, as both ranks know it.
        """
        pair = f"{rank} to {to} at {where}".encode()
        proofs = [
            hashlib.blake2b(pair, key=each, digest_size=_PROOF_NBYTES).digest()
            for each in (self._session, self._key)
        ]
        return _HANDSHAKE.pack(rank, *proofs)

    def check(self, received: bytes, rank: int, to: int, where: str = "") -> bool:
        """Return whether this is what one rank sends to another, see ``of``.

        Raises:
            OtherKeyError: a rank of the meeting sent it, but has a different key.
        """
        expected = self.of(rank, to, where)
        if secrets.compare_digest(received, expected):
            return True
        if secrets.compare_digest(received[:-_PROOF_NBYTES], expected[:-_PROOF_NBYTES]):
            raise OtherKeyError(rank)
        return False


class Call(NamedTuple):
    """A connection that this rank has begun.

    Attributes:
        socket: this rank's end.
        unsent: the part of this rank's handshake that has yet to be sent.
        where: the address that was called; empty for a Unix socket.
    """

    socket: socket.socket
    unsent: bytes
    where: str


class Doors:
    """How all ranks reach each other at any time, and the handshakes that they send first.

    Attributes:
        listeners: sockets on which other ranks call.
        handshake_nbytes: length of a handshake.
        rank: this rank.
        others: all other ranks, in order.
        hosts: host number of each rank, including this one.
        on_refused: called with the reason when a caller that is not a rank is rejected.
    """

    handshake_nbytes = _HANDSHAKE.size

    def __init__(  # noqa: PLR0917  # facts about all ranks
        self,
        door: Door,
        endpoints: Mapping[int, Endpoint],
        hosts: Mapping[int, int],
        rank: int,
        handshakes: Handshakes,
        on_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Collect how each rank is reached.

        Args:
            door: this rank's.
            endpoints: of all ranks.
            hosts: host number of each rank.
            rank: this rank.
            handshakes: computes the handshakes.
            on_refused: called with the reason when a caller that is not a rank is rejected.
        """
        near, *far = door.listeners
        is_far = [host != hosts[rank] for each, host in hosts.items() if each != rank]
        self.listeners = [near] * (not all(is_far)) + far * any(is_far)
        self.rank = rank
        self.hosts = dict(hosts)
        self.others = sorted(each for each in endpoints if each != rank)
        self.on_refused = on_refused
        self._endpoints = dict(endpoints)
        # Another host may share an address with this one; a call to that would reach this host.
        interfaces = interface_addresses() if any(is_far) else {}
        own = {each for of in interfaces.values() for each in of}
        self._ways = {
            peer: [each for each in endpoint.addresses if each not in own]
            or list(endpoint.addresses)
            for peer, endpoint in endpoints.items()
        }
        self._handshakes = handshakes

    def is_near(self, peer: int) -> bool:
        """Return whether a rank is on this host."""
        return self.hosts[peer] == self.hosts[self.rank]

    def ways_to(self, peer: int) -> int:
        """Return at how many addresses a rank may be reached."""
        return 1 if self.is_near(peer) else len(self._ways[peer])

    def call(self, peer: int, way: int = 0) -> Call:
        """Connect to a rank on this host and send the handshake, or begin to connect elsewhere.

        Args:
            peer: the rank to call.
            way: index of its address, modulo their number.

        Raises:
            BlockingIOError: too many callers are waiting there; try again.
            ConnectionRefusedError: it has stopped listening.
            OSError: this process can't connect, or no network leads there.
        """
        with contextlib.ExitStack() as undo:
            if self.is_near(peer):
                end = undo.enter_context(socket.socket(socket.AF_UNIX))
                end.settimeout(0)
                end.connect(_unix_address(self._endpoints[peer].name))
                if _uid_of(end) != os.geteuid():
                    raise PermissionError(errno.EACCES, f"it runs as user {_uid_of(end)}")
                end.sendall(self.handshake_to(peer))
                unsent, where = b"", ""
            else:
                port, ways = self._endpoints[peer].port, self._ways[peer]
                address = ways[way % len(ways)]
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                end = undo.enter_context(socket.socket(family))
                end.settimeout(0)
                _prepare(end)
                failed = end.connect_ex((address, port))
                if failed not in {0, errno.EINPROGRESS}:
                    raise OSError(failed, os.strerror(failed), f"{address}:{port}")
                where = f"{address} {port}"
                unsent = self.handshake_to(peer, where)
            undo.pop_all()
        return Call(end, unsent, where)

    def accept(self, listener: socket.socket) -> Iterator[socket.socket]:
        """Yield the callers that wait, at most 64 of them, so that other work gets its turn.

        Any process of this host may call, and over TCP any that reaches it. A process of another
        user is rejected immediately, so that it occupies no descriptor of this process.

        Raises:
            OSError: this process can't accept any.
        """
        for _ in range(_TURN):
            if listener.fileno() < 0:  # closed because of the previous caller
                return
            try:
                end, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # it has left already
                continue
            if end.family != socket.AF_UNIX or _uid_of(end) == os.geteuid():
                end.setblocking(False)  # noqa: FBT003  # its only parameter
                yield end
            else:
                self.on_refused(f"a process of user {_uid_of(end)}")
                end.close()

    def caller(self, end: socket.socket, received: bytes) -> int | None:
        """Return which rank has called and sent this; None if it is not a rank.

        Raises:
            OtherKeyError: it is a rank, but has a different key.
        """
        peer = _HANDSHAKE.unpack(received)[0]
        is_far = end.family != socket.AF_UNIX
        is_there = peer in self.others and is_far != self.is_near(peer)
        if is_there and self._handshakes.check(received, peer, self.rank, called_at(end)):
            return int(peer)
        self.on_refused("a process that was not there when the ranks met")
        return None

    def has_answered(self, peer: int, received: bytes, where: str) -> bool:
        """Return whether ``peer`` itself has answered a call.

        Raises:
            OtherKeyError: it has, but has a different key.
        """
        return self._handshakes.check(received, peer, self.rank, where)

    def handshake_from(self, peer: int, where: str = "") -> bytes:
        """Return a rank's handshake to this one; only ranks that have met can compute it.

        Args:
            peer: the other rank.
            where: the address that was called, its own or this rank's.
        """
        return self._handshakes.of(peer, self.rank, where)

    def handshake_to(self, peer: int, where: str = "") -> bytes:
        """Return this rank's handshake to another; see ``handshake_from``."""
        return self._handshakes.of(self.rank, peer, where)


def called_at(end: socket.socket) -> str:
    """Return this host's address that an accepted caller has called; empty for a Unix socket."""
    if end.family == socket.AF_UNIX:
        return ""
    address, port, *_ = end.getsockname()
    return f"{ip_address(address.removeprefix('::ffff:'))} {port}"


def _uid_of(end: socket.socket) -> int:
    """Return the user of the process at the other end, on this host."""
    _, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
