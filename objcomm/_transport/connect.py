"""Joins the ranks of a group by the best link there is for them.

Ranks that share a host get the link of one host, if the system lets every one of them connect to
every other one; all others get Gloo's.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import hashlib
import os
import secrets
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Self

import torch.distributed as dist

from objcomm._transport.gloo import GlooLink, keys_left
from objcomm._transport.link import PEER_LOST, LinkClosed
from objcomm._transport.local import LocalLink
from objcomm._transport.mixed import MixedLink
from objcomm._transport.rendezvous import NO_DOOR, GivenUpError, forget, meet
from objcomm._world import CONNECT_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from objcomm._transport.link import Connections, Deadline
    from objcomm._transport.rendezvous import MeetingState


# How often a rank that waits for connections looks whether another one has none.
_LOOK_SECONDS = 0.2

# So many ranks of a host are all connected when they meet. More only make a tree then, which shows
# that all can be; two others are connected when one of them first sends to the other, or waits for
# it. To connect all of 64 ranks took 2 cores 0.5 s.
_AT_ONCE_MAX = 16

# A rank's word: which it is, and a proof.
_PROOF_NBYTES = 32
_WORD = struct.Struct(f"<I{_PROOF_NBYTES}s")
# What it says when all others have said theirs.
_COMPLETE = b"!"


def connect(
    store: dist.Store,
    rank: int,
    members: tuple[int, ...],
    deadline: Deadline,
    progress: MeetingState,
) -> Connections:
    """Meet the other ranks, and connect to each; every member must call this.

    May block in C++ up to the limit.

    Args:
        store: a connection to it that no other thread uses, with a prefix that is theirs alone.
        rank: this one, within the group.
        members: those that it joins, as ranks within the group.
        deadline: how long to wait.
        progress: tells others how far it has come.

    Raises:
        GivenUpError: ``progress`` was ended from outside.
        LeftError: as ``meet``.
        WireError: as ``meet``.
        DistNetworkError: the store is gone.
        LinkClosed: another rank was lost, or does not answer.
        LinkError: this process can't connect to any.
    """
    place, size = members.index(rank), len(members)
    with contextlib.ExitStack() as open_doors:
        door = _Door.opened(size) if deadline.settings.is_local else None
        if door is not None:
            open_doors.enter_context(door)
        met = meet(store, place, size, progress, NO_DOOR if door is None else door.name)
        named = dist.PrefixStore(f"objcomm/{progress.nonce}", store)
        local = None
        if door is not None:
            beside = {
                members[each]: met.doors[each]
                for each, host in enumerate(met.hosts)
                if host == met.hosts[place]
            }
            if len(beside) > 1 and NO_DOOR not in beside.values():
                failed = _failed(met.hosts[place])
                doors = _Doors(door, beside, rank, progress)
                local = _joined(_Joining(doors, named, failed, deadline, progress))
    if local is not None and local.size == size:
        forget(store, progress.nonce, size, ())
        return local
    try:
        far = GlooLink(named, rank, members, met.hosts, deadline)
    except BaseException:
        if local is not None:
            local.abort()
        raise
    left = [*map(_failed, set(met.hosts)), *keys_left(size)]
    forget(store, progress.nonce, size, [f"objcomm/{progress.nonce}/{key}" for key in left])
    return far if local is None else MixedLink(local, far)


def _failed(host: int) -> str:
    """The key that says that ranks of a host can't be connected there."""
    return f"not local/{host}"


def _joined(joining: _Joining) -> LocalLink | None:
    """The link between ranks of this host; None if some two can't be connected."""
    try:
        joining.connect()
        link = joining.link()
        joining.complete(link)
    except OSError:
        joining.give_up()
        return None
    except BaseException:
        joining.close()
        raise
    return link


