"""Joins the ranks of a group by the best link there is for them.

They get streams, if the systems of all of them let them connect so. Else Gloo connects them, unless
one of them has said that it wants streams or nothing; and then each two prove to each other who
they are before anything else is read.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import errno
import math
import os
import select
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from objcomm._codecs.buffers import empty, writable
from objcomm._environment import has_own_core
from objcomm._transport.doors import (
    OWN_FAULTS,
    Door,
    Doors,
    OtherKeyError,
    Place,
    Words,
    called_at,
    own_addresses,
)
from objcomm._transport.gloo import GlooLink, keys_left
from objcomm._transport.link import (
    HOST_LOST,
    PEER_LOST,
    WORD_TAG,
    Deadline,
    LinkClosed,
    LinkError,
    LinkRefused,
    LinkUnreachable,
)
from objcomm._transport.mover import SPIN_SECONDS
from objcomm._transport.rendezvous import GivenUpError, damaged, forget, meet
from objcomm._transport.sockets import is_outage
from objcomm._transport.store import pack_record, read, unpack_record
from objcomm._transport.streams import StreamLink
from objcomm._world import CONNECT_MAX
from objcomm.errors import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from objcomm._transport.link import Connections
    from objcomm._transport.rendezvous import MeetingState


# How often a rank that waits for connections looks whether another one has none. As long it waits
# for an answer from one address before it calls at the next, too, as browsers do.
_LOOK_SECONDS = 0.2
# The same, for ranks that are already connected.
_PAUSE_SECONDS = 0.02
_LONG_PAUSE_SECONDS = 0.25
# A rank calls again so soon after it was sent away to make room for others, or too many waited.
_AGAIN_SECONDS = 0.05
# How it learns that while it calls or says its word: too many wait, or it was sent away just now.
_BUSY = {errno.EAGAIN, errno.EPIPE, errno.ECONNRESET}

# So many ranks are all connected when they meet. More only make a tree then, which shows that all
# can be; two others are connected when one of them first sends to the other, or waits for it. To
# connect all of 64 ranks of a host took 2 cores 0.5 s.
_AT_ONCE_MAX = 16

# What a rank says after its word, when all others have said theirs.
_COMPLETE = b"!"
# Extra time for ranks that are already connected, so that one still connecting gives up first.
_SAID_LATER_SECONDS = 1.0
# So long each of Gloo's attempts may take to connect ranks of which two could not reach each other.
# Those two have tried already, and where they fail again nothing ends the attempts of the others.
_GLOO_SECONDS = 3.0
# The key that says that ranks can't be connected by streams, and why.
_FAILED = "no streams"
# The key that says which rank could not prove over another link that it is one.
_UNPROVEN = "unproven"
# Counts the ranks that another link has connected, where some could not reach each other.
_CONNECTED = "connected"

_REFUSED, _NO_ANSWER = "refused", "no answer"


class _Refusal(NamedTuple):
    """Why ranks can't be connected by streams, as the first rank that gave up tells the others.

    Attributes:
        rank: the one that tells.
        peers: to which it could not connect; none if the reason is its own.
        reason: in words.
        is_final: whether no other link must be tried.
    """

    rank: int
    peers: tuple[int, ...] = ()
    reason: str = ""
    is_final: bool = False

    def error(self, places: Mapping[int, Place]) -> LinkRefused | LinkUnreachable:
        """The same as an error, with the names of hosts."""
        hosts = [places[each].host for each in (self.rank, *self.peers)]
        if not self.peers:
            return LinkRefused(f"rank {self.rank} (host {hosts[0]}) {self.reason}", self.rank)
        if len(self.peers) == 1:
            pair = sorted(zip((self.rank, *self.peers), hosts, strict=True))
            (one, its), (other, others) = pair
            where = f"hosts {its} and {others}" if its != others else f"both on host {its}"
            reason = f"ranks {one} and {other} ({where}) can't connect to each other"
            reason += f" ({self.reason})"
        else:
            reason = f"rank {self.rank} (host {hosts[0]}) can't connect to "
            reason += f"{ranks_text(self.peers)} (hosts {', '.join(dict.fromkeys(hosts[1:]))}): "
            reason += self.reason
        return LinkUnreachable(reason, (self.rank, *(self.peers if len(self.peers) == 1 else ())))


class _PeerError(OSError):
    """What keeps this rank from a connection to one other.

    Attributes:
        peer: which.
        has_ended: whether the two were connected before.
        is_final: whether no other link must be tried.
    """

    def __init__(self, peer: int, error: OSError, *, has_ended: bool) -> None:
        told = error.strerror or _NO_ANSWER
        if isinstance(error, ConnectionRefusedError):
            told = _REFUSED
        elif is_outage(told):
            told = f"{_NO_ANSWER}: {told}"
        super().__init__(error.errno, told)
        self.peer = peer
        self.has_ended = has_ended
        self.is_final = isinstance(error, OtherKeyError)


def connect(  # noqa: PLR0917  # what the ranks are, and who is told
    store: dist.Store,
    rank: int,
    members: tuple[int, ...],
    deadline: Deadline,
    meeting: MeetingState,
    secret: bytes | None,
    on_met: Callable[[Sequence[int]], None],
    on_loss: Callable[[LinkError], None],
    on_refused: Callable[[str], None],
) -> Connections:
    """Meet the other ranks, and connect to each; every member must call this.

    May block in C++ up to the limit.

    Args:
        store: a connection to it that no other thread uses, with a prefix that is theirs alone.
        rank: this one, within the group.
        members: those that it joins, as ranks within the group.
        deadline: how long to wait.
        meeting: tells others how far it has come.
        secret: of the user's key, if there is one; the same on all ranks.
        on_met: told which other members are on this host, when all have met and none has connected.
        on_loss: told of a ``LinkError`` before this rank closes its connections: a rank that sees
            them close looks why.
        on_refused: called with the reason when a caller is sent away that is not a rank.

    Raises:
        GivenUpError: ``meeting`` was ended from outside.
        LeftError: as ``meet``.
        WireError: as ``meet``.
        DistNetworkError: the store is gone.
        LinkClosed: another rank was lost, or does not answer.
        LinkUnreachable: two ranks can't connect to each other.
        LinkRefused: one can't connect to any, or not as it or another one wants.
        LinkError: this process can't connect to any.
    """
    place, size = members.index(rank), len(members)
    settings = deadline.settings
    with Door.opened(
        settings.chosen_transport, own_addresses(store), settings.chosen_ports
    ) as door:
        met = meet(store, place, size, meeting, door.place.told())
        ranks = _Ranks(
            rank,
            dict(zip(members, map(Place.of, met.doors), strict=True)),
            dict(zip(members, met.hosts, strict=True)),
            Words(meeting.session, secret),
            dist.PrefixStore(f"objcomm/{meeting.nonce}", store),
        )
        on_met([each for each in ranks.others if ranks.hosts[each] == ranks.hosts[rank]])
        refusal = ranks.lack()
        if refusal is None:
            doors = Doors(door, ranks.places, ranks.hosts, rank, ranks.words, on_refused)
            link = _joined(_Joining(doors, ranks.store, deadline, meeting), on_loss)
            if link is not None:
                forget(store, meeting.nonce, size, ())
                return link
            refusal = ranks.refusal(_FAILED)
            if refusal is None:
                raise damaged(_FAILED)  # this rank has told it, or another one has
    if refusal.is_final or any(each.transport == "streams" for each in ranks.places.values()):
        raise refusal.error(ranks.places)
    far = _over_gloo(ranks, refusal, deadline, meeting)
    left = [_FAILED, _CONNECTED, *keys_left(size)]
    forget(store, meeting.nonce, size, [f"objcomm/{meeting.nonce}/{key}" for key in left])
    return far


class _Ranks(NamedTuple):
    """The ranks of a meeting.

    Attributes:
        rank: this one.
        places: where each can be reached.
        hosts: of each, as a number.
        words: what they say to each other first.
        store: one in which nothing is written but of this meeting.
    """

    rank: int
    places: Mapping[int, Place]
    hosts: Mapping[int, int]
    words: Words
    store: dist.Store

    @property
    def others(self) -> list[int]:
        """All but this one."""
        return [each for each in self.places if each != self.rank]

    def lack(self) -> _Refusal | None:
        """Why they can't even try to connect by streams; None if they can."""
        is_on_one_host = len(set(self.hosts.values())) == 1
        for rank, each in self.places.items():
            if each.transport == "gloo":
                return _Refusal(rank, reason='has chosen transport="gloo"')
        for rank, each in self.places.items():
            if not each.name or not (each.port or is_on_one_host):
                return _Refusal(rank, reason=f"can't let others connect: {each.lacks}")
        return None

    def refusal(self, key: str) -> _Refusal | None:
        """What the first rank that gave up has written under a key, if one has.

        Raises:
            WireError: no rank wrote it.
        """
        raw = read(self.store, key)
        if raw is None:
            return None
        told = unpack_record(raw, _Refusal, "a refusal")
        if not self.places.keys() >= {told.rank, *told.peers}:
            raise damaged(raw)
        return told


