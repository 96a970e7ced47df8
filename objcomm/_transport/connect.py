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
                each: met.doors[each]
                for each, host in enumerate(met.hosts)
                if host == met.hosts[place]
            }
            if len(beside) > 1 and NO_DOOR not in beside.values():
                failed = _failed(met.hosts[place])
                joining = _Joining(door, beside, place, named, failed, deadline, progress)
                local = _joined(joining, rank, members)
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


def _joined(joining: _Joining, rank: int, members: tuple[int, ...]) -> LocalLink | None:
    """The link between ranks of this host; None if some two can't be connected."""
    try:
        sockets = joining.sockets()
        link = LocalLink(rank, {members[each]: end for each, end in sockets.items()})
        joining.complete()
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


class _Guest:
    """A connection of which it is not known yet that another rank is at its end.

    Attributes:
        socket: its own end.
        place: the rank's, or -1 for who has come by itself and has not said it.
        said: what has come of it.
    """

    def __init__(self, end: socket.socket, place: int) -> None:
        self.socket = end
        self.place = place
        self.said = b""


class _Joining:
    """One rank's way to a socket to each other one; a pair's later rank connects to the other."""

    def __init__(  # noqa: PLR0917  # one caller, and nearly each is of another type
        self,
        door: _Door,
        doors: Mapping[int, str],
        place: int,
        store: dist.Store,
        failed: str,
        deadline: Deadline,
        progress: MeetingState,
    ) -> None:
        """Begin.

        Args:
            door: this rank's.
            doors: of all ranks of this host, by their places.
            place: this one's.
            store: where a rank says that it can't.
            failed: the key under which it does.
            deadline: how long to wait.
            progress: tells whether to.
        """
        self._door = door
        self._doors = doors
        self._place = place
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

    def sockets(self) -> dict[int, socket.socket]:
        """A socket to each other rank, by its place; not all of them may have all of theirs.

        Raises:
            OSError: some two ranks can't be connected.
            GivenUpError: nobody waits for them any more.
        """
        for place in self._doors:
            if place < self._place:
                self._call(place)
        self._events.register(self._door.listener, select.POLLIN)
        while len(self._joined) < len(self._doors) - 1:
            self._look()
        return {place: each.socket for place, each in sorted(self._joined.items())}

    def complete(self) -> None:
        """Return when all ranks have all of theirs, and what it takes to use them.

        Who can't says nothing and closes its sockets, so that no rank gets the word of all. Who has
        said it can't take it back.

        Raises:
            OSError: another rank could not, so that no rank can.
            LinkClosed: another rank said nothing.
            GivenUpError: nobody waits for them any more.
        """
        for each in self._joined.values():
            each.socket.sendall(_COMPLETE)
        try:
            while any(len(each.said) == _WORD.size for each in self._joined.values()):
                self._look()
        except TimeoutError as error:
            raise LinkClosed(f"{PEER_LOST} (it did not connect in time)") from error
        for each in self._guests.values():  # strangers
            if each.place not in self._joined:
                each.socket.close()

    def give_up(self) -> None:
        """Let the others know that no rank gets all of its connections."""
        self.close()
        self._store.set(self._failed, "")

    def close(self) -> None:
        """Close all that was opened."""
        for each in [*self._guests.values(), *self._joined.values()]:
            each.socket.close()

    def _call(self, place: int) -> None:
        end = socket.socket(socket.AF_UNIX)
        self._add(end, place)
        end.settimeout(max(0.1, self._until - time.monotonic()))
        end.connect(_address(self._doors[place]))
        if not _is_ours(end):
            raise PermissionError  # another user's process has answered
        end.sendall(self._word(self._place, place))

    def _add(self, end: socket.socket, place: int) -> None:
        self._guests[end.fileno()] = _Guest(end, place)
        self._events.register(end, select.POLLIN)

    def _look(self) -> None:
        """Take in what has come, or see that it never will."""
        events = self._events.poll(_LOOK_SECONDS * 1000)
        now = time.monotonic()
        for descriptor, _ in events:
            if descriptor == self._door.listener.fileno():
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
            end, _ = self._door.listener.accept()
            if _is_ours(end):
                self._add(end, -1)
            else:
                end.close()

    def _hear(self, guest: _Guest) -> None:
        # Not a byte more than it says now: what follows is the link's.
        due = _WORD.size + len(_COMPLETE) if guest.place in self._joined else _WORD.size
        if len(guest.said) >= due:
            self._events.unregister(guest.socket)
            return
        came = guest.socket.recv(due - len(guest.said))
        guest.said += came
        if came and len(guest.said) < due:
            return
        if guest.place in self._joined:
            if not came:
                raise ConnectionAbortedError  # it has given up
            self._events.unregister(guest.socket)
        elif came and self._is_right(guest):
            self._joined[guest.place] = guest
        elif guest.place >= 0:
            raise ConnectionAbortedError  # it does not answer, or wrongly
        else:  # a stranger
            self._events.unregister(guest.socket)
            del self._guests[guest.socket.fileno()]
            guest.socket.close()

    def _is_right(self, guest: _Guest) -> bool:
        """Whether a rank of this meeting has said its word; one that has come gets an answer."""
        place, _ = _WORD.unpack(guest.said)
        is_caller = guest.place < 0
        is_wanted = place > self._place if is_caller else place == guest.place
        if not is_wanted or place not in self._doors or place in self._joined:
            return False
        if not secrets.compare_digest(guest.said, self._word(place, self._place)):
            return False
        if is_caller:
            guest.place = place
            guest.socket.sendall(self._word(self._place, place))
        return True

    def _word(self, place: int, to: int) -> bytes:
        """What one rank says to another: only who has met the others knows the session."""
        said = f"{place} to {to}".encode()
        key = bytes.fromhex(self._progress.session)
        return _WORD.pack(place, hashlib.blake2b(said, key=key, digest_size=_PROOF_NBYTES).digest())


def _is_ours(end: socket.socket) -> bool:
    """Whether a process of this one's user is at the other end."""
    _, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())
