"""Where ranks listen for each other, and what they say first to prove who they are.

Ranks of one host find each other by names in no file, and the kernel says whose process is there.
Other hosts reach a rank over TCP, at one address of its own. Either way both ends say a *word*,
which only who has met the others can make: it has the meeting's session in it, which stands
nowhere.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import errno
import hashlib
import os
import re
import secrets
import select
import socket
import struct
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple, Self

from objcomm._environment import interface_addresses
from objcomm._transport.rendezvous import damaged
from objcomm._transport.sockets import addresses_towards
from objcomm._world import bare

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist

    from objcomm._transport.rendezvous import MeetingState

_NAME = re.compile("[0-9a-f]{32}")
_PROOF_NBYTES = 32
_WORD = struct.Struct(f"<I{_PROOF_NBYTES}s")
# Packets to here are never sent: it is for documentation (RFC 5737). But a route leads there.
_ELSEWHERE = ("192.0.2.1", 9)


class Place(NamedTuple):
    """Where a rank can be reached; what others are told of it is one word.

    Attributes:
        name: of its Unix socket.
        address: for other hosts; empty if there is none.
        port: likewise; 0 if there is none.
    """

    name: str
    address: str = ""
    port: int = 0

    def told(self) -> str:
        """As one word."""
        return f"{self.name},{self.address},{self.port}"

    @classmethod
    def of(cls, told: str) -> Self:
        """The inverse of ``told``.

        Raises:
            WireError: no rank wrote it.
        """
        try:
            name, address, port = told.split(",")
            found = cls(name, str(ip_address(address)) if address else "", int(port))
        except ValueError:
            found = cls("", "", -1)
        if not _NAME.fullmatch(found.name) or not 0 <= found.port < 1 << 16:
            raise damaged(told)
        return found


class Door:
    """Where other ranks reach this one while they connect; a context that closes it.

    Attributes:
        place: what the others are told of it.
        listeners: where they come: those of this host to the first, those of others to the second.
    """

    def __init__(self, place: Place, listeners: tuple[socket.socket, ...]) -> None:
        self.place = place
        self.listeners = listeners

    @classmethod
    def opened(cls, size: int, address: str) -> Self | None:
        """One for so many ranks; None where the system gives none, or is not Linux.

        Args:
            size: how many.
            address: for other hosts; empty for none.
        """
        if not hasattr(select, "epoll"):
            return None
        with contextlib.ExitStack() as in_vain, contextlib.suppress(OSError):
            near = in_vain.enter_context(socket.socket(socket.AF_UNIX))
            place = Place(secrets.token_hex(16))
            near.bind(_unix_address(place.name))
            near.listen(size)
            far = _listener(address, size) if address else None
            if far is not None:
                place = place._replace(address=address, port=far.getsockname()[1])
            listeners = (near,) if far is None else (near, far)
            for each in listeners:
                each.settimeout(0)
            in_vain.pop_all()
            return cls(place, listeners)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.listeners:
            each.close()


def _listener(address: str, size: int) -> socket.socket | None:
    with contextlib.ExitStack() as in_vain, contextlib.suppress(OSError):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = in_vain.enter_context(socket.socket(family))
        _prepare(listener)  # whom it lets in has the same options
        listener.bind((address, 0))
        listener.listen(size)
        in_vain.pop_all()
        return listener
    return None


def _prepare(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # From its beginning: so it is known for one of objcomm's, see ``sockets.notice_outages``.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def own_address(store: dist.Store) -> str:
    """The address of this host that ranks on others are told; empty where the user's is not there.

    That of the interface that ``GLOO_SOCKET_IFNAME`` names; else that by which this process reaches
    the store, or, where the store is this host's own, by which the host reaches other networks.

    Args:
        store: where the ranks meet.
    """
    variable = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(variable) > 1:  # as torch reads it
        named = variable.partition(",")[0]
        return next(filter(_leads_elsewhere, interface_addresses().get(named, [])), "")
    port = getattr(bare(store), "port", 0)
    for address in sorted(addresses_towards(port)) if port else ():
        if _leads_elsewhere(address) and not ip_address(address).is_loopback:
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect(_ELSEWHERE)
        return str(asker.getsockname()[0])
    return "127.0.0.1"


def _leads_elsewhere(address: str) -> bool:
    """Whether it stands for this host beyond one cable."""
    return not ip_address(address).is_link_local


def _unix_address(name: str) -> str:
    """Of a socket that has no file, and is gone with its process."""
    return f"\0objcomm/{name}"


class Doors:
    """Those of all ranks: how they reach each other at any time, and the words that they say first.

    Attributes:
        listeners: where the others call.
        word_nbytes: how long a word is.
        rank: this one.
        others: all other ranks, in order.
        hosts: of each rank, this one's too, as a number.
    """

    word_nbytes = _WORD.size

    def __init__(
        self,
        door: Door,
        places: Mapping[int, Place],
        hosts: Mapping[int, int],
        rank: int,
        meeting: MeetingState,
    ) -> None:
        """Begin.

        Args:
            door: this rank's.
            places: of all ranks.
            hosts: likewise.
            rank: this one.
            meeting: has the session.
        """
        near, *far = door.listeners
        is_far = [host != hosts[rank] for each, host in hosts.items() if each != rank]
        self.listeners = [near] * (not all(is_far)) + far * any(is_far)
        self.rank = rank
        self.hosts = dict(hosts)
        self.others = sorted(each for each in places if each != rank)
        self._places = dict(places)
        # Not the meeting itself, which may hold a mesh: that has the link, which has this.
        self._key = bytes.fromhex(meeting.session)

    def is_near(self, peer: int) -> bool:
        """Whether a rank is on this host."""
        return self.hosts[peer] == self.hosts[self.rank]

    def call(self, peer: int, seconds: float = 0.0) -> tuple[socket.socket, bytes]:
        """Connect to a rank of this host and say this rank's word, or begin to connect to another.

        Args:
            peer: whose door.
            seconds: for how long a rank of this host may be too busy.

        Returns:
            The socket, and what has yet to be said there of this rank's word.

        Raises:
            ConnectionRefusedError: it has closed its door.
            OSError: this process can't, or no network leads there.
        """
        with contextlib.ExitStack() as in_vain:
            if self.is_near(peer):
                end = in_vain.enter_context(socket.socket(socket.AF_UNIX))
                end.settimeout(seconds)
                end.connect(_unix_address(self._places[peer].name))
                if not _is_ours(end):
                    raise PermissionError  # another user's process has answered
                end.sendall(self.word_to(peer))
                left = b""
            else:
                _, address, port = self._places[peer]
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                end = in_vain.enter_context(socket.socket(family))
                end.settimeout(0)
                _prepare(end)
                failed = end.connect_ex((address, port))
                if failed not in {0, errno.EINPROGRESS}:
                    raise OSError(failed, os.strerror(failed), f"{address}:{port}")
                left = self.word_to(peer)
            in_vain.pop_all()
        return end, left

    def caller(self, end: socket.socket, said: bytes) -> int | None:
        """Which rank has called and said this; None if it was a stranger."""
        peer, _ = _WORD.unpack(said)
        if peer not in self._places or peer == self.rank:
            return None
        is_near = end.family == socket.AF_UNIX
        if is_near != self.is_near(peer) or not secrets.compare_digest(said, self.word_from(peer)):
            return None
        return peer if not is_near or _is_ours(end) else None

    def word_from(self, peer: int) -> bytes:
        """What a rank says to this one: only who has met the others knows the session."""
        return self._word(peer, self.rank)

    def word_to(self, peer: int) -> bytes:
        """What this one says to a rank."""
        return self._word(self.rank, peer)

    def _word(self, rank: int, to: int) -> bytes:
        proof = hashlib.blake2b(
            f"{rank} to {to}".encode(), key=self._key, digest_size=_PROOF_NBYTES
        )
        return _WORD.pack(rank, proof.digest())


def _is_ours(end: socket.socket) -> bool:
    """Whether a process of this one's user is at the other end, on this host."""
    _, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())