def _tell(store: dist.Store, key: str, refusal: _Refusal) -> None:
    """Tell the other ranks, before any connection is closed, unless another rank was first."""
    store.compare_set(key, "", pack_record(refusal))  # type: ignore[arg-type]  # bytes will do


def _over_gloo(
    ranks: _Ranks, refusal: _Refusal, deadline: Deadline, meeting: MeetingState
) -> GlooLink:
    """Connect the ranks over Gloo, and let them prove to each other who they are.

    Raises:
        LinkError: as ``connect``.
        GivenUpError: nobody waits for them any more.
    """
    why, members = refusal.error(ranks.places), tuple(ranks.places)
    if isinstance(why, LinkUnreachable):
        meeting.unreachable = why
        deadline = Deadline(min(deadline.seconds_left, _GLOO_SECONDS), deadline.settings)
    try:
        link = GlooLink(ranks.store, ranks.rank, members, tuple(ranks.hosts.values()), deadline)
        meeting.unproven = link
        try:
            _prove(link, ranks, deadline, meeting)
            if meeting.unreachable is not None:
                _await_all(ranks.store, len(members), meeting)
        except BaseException:
            link.abort()
            raise
        finally:
            meeting.unproven = None
    except LinkClosed as error:
        if meeting.is_over:
            raise GivenUpError from error
        unproven = ranks.refusal(_UNPROVEN)
        if unproven is not None:
            raise unproven.error(ranks.places) from error
        if meeting.unreachable is None:
            raise
        raise meeting.unreachable from error
    if ranks.places[ranks.rank].transport != "gloo":
        meeting.without_streams = why.reason
    return link