class _Door:
    """Where ranks of this host reach this one while they connect; a context that closes it.

    Attributes:
        name: what the others are told of it.
        listener: where they come.
    """

    def __init__(self, listener: socket.socket, name: str) -> None:
        self.listener = listener
        self.name = name

    @classmethod
    def opened(cls, size: int) -> _Door | None:
        """One for so many ranks; None where the system gives none, or is not Linux."""
        if not hasattr(select, "epoll"):
            return None
        name = secrets.token_hex(16)
        try:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(_address(name))
            listener.listen(size)
        except OSError:
            return None
        listener.settimeout(0)
        return cls(listener, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()


def _address(door: str) -> str:
    """Of a socket that has no file, and is gone with its process."""
    return f"\0objcomm/{door}"


class _Doors:
    """Those of all ranks of this host, and the words that they say there; see ``local.Doors``.

    Attributes:
        listener: where the others call.
        word_nbytes: how long a word is.
        rank: this one.
        others: all other ranks of this host, in order.
    """

    word_nbytes = _WORD.size

    def __init__(
        self, door: _Door, doors: Mapping[int, str], rank: int, progress: MeetingState
    ) -> None:
        """Begin.

        Args:
            door: this rank's.
            doors: of all ranks of this host.
            rank: this one.
            progress: has the session.
        """
        self.listener = door.listener
        self.rank = rank
        self.others = sorted(each for each in doors if each != rank)
        self._doors = doors
        # Not the progress itself, which may hold a mesh: that has the link, which has this.
        self._key = bytes.fromhex(progress.session)

    def call(self, peer: int, seconds: float = 0.0) -> socket.socket:
        """Connect to a rank, and say this rank's word.

        Args:
            peer: whose door.
            seconds: for how long it may be too busy.

        Raises:
            OSError: this process can't.
        """
        end = socket.socket(socket.AF_UNIX)
        with contextlib.ExitStack() as in_vain:
            in_vain.callback(end.close)
            end.settimeout(seconds)
            end.connect(_address(self._doors[peer]))
            if not _is_ours(end):
                raise PermissionError  # another user's process has answered
            end.sendall(self.word_to(peer))
            in_vain.pop_all()
        return end

    def caller(self, end: socket.socket, said: bytes) -> int | None:
        """Which rank has called and said this; None if it was a stranger."""
        peer, _ = _WORD.unpack(said)
        is_rank = _is_ours(end) and peer in self._doors and peer != self.rank
        return peer if is_rank and secrets.compare_digest(said, self.word_from(peer)) else None

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


class _Guest:
    """A connection of which it is not known yet that another rank is at its end.

    Attributes:
        socket: its own end.
        rank: the other one's, or -1 for who has come by itself and has not said it.
        said: what has come of it.
    """

    def __init__(self, end: socket.socket, rank: int) -> None:
        self.socket = end
        self.rank = rank
        self.said = b""


class _Joining:
    """One rank's way to a socket to each neighbour; a pair's later rank connects to the other.

    Neighbours are all ranks of the host, or those of this one in a tree.
    """

    def __init__(
        self,
        doors: _Doors,
        store: dist.Store,
        failed: str,
        deadline: Deadline,
        progress: MeetingState,
    ) -> None:
        """Begin.

        Args:
            doors: of all ranks of this host.
            store: where a rank says that it can't.
            failed: the key under which it does.
            deadline: how long to wait.
            progress: tells whether to.
        """
        self._doors = doors
        self._store = store
        self._failed = failed
        # Half of it: ranks of other hosts wait meanwhile for this one to connect over Gloo.
        limit = min(deadline.left(), CONNECT_MAX) / 2
        self._looked_at = time.monotonic()
        self._until = self._looked_at + limit.total_seconds()
        self._progress = progress
        self._guests: dict[int, _Guest] = {}
        self._joined: dict[int, _Guest] = {}
        self._events = select.poll()
        if len(doors.others) < _AT_ONCE_MAX:
            self._neighbours = doors.others
            self._rounds = [(doors.others, doors.others)]
        else:
            parents, children = _in_a_tree(doors)
            self._neighbours = [*parents, *children]
            self._rounds = [([], children), (parents, parents), (children, [])]

    def connect(self) -> None:
        """Return when there is a socket to each neighbour; others may not have all of theirs.

        Raises:
            OSError: some two ranks can't be connected.
            GivenUpError: nobody waits for them any more.
        """
        for peer in self._neighbours:
            if peer < self._doors.rank:
                end = self._doors.call(peer, max(0.1, self._until - time.monotonic()))
                self._add(end, peer)
        self._events.register(self._doors.listener, select.POLLIN)
        while len(self._joined) < len(self._neighbours):
            self._look()

    def link(self) -> LocalLink:
        """What it takes to use the sockets, before anybody relies on it.

        Raises:
            OSError: this process has no room for it.
        """
        doors, joined = self._doors, sorted(self._joined.items())
        sockets = {peer: each.socket for peer, each in joined}
        if len(sockets) == len(doors.others):
            return LocalLink(doors.rank, sockets)
        return LocalLink(doors.rank, sockets, doors.others, doors, doors.listener.dup())

    def complete(self, link: LocalLink) -> None:
        """Return when all ranks have all of theirs, and what it takes to use them.

        Who can't says nothing and closes its sockets, so that no rank gets the word of all. Who has
        said it can't take it back. In a tree each says it to its parent for all below, and the
        first rank to all.

        Args:
            link: what this rank will use; gets who has called meanwhile.

        Raises:
            OSError: another rank could not, so that no rank can.
            LinkClosed: another rank said nothing.
            GivenUpError: nobody waits for them any more.
        """
        try:
            for told, awaited in self._rounds:
                for peer in told:
                    self._joined[peer].socket.sendall(_COMPLETE)
                while any(len(self._joined[peer].said) == _WORD.size for peer in awaited):
                    self._look()
        except TimeoutError as error:
            raise LinkClosed(f"{PEER_LOST} (it did not connect in time)") from error
        for each in self._guests.values():
            if each.rank in self._joined:
                continue
            if len(self._neighbours) < len(self._doors.others):  # it may want to use the link
                link.hear(each.socket, each.said)
            else:  # a stranger
                each.socket.close()

    def give_up(self) -> None:
        """Let the others know that no rank gets all of its connections."""
        self.close()
        self._store.set(self._failed, "")

    def close(self) -> None:
        """Close all that was opened."""
        for each in [*self._guests.values(), *self._joined.values()]:
            each.socket.close()

    def _add(self, end: socket.socket, peer: int) -> None:
        self._guests[end.fileno()] = _Guest(end, peer)
        self._events.register(end, select.POLLIN)

    def _look(self) -> None:
        """Take in what has come, or see that it never will."""
        events = self._events.poll(_LOOK_SECONDS * 1000)
        now = time.monotonic()
        for descriptor, _ in events:
            if descriptor == self._doors.listener.fileno():
                self._let_in()
            else:
                self._hear(self._guests[descriptor])
        if self._progress.is_over:
            raise GivenUpError
        if now > self._looked_at + _LOOK_SECONDS:
            self._looked_at = now
            if self._store.check([self._failed]):
                raise ConnectionAbortedError  # another rank could not
        if not events and now > self._until:
            raise TimeoutError

    def _let_in(self) -> None:
        with contextlib.suppress(BlockingIOError):
            end, _ = self._doors.listener.accept()
            if _is_ours(end):
                self._add(end, -1)
            else:
                end.close()

    def _hear(self, guest: _Guest) -> None:
        # Not a byte more than it says now: what follows is the link's.
        due = _WORD.size + len(_COMPLETE) if guest.rank in self._joined else _WORD.size
        if len(guest.said) >= due:
            self._events.unregister(guest.socket)
            return
        came = guest.socket.recv(due - len(guest.said))
        guest.said += came
        if came and len(guest.said) < due:
            return
        if guest.rank in self._joined:
            if not came:
                raise ConnectionAbortedError  # it has given up
            self._events.unregister(guest.socket)
        elif guest.rank >= 0:
            if not came or not secrets.compare_digest(
                guest.said, self._doors.word_from(guest.rank)
            ):
                raise ConnectionAbortedError  # it does not answer, or wrongly
            self._joined[guest.rank] = guest
        elif not came or not self._admits(guest):  # a stranger
            self._events.unregister(guest.socket)
            del self._guests[guest.socket.fileno()]
            guest.socket.close()

    def _admits(self, guest: _Guest) -> bool:
        """Whether a rank of this meeting has called; a neighbour gets an answer."""
        peer = self._doors.caller(guest.socket, guest.said)
        if peer is None or peer in self._joined:
            return False
        if peer not in self._neighbours:  # for it all have met already
            self._events.unregister(guest.socket)
            return True
        if peer < self._doors.rank:
            return False
        guest.rank = peer
        self._joined[peer] = guest
        guest.socket.sendall(self._doors.word_to(peer))
        return True


def _in_a_tree(doors: _Doors) -> tuple[list[int], list[int]]:
    """The neighbours of a rank in a binomial tree over all of its host: its parent, its children.

    They are those to which small messages go from the first rank, see ``topology.binomial``.
    """
    ranks = sorted([doors.rank, *doors.others])
    place = ranks.index(doors.rank)
    lowest = place & -place if place else len(ranks)
    steps = [1 << bit for bit in range(len(ranks).bit_length())]
    children = [
        ranks[place + step] for step in steps if step < lowest and place + step < len(ranks)
    ]
    return [ranks[place - lowest]] if place else [], children


def _is_ours(end: socket.socket) -> bool:
    """Whether a process of this one's user is at the other end."""
    _, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())