def _prove(link: GlooLink, ranks: _Ranks, deadline: Deadline, meeting: MeetingState) -> None:
    """Return when all others have proved who they are: Gloo accepts the first process that calls.

    Raises:
        GivenUpError: the meeting ended while they connected.
        LinkClosed: one has gone, or does not answer.
        LinkUnreachable: another process has answered for a rank.
    """
    if meeting.is_over:
        raise GivenUpError
    rooms = {peer: empty(Words.nbytes) for peer in ranks.others}
    coming = {peer: link.recv(room, peer, WORD_TAG) for peer, room in rooms.items()}
    going = [link.send(ranks.words.said(ranks.rank, peer), peer, WORD_TAG) for peer in rooms]
    for peer, room in rooms.items():
        try:
            link.wait(coming[peer], min(deadline.left(), CONNECT_MAX))
            reason = "another process has answered for one of them"
            if ranks.words.check(bytes(writable(room)), peer, ranks.rank):
                reason = ""
        except OtherKeyError as error:
            reason = str(error.strerror)
        except LinkError as error:
            raise LinkClosed(error.reason, (peer,)) from error
        if reason:
            refusal = _Refusal(ranks.rank, (peer,), reason)
            _tell(ranks.store, _UNPROVEN, refusal)
            raise refusal.error(ranks.places)
    for each in going:
        link.wait(each, min(deadline.left(), CONNECT_MAX))


def _joined(joining: _Joining, on_loss: Callable[[LinkError], None]) -> StreamLink | None:
    """The link over streams; None if some two ranks can't be connected so."""
    with contextlib.ExitStack() as in_vain:
        in_vain.callback(joining.close)
        try:
            joining.connect()
            link = joining.link()
            joining.complete(link)
        except OSError as error:
            lost = joining.loss(error)
            if lost is None:
                joining.give_up(error)
                return None
            on_loss(lost)
            raise lost from error
        in_vain.pop_all()
    return link


def _await_all(store: dist.Store, size: int, meeting: MeetingState) -> None:
    """Return when Gloo has connected all ranks, and not only this one.

    A rank that fails closes the connections that it has, and may be taken for dead by those that
    use them already. So nobody does before all have theirs.

    Raises:
        GivenUpError: nobody waits for them any more.
    """
    connected, pause = store.add(_CONNECTED, 1), _PAUSE_SECONDS
    while connected < size:
        if meeting.is_over:
            raise GivenUpError
        time.sleep(pause)
        pause = min(2 * pause, _LONG_PAUSE_SECONDS)  # one of a pair may wait for long
        connected = store.add(_CONNECTED, 0)


class _Guest:
    """A connection of which it is not known yet that another rank is at its end.

    Attributes:
        socket: its own end.
        rank: the other one's, or -1 for a caller that has not said it.
        unsaid: what this rank says when it is connected.
        where: the address that was called; empty for a name.
        said: what has come of it.
    """

    def __init__(self, end: socket.socket, rank: int, unsaid: bytes = b"", where: str = "") -> None:
        self.socket = end
        self.rank = rank
        self.unsaid = unsaid
        self.where = where
        self.said = b""

    @property
    def is_unknown(self) -> bool:
        """Whether it has come by itself, and has not said its word."""
        return self.rank < 0 and len(self.said) < Words.nbytes


@dataclass
class _Calls:
    """How far this rank has come in calling another one.

    Attributes:
        way: at which of its addresses it calls next.
        due: when, as ``time.monotonic`` has it.
        guests: what it waits for at the others.
    """

    way: int = 0
    due: float = 0.0
    guests: list[_Guest] = field(default_factory=list)


class _Joining:
    """One rank's way to a socket to each neighbour; a pair's later rank connects to the other.

    Neighbours are all ranks, or those of this one in a tree.
    """

    def __init__(
        self, doors: Doors, store: dist.Store, deadline: Deadline, meeting: MeetingState
    ) -> None:
        """Begin.

        Args:
            doors: of all ranks.
            store: where a rank says that it can't.
            deadline: how long to wait.
            meeting: tells whether to.
        """
        self._doors = doors
        self._store = store
        self._lost_seconds = deadline.settings.lost_after
        # Half of it: Gloo has the other half, if this is in vain.
        limit = min(deadline.left(), CONNECT_MAX) / 2
        self._looked_at = time.monotonic()
        self._until = self._looked_at + limit.total_seconds()
        self._meeting = meeting
        self._guests: dict[int, _Guest] = {}
        self._joined: dict[int, _Guest] = {}
        self._calls: dict[int, _Calls] = {}
        self._events = select.poll()
        if len(doors.others) < _AT_ONCE_MAX:
            self._neighbours = doors.others
            self._rounds = [(doors.others, doors.others)]
        else:
            parents, children = _in_a_tree(doors)
            self._neighbours = [*parents, *children]
            self._rounds = [([], children), (parents, parents), (children, [])]
        self._awaited = self._neighbours
        self._due_nbytes = Doors.word_nbytes
        self._has_said = False

    def connect(self) -> None:
        """Return when there is a socket to each neighbour; others may not have all of theirs.

        Raises:
            OSError: some two ranks can't be connected.
            GivenUpError: nobody waits for them any more.
        """
        self._calls = {peer: _Calls() for peer in self._neighbours if peer < self._doors.rank}
        for listener in self._doors.listeners:
            self._events.register(listener, select.POLLIN)
        while self._silent():
            for peer, calls in tuple(self._calls.items()):
                if calls.due <= time.monotonic():
                    self._call(peer, calls)
            self._look()

    def link(self) -> StreamLink:
        """What it takes to use the sockets, before anybody relies on it.

        Raises:
            OSError: this process has no room for it.
        """
        doors, joined = self._doors, sorted(self._joined.items())
        sockets = {peer: each.socket for peer, each in joined}
        beside = 1 + sum(map(doors.is_near, doors.others))
        is_all = len(sockets) == len(doors.others)
        return StreamLink(
            doors.rank,
            sockets,
            doors.hosts,
            doors=None if is_all else doors,
            listeners=[] if is_all else [each.dup() for each in doors.listeners],
            lost_seconds=self._lost_seconds,
            spin_seconds=SPIN_SECONDS if has_own_core(beside, os.environ) else 0.0,
        )

    def complete(self, link: StreamLink) -> None:
        """Return when all ranks have all of theirs, and what it takes to use them.

        Who can't says nothing and closes its sockets, so that no rank gets the word of all. Who has
        said it can't take it back. In a tree each says it to its parent for all below, and the
        first rank to all.

        Args:
            link: what this rank will use; gets who has called meanwhile.

        Raises:
            OSError: another rank could not, or said nothing; see ``loss``.
            GivenUpError: nobody waits for them any more.
        """
        self._due_nbytes += len(_COMPLETE)
        self._until += _SAID_LATER_SECONDS
        for told, awaited in self._rounds:
            self._awaited = awaited
            for peer in told:
                self._has_said = True
                with _naming(peer, has_ended=True):
                    self._joined[peer].socket.sendall(_COMPLETE)
            while self._silent():
                self._look()
        for each in self._guests.values():
            if each.rank in self._joined:
                continue
            if len(self._neighbours) < len(self._doors.others):  # it may want to use the link
                link.hear(each.socket, each.said)
            else:  # a stranger
                each.socket.close()

    def loss(self, error: OSError) -> LinkError | None:
        """What an error means for all; None if they may still use another link.

        A rank that gives up says so before it closes its sockets. So one that has closed them
        without a word has died, or knows of a death.

        Raises:
            DistNetworkError: the store is gone.
        """
        if self._store.check([_FAILED]):
            return None
        if isinstance(error, _PeerError) and error.has_ended:
            lost = HOST_LOST if is_outage(error.strerror or "") else PEER_LOST
            return LinkClosed(f"{lost} (its connection ended while ranks connected)", (error.peer,))
        if not self._has_said:
            return None
        # Others may have all words by now, and use the link.
        if isinstance(error, TimeoutError):
            return LinkClosed(f"{PEER_LOST} (it did not connect in time)", tuple(self._silent()))
        return LinkError(str(error))

    def give_up(self, error: OSError) -> None:
        """Let the others know that no rank gets all of its connections, before any is closed."""
        peers: tuple[int, ...] = ()
        reason, is_final = error.strerror or str(error) or _NO_ANSWER, False
        if isinstance(error, _PeerError) and not error.has_ended:
            peers, is_final = (error.peer,), error.is_final
        elif isinstance(error, TimeoutError):
            peers = tuple(self._silent())
        elif error.errno in OWN_FAULTS:
            reason, is_final = f"can't open connections: {error.strerror}", True
        else:
            reason = f"can't connect to others: {reason}"
        _tell(self._store, _FAILED, _Refusal(self._doors.rank, peers, reason, is_final))

    def _silent(self) -> list[int]:
        """The ranks that this one waits for."""
        said = {peer: len(each.said) for peer, each in self._joined.items()}
        return [peer for peer in self._awaited if said.get(peer, 0) < self._due_nbytes]

    def close(self) -> None:
        """Close all that was opened."""
        for each in [*self._guests.values(), *self._joined.values()]:
            each.socket.close()

    def _call(self, peer: int, calls: _Calls) -> None:
        """Call a rank at its next address; those at which it was called before may still answer."""
        way, calls.way = calls.way, calls.way + 1
        is_last = calls.way >= self._doors.ways_to(peer)
        calls.due = math.inf if is_last else time.monotonic() + _LOOK_SECONDS
        try:
            with _naming(peer):
                call = self._doors.call(peer, way)
        except _PeerError as error:
            if self._is_out_of_reach(peer, is_busy=error.errno in _BUSY):
                raise
            return
        guest = _Guest(call.socket, peer, call.unsaid, call.where)
        calls.guests.append(guest)
        self._add(guest)

    def _is_out_of_reach(self, peer: int, *, is_busy: bool) -> bool:
        """Whether a rank can be called nowhere else, after a call that has failed.

        It is called at its next address now; or, if that was the last one, again if it was busy.
        """
        calls = self._calls[peer]
        if calls.way < self._doors.ways_to(peer):
            calls.due = 0.0
        elif is_busy and not calls.guests:
            calls.way, calls.due = 0, time.monotonic() + _AGAIN_SECONDS
        elif not calls.guests:
            return True
        return False

    def _drop(self, guest: _Guest) -> None:
        with contextlib.suppress(KeyError):  # it was said all that is due
            self._events.unregister(guest.socket)
        self._guests.pop(guest.socket.fileno(), None)
        guest.socket.close()

    def _add(self, guest: _Guest) -> None:
        self._guests[guest.socket.fileno()] = guest
        self._events.register(guest.socket, select.POLLOUT if guest.unsaid else select.POLLIN)

    def _look(self) -> None:
        """Take in what has come, or see that it never will."""
        due = min((each.due for each in self._calls.values()), default=math.inf)
        pause = max(0.0, min(_LOOK_SECONDS, due - time.monotonic()))
        events = self._events.poll(pause * 1000)
        now = time.monotonic()
        for descriptor, _ in events:
            guest = self._guests.get(descriptor)
            if guest is not None and guest.unsaid:
                self._say(guest)
            elif guest is not None:
                self._hear(guest)
            elif any(each.fileno() == descriptor for each in self._doors.listeners):
                self._let_in()
        if self._meeting.is_over:
            raise GivenUpError
        if now > self._looked_at + _LOOK_SECONDS:
            self._looked_at = now
            if self._store.check([_FAILED]):
                raise ConnectionAbortedError  # another rank could not
        if now > self._until + (_LOOK_SECONDS if events else 0.0):
            raise TimeoutError

    def _let_in(self) -> None:
        for listener in self._doors.listeners:
            for end in self._doors.accept(listener):
                waiting = [each for each in self._guests.values() if each.is_unknown]
                if len(waiting) >= max(1, len(self._doors.others) - len(self._joined)):
                    # No more can be ranks. One that is has said its word by now, or calls again.
                    self._doors.on_refused("a process that said nothing")
                    self._drop(waiting[0])
                guest = _Guest(end, -1, where=called_at(end))
                self._add(guest)
                self._hear(guest)

    def _say(self, guest: _Guest) -> None:
        """Say this rank's word to another host's rank, which is connected now, or could not be."""
        try:
            with _naming(guest.rank):
                failed = guest.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    raise OSError(failed, os.strerror(failed))
                guest.socket.sendall(guest.unsaid)  # the system has room for the first bytes
        except _PeerError as error:
            if self._is_last(guest, is_busy=error.errno in _BUSY):
                raise
            return
        guest.unsaid = b""
        self._events.modify(guest.socket, select.POLLIN)

    def _is_last(self, guest: _Guest, *, is_busy: bool = False) -> bool:
        """Whether a rank can be reached nowhere, now that one of the calls to it has failed."""
        self._drop(guest)
        self._calls[guest.rank].guests.remove(guest)
        return self._is_out_of_reach(guest.rank, is_busy=is_busy)

    def _hear(self, guest: _Guest) -> None:
        # Not a byte more than it says now: what follows is the link's.
        due = Doors.word_nbytes + len(_COMPLETE) * (guest.rank in self._joined)
        if len(guest.said) >= due:
            self._events.unregister(guest.socket)
            return
        is_known, is_joined = guest.rank >= 0, guest.rank in self._joined
        failed = errno.ECONNABORTED, "it has closed the connection"
        try:
            came = guest.socket.recv(due - len(guest.said))
        except BlockingIOError:
            return
        except OSError as error:
            came, failed = b"", (error.errno or 0, error.strerror or "")
        guest.said += came
        if came and len(guest.said) < due:
            return
        if not came and is_known:
            # A rank that has no room for strangers may have sent this one away.
            if is_joined or self._is_last(guest, is_busy=not guest.said):
                raise _PeerError(guest.rank, OSError(*failed), has_ended=is_joined)
        elif guest.rank in self._joined:
            self._events.unregister(guest.socket)
        elif guest.rank >= 0:
            self._hear_answer(guest)
        elif not came or not self._admits(guest):  # a stranger
            self._drop(guest)

    def _hear_answer(self, guest: _Guest) -> None:
        """A rank has answered, or another process at one of its addresses."""
        try:
            with _naming(guest.rank):
                if not self._doors.has_answered(guest.rank, guest.said, guest.where):
                    raise PermissionError(errno.EACCES, "another process has answered")
        except _PeerError as error:
            if error.is_final or self._is_last(guest):
                raise
            return
        self._joined[guest.rank] = guest
        for each in self._calls.pop(guest.rank).guests:
            if each is not guest:
                self._drop(each)

    def _admits(self, guest: _Guest) -> bool:
        """Whether a rank of this meeting has called; a neighbour gets an answer."""
        try:
            peer = self._doors.caller(guest.socket, guest.said)
        except OtherKeyError as error:
            with contextlib.suppress(OSError):  # it may hear of that, too
                guest.socket.sendall(self._doors.word_to(error.peer, guest.where))
            raise _PeerError(error.peer, error, has_ended=False) from error
        if peer is None or peer in self._joined:
            return False
        if peer not in self._neighbours:  # for it all have met already
            self._events.unregister(guest.socket)
            return True
        if peer < self._doors.rank:
            return False
        guest.rank = peer
        self._joined[peer] = guest
        with _naming(peer, has_ended=True):
            guest.socket.sendall(self._doors.word_to(peer, guest.where))
        return True


@contextlib.contextmanager
def _naming(peer: int, *, has_ended: bool = False) -> Iterator[None]:
    """A block whose errors concern the connection to one rank, unless this process is at fault."""
    try:
        yield
    except OSError as error:
        if error.errno in OWN_FAULTS:
            raise
        raise _PeerError(peer, error, has_ended=has_ended) from error


def _in_a_tree(doors: Doors) -> tuple[list[int], list[int]]:
    """The neighbours of a rank in a binomial tree over all ranks: its parent, and its children.

    Those of a host follow each other. If there is one, they are those to which small messages go
    from the first rank, see ``topology.binomial``.
    """
    ranks = sorted(doors.hosts, key=lambda rank: (doors.hosts[rank], rank))
    place = ranks.index(doors.rank)
    lowest = place & -place if place else len(ranks)
    steps = [1 << bit for bit in range(len(ranks).bit_length())]
    children = [
        ranks[place + step] for step in steps if step < lowest and place + step < len(ranks)
    ]
    return [ranks[place - lowest]] if place else [], children
