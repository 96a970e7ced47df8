"""Connects the ranks of a group by the best link available to them.

That is a stream link if the systems of all ranks allow it. Otherwise Gloo connects them, unless
some rank requires streams. The two ranks of each pair then prove their identity before anything
else is read.
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
    Endpoint,
    Handshakes,
    OtherKeyError,
    called_at,
    own_addresses,
)
from objcomm._transport.event_loop import SPIN_SECONDS
from objcomm._transport.gloo import GlooLink, keys_left
from objcomm._transport.link import (
    HANDSHAKE_TAG,
    HOST_LOST,
    PEER_LOST,
    Deadline,
    LinkClosed,
    LinkError,
    LinkRefused,
    LinkUnreachable,
)
from objcomm._transport.rendezvous import GivenUpError, damaged, forget, meet
from objcomm._transport.sockets import is_outage
from objcomm._transport.store import pack_record, read, under, unpack_record
from objcomm._transport.streams import StreamLink
from objcomm._world import CONNECT_MAX
from objcomm.errors import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from objcomm._transport.link import Connections
    from objcomm._transport.rendezvous import MeetingState
    from objcomm._transport.store import StorePart


# How often a rank that waits for connections checks whether another one has failed to connect. Also
# how long it waits for an answer from one address before it calls the next, as browsers do.
_LOOK_SECONDS = 0.2
# The same, for ranks that are already connected.
_PAUSE_SECONDS = 0.02
_LONG_PAUSE_SECONDS = 0.25
# How soon a rank calls again after it was dropped for others, or found too many waiting.
_AGAIN_SECONDS = 0.05
# The errors that show this while it calls or sends its handshake: too many callers wait, or it was
# just dropped.
_BUSY = {errno.EAGAIN, errno.EPIPE, errno.ECONNRESET}

# Up to this many ranks all connect to each other when they meet. More ranks connect only along a
# tree, which shows that all can be connected; any other two connect when one first sends to the
# other or waits for it. Connecting all pairs of 64 ranks on a host took 2 cores 0.5 s.
_AT_ONCE_MAX = 16

# What a rank sends after its handshake once all others have sent theirs.
_COMPLETE = b"!"
# Extra time for ranks that are already connected, so that one still connecting gives up first.
_CONFIRMATION_SECONDS = 1.0
# The limit of each of Gloo's attempts to connect ranks of which two could not reach each other.
# Those two have tried already, and if they fail again nothing ends the attempts of the others.
_GLOO_SECONDS = 3.0
# The key under which a rank reports that streams can't connect the ranks, and why.
_FAILED = "no streams"
# The key under which a rank reports which other one could not prove its identity.
_UNPROVEN = "unproven"
# Counts the ranks that Gloo has connected after some could not reach each other.
_CONNECTED = "connected"

_REFUSED, _NO_ANSWER = "refused", "no answer"


class _Refusal(NamedTuple):
    """Why streams can't connect the ranks, as reported by the first rank that gave up.

    Attributes:
        rank: the rank that reports it.
        peers: the ranks to which it could not connect; none if the reason is its own.
        reason: as text.
        is_final: whether no other link may be tried.
    """

    rank: int
    peers: tuple[int, ...] = ()
    reason: str = ""
    is_final: bool = False

    def error(self, endpoints: Mapping[int, Endpoint]) -> LinkRefused | LinkUnreachable:
        """Return it as an error that names the hosts."""
        hosts = [endpoints[each].host for each in (self.rank, *self.peers)]
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
    """The error that keeps this rank from connecting to one other.

    Attributes:
        peer: the other rank.
        has_ended: whether the two were connected before.
        is_final: whether no other link may be tried.
    """

    def __init__(self, peer: int, error: OSError, *, has_ended: bool) -> None:
        text = error.strerror or _NO_ANSWER
        if isinstance(error, ConnectionRefusedError):
            text = _REFUSED
        elif is_outage(text):
            text = f"{_NO_ANSWER}: {text}"
        super().__init__(error.errno, text)
        self.peer = peer
        self.has_ended = has_ended
        self.is_final = isinstance(error, OtherKeyError)


def connect(  # noqa: PLR0917  # the ranks, and callbacks
    store: StorePart,
    lent: AbstractContextManager[dist.Store],
    rank: int,
    members: tuple[int, ...],
    deadline: Deadline,
    meeting: MeetingState,
    secret: bytes | None,
    on_met: Callable[[Sequence[int]], None],
    on_loss: Callable[[LinkError], None],
    on_refused: Callable[[str], None],
) -> Connections:
    """Meet the other ranks and connect to each; every member must call this.

    May block in C++ up to the limit.

    Args:
        store: the group's store, with a prefix for these ranks alone.
        lent: a connection to the same store without the prefix, for Gloo, which waits in it.
        rank: this rank within the group.
        members: the ranks to connect, as ranks within the group.
        deadline: how long to wait.
        meeting: shows other threads the progress.
        secret: secret of the user's key, if there is one; the same on all ranks.
        on_met: called with the other members on this host after all have met and before any has
            connected.
        on_loss: called with a ``LinkError`` before this rank closes its connections, because a rank
            that sees them close looks for the reason.
        on_refused: called with the reason when a caller that is not a rank is rejected.

    Raises:
        GivenUpError: ``meeting`` was ended from outside.
        LeftError: see ``meet``.
        WireError: see ``meet``.
        DistNetworkError: the store is gone.
        LinkClosed: another rank was lost, or does not answer.
        LinkUnreachable: two ranks can't connect to each other.
        LinkRefused: one rank can't connect to any other, or not with the transport that it or
            another one requires.
        LinkError: this process can't connect to any rank.
    """
    place, size = members.index(rank), len(members)
    settings = deadline.settings
    with Door.opened(
        settings.chosen_transport, own_addresses(store.shared.port), settings.chosen_ports
    ) as door:
        met = meet(store, place, size, meeting, door.endpoint.text())
        ranks = _Ranks(
            rank,
            dict(zip(members, map(Endpoint.of, met.doors), strict=True)),
            dict(zip(members, met.hosts, strict=True)),
            Handshakes(meeting.session, secret),
            under(store, f"objcomm/{meeting.nonce}"),
        )
        on_met([each for each in ranks.others if ranks.hosts[each] == ranks.hosts[rank]])
        refusal = ranks.lack()
        if refusal is None:
            doors = Doors(door, ranks.endpoints, ranks.hosts, rank, ranks.handshakes, on_refused)
            link = _joined(_Joining(doors, ranks.store, deadline, meeting), on_loss)
            if link is not None:
                forget(store, meeting.nonce, size, ())
                return link
            refusal = ranks.refusal(_FAILED)
            if refusal is None:
                raise damaged(_FAILED)  # this rank or another one has written it
    if refusal.is_final or any(each.transport == "streams" for each in ranks.endpoints.values()):
        raise refusal.error(ranks.endpoints)
    with lent as own:
        in_gloo = dist.PrefixStore(ranks.store.prefix, own)
        far = _over_gloo(ranks, in_gloo, refusal, deadline, meeting)
    left = [_FAILED, _CONNECTED, *keys_left(size)]
    forget(store, meeting.nonce, size, [f"objcomm/{meeting.nonce}/{key}" for key in left])
    return far


class _Ranks(NamedTuple):
    """The ranks of a meeting.

    Attributes:
        rank: this rank.
        endpoints: where each rank can be reached.
        hosts: host number of each rank.
        handshakes: computes the handshakes.
        store: used for this meeting only.
    """

    rank: int
    endpoints: Mapping[int, Endpoint]
    hosts: Mapping[int, int]
    handshakes: Handshakes
    store: StorePart

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [each for each in self.endpoints if each != self.rank]

    def lack(self) -> _Refusal | None:
        """Return why they can't even try to connect by streams; None if they can."""
        is_on_one_host = len(set(self.hosts.values())) == 1
        for rank, each in self.endpoints.items():
            if each.transport == "gloo":
                return _Refusal(rank, reason='has chosen transport="gloo"')
        for rank, each in self.endpoints.items():
            if not each.name or not (each.port or is_on_one_host):
                return _Refusal(rank, reason=f"can't let others connect: {each.lacks}")
        return None

    def refusal(self, key: str) -> _Refusal | None:
        """Return what the first rank that gave up has written under a key, if one has.

        Raises:
            WireError: no rank wrote it.
        """
        raw = read(self.store, key)
        if raw is None:
            return None
        refusal = unpack_record(raw, _Refusal, "a refusal")
        if not self.endpoints.keys() >= {refusal.rank, *refusal.peers}:
            raise damaged(raw)
        return refusal


def _report_refusal(store: StorePart, key: str, refusal: _Refusal) -> None:
    """Report a refusal before any connection is closed, unless another rank was first."""
    store.compare_set(key, "", pack_record(refusal))


def _over_gloo(
    ranks: _Ranks, store: dist.Store, refusal: _Refusal, deadline: Deadline, meeting: MeetingState
) -> GlooLink:
    """Connect the ranks through Gloo, and make them prove to each other who they are.

    Raises:
        LinkError: see ``connect``.
        GivenUpError: no rank waits for them any more.
    """
    why, members = refusal.error(ranks.endpoints), tuple(ranks.endpoints)
    if isinstance(why, LinkUnreachable):
        meeting.unreachable = why
        deadline = Deadline(min(deadline.seconds_left, _GLOO_SECONDS), deadline.settings)
    try:
        link = GlooLink(store, ranks.rank, members, tuple(ranks.hosts.values()), deadline)
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
            raise unproven.error(ranks.endpoints) from error
        if meeting.unreachable is None:
            raise
        raise meeting.unreachable from error
    if ranks.endpoints[ranks.rank].transport != "gloo":
        meeting.without_streams = why.reason
    return link


def _prove(link: GlooLink, ranks: _Ranks, deadline: Deadline, meeting: MeetingState) -> None:
    """Wait until all others have proved who they are; Gloo accepts the first caller.

    Raises:
        GivenUpError: the meeting ended while they connected.
        LinkClosed: a rank has gone, or does not answer.
        LinkUnreachable: another process has answered for a rank.
    """
    if meeting.is_over:
        raise GivenUpError
    rooms = {peer: empty(Handshakes.nbytes) for peer in ranks.others}
    coming = {peer: link.recv(room, peer, HANDSHAKE_TAG) for peer, room in rooms.items()}
    going = [
        link.send(ranks.handshakes.of(ranks.rank, peer), peer, HANDSHAKE_TAG) for peer in rooms
    ]
    for peer, room in rooms.items():
        try:
            link.wait(coming[peer], min(deadline.left(), CONNECT_MAX))
            reason = "another process has answered for one of them"
            if ranks.handshakes.check(bytes(writable(room)), peer, ranks.rank):
                reason = ""
        except OtherKeyError as error:
            reason = str(error.strerror)
        except LinkError as error:
            raise LinkClosed(error.reason, (peer,)) from error
        if reason:
            refusal = _Refusal(ranks.rank, (peer,), reason)
            _report_refusal(ranks.store, _UNPROVEN, refusal)
            raise refusal.error(ranks.endpoints)
    for each in going:
        link.wait(each, min(deadline.left(), CONNECT_MAX))


def _joined(joining: _Joining, on_loss: Callable[[LinkError], None]) -> StreamLink | None:
    """Return the stream link; None if it can't connect all ranks."""
    with contextlib.ExitStack() as undo:
        undo.callback(joining.close)
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
        undo.pop_all()
    return link


def _await_all(store: StorePart, size: int, meeting: MeetingState) -> None:
    """Wait until Gloo has connected all ranks, and not only this one.

    A rank that fails closes its connections, and ranks that already use them could take it for
    dead. So no rank uses its connections before all ranks have theirs.

    Raises:
        GivenUpError: no rank waits for them any more.
    """
    connected: int = store.add(_CONNECTED, 1)
    pause = _PAUSE_SECONDS
    while connected < size:
        if meeting.is_over:
            raise GivenUpError
        time.sleep(pause)
        pause = min(2 * pause, _LONG_PAUSE_SECONDS)  # one rank of a pair may wait a long time
        connected = store.add(_CONNECTED, 0)


class _Candidate:
    """A connection that is not yet known to lead to another rank.

    Attributes:
        socket: this rank's end.
        rank: the other rank, or -1 for a caller that has not identified itself.
        unsent: this rank's handshake, to be sent once connected.
        where: the address that was called; empty for a Unix socket.
        received: what was received.
    """

    def __init__(self, end: socket.socket, rank: int, unsent: bytes = b"", where: str = "") -> None:
        self.socket = end
        self.rank = rank
        self.unsent = unsent
        self.where = where
        self.received = b""

    @property
    def is_unknown(self) -> bool:
        """Whether it is from a caller that has not completed its handshake."""
        return self.rank < 0 and len(self.received) < Handshakes.nbytes


@dataclass
class _Calls:
    """The progress of calling one other rank.

    Attributes:
        way: index of the address to call next.
        due: when to call it (``time.monotonic``).
        candidates: the connections to its other addresses that have not been answered.
    """

    way: int = 0
    due: float = 0.0
    candidates: list[_Candidate] = field(default_factory=list)


class _Joining:
    """Connects one rank to its neighbors; the higher rank of a pair calls the lower one.

    All other ranks are neighbors, or only those next to this rank in a tree.
    """

    def __init__(
        self, doors: Doors, store: StorePart, deadline: Deadline, meeting: MeetingState
    ) -> None:
        """Prepare to connect.

        Args:
            doors: how all ranks are reached.
            store: where a rank reports that it has failed.
            deadline: how long to wait.
            meeting: shows whether to keep waiting.
        """
        self._doors = doors
        self._store = store
        self._lost_seconds = deadline.settings.lost_after
        # Half of it: if this fails, Gloo gets the other half.
        limit = min(deadline.left(), CONNECT_MAX) / 2
        self._looked_at = time.monotonic()
        self._until = self._looked_at + limit.total_seconds()
        self._meeting = meeting
        self._candidates: dict[int, _Candidate] = {}
        self._joined: dict[int, _Candidate] = {}
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
        self._due_nbytes = Doors.handshake_nbytes
        self._has_reported = False

    def connect(self) -> None:
        """Wait until this rank is connected to its neighbors; they may lack some of theirs.

        Raises:
            OSError: two of the ranks can't be connected.
            GivenUpError: no rank waits for them any more.
        """
        self._calls = {peer: _Calls() for peer in self._neighbours if peer < self._doors.rank}
        for listener in self._doors.listeners:
            self._events.register(listener, select.POLLIN)
        while self._missing():
            for peer, calls in tuple(self._calls.items()):
                if calls.due <= time.monotonic():
                    self._call(peer, calls)
            self._look()

    def link(self) -> StreamLink:
        """Create the link before any rank relies on it.

        Raises:
            OSError: this process lacks the resources.
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
        """Wait until all ranks have all of their connections, and a link to use them.

        A rank that can't create them sends nothing and closes its sockets, so that no rank is told
        that all are complete. A rank that reported itself complete can't take that back. In a tree,
        each rank reports to its parent for all ranks below it, and the first rank reports to all.

        Args:
            link: the link that this rank will use; it takes over callers that have arrived
                meanwhile.

        Raises:
            OSError: another rank failed, or sent nothing; see ``loss``.
            GivenUpError: no rank waits for them any more.
        """
        self._due_nbytes += len(_COMPLETE)
        self._until += _CONFIRMATION_SECONDS
        for informed, awaited in self._rounds:
            self._awaited = awaited
            for peer in informed:
                self._has_reported = True
                with _naming(peer, has_ended=True):
                    self._joined[peer].socket.sendall(_COMPLETE)
            while self._missing():
                self._look()
        for each in self._candidates.values():
            if each.rank in self._joined:
                continue
            if len(self._neighbours) < len(self._doors.others):  # it may want to use the link
                link.take_over_caller(each.socket, each.received)
            else:  # not a rank
                each.socket.close()

    def loss(self, error: OSError) -> LinkError | None:
        """Return what an error means for all ranks; None if they may still use another link.

        A rank that gives up reports that before it closes its sockets. So one that closes them
        without a report has died, or knows of a death.

        Raises:
            DistNetworkError: the store is gone.
        """
        if self._store.check([_FAILED]):
            return None
        if isinstance(error, _PeerError) and error.has_ended:
            lost = HOST_LOST if is_outage(error.strerror or "") else PEER_LOST
            return LinkClosed(f"{lost} (its connection ended while ranks connected)", (error.peer,))
        if not self._has_reported:
            return None
        # Other ranks may have learned that all are complete, and use the link.
        if isinstance(error, TimeoutError):
            return LinkClosed(f"{PEER_LOST} (it did not connect in time)", tuple(self._missing()))
        return LinkError(str(error))

    def give_up(self, error: OSError) -> None:
        """Report that the ranks can't all be connected, before any connection is closed."""
        peers: tuple[int, ...] = ()
        reason, is_final = error.strerror or str(error) or _NO_ANSWER, False
        if isinstance(error, _PeerError) and not error.has_ended:
            peers, is_final = (error.peer,), error.is_final
        elif isinstance(error, TimeoutError):
            peers = tuple(self._missing())
        elif error.errno in OWN_FAULTS:
            reason, is_final = f"can't open connections: {error.strerror}", True
        else:
            reason = f"can't connect to others: {reason}"
        _report_refusal(self._store, _FAILED, _Refusal(self._doors.rank, peers, reason, is_final))

    def _missing(self) -> list[int]:
        """Return the ranks that this one waits for."""
        received = {peer: len(each.received) for peer, each in self._joined.items()}
        return [peer for peer in self._awaited if received.get(peer, 0) < self._due_nbytes]

    def close(self) -> None:
        """Close all connections."""
        for each in [*self._candidates.values(), *self._joined.values()]:
            each.socket.close()

    def _call(self, peer: int, calls: _Calls) -> None:
        """Call a rank's next address; addresses that were called before may still answer."""
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
        candidate = _Candidate(call.socket, peer, call.unsent, call.where)
        calls.candidates.append(candidate)
        self._add(candidate)

    def _is_out_of_reach(self, peer: int, *, is_busy: bool) -> bool:
        """Return whether a rank has no address left to call, after a call that has failed.

        Otherwise the next address is called now; or, if that was the last one and it was busy, all
        are called again.
        """
        calls = self._calls[peer]
        if calls.way < self._doors.ways_to(peer):
            calls.due = 0.0
        elif is_busy and not calls.candidates:
            calls.way, calls.due = 0, time.monotonic() + _AGAIN_SECONDS
        elif not calls.candidates:
            return True
        return False

    def _drop(self, candidate: _Candidate) -> None:
        with contextlib.suppress(KeyError):  # it has sent everything
            self._events.unregister(candidate.socket)
        self._candidates.pop(candidate.socket.fileno(), None)
        candidate.socket.close()

    def _add(self, candidate: _Candidate) -> None:
        self._candidates[candidate.socket.fileno()] = candidate
        self._events.register(
            candidate.socket, select.POLLOUT if candidate.unsent else select.POLLIN
        )

    def _look(self) -> None:
        """Process what has arrived; raise if what is missing never will."""
        due = min((each.due for each in self._calls.values()), default=math.inf)
        pause = max(0.0, min(_LOOK_SECONDS, due - time.monotonic()))
        events = self._events.poll(pause * 1000)
        now = time.monotonic()
        for descriptor, _ in events:
            candidate = self._candidates.get(descriptor)
            if candidate is not None and candidate.unsent:
                self._send_handshake(candidate)
            elif candidate is not None:
                self._receive(candidate)
            elif any(each.fileno() == descriptor for each in self._doors.listeners):
                self._accept()
        if self._meeting.is_over:
            raise GivenUpError
        if now > self._looked_at + _LOOK_SECONDS:
            self._looked_at = now
            if self._store.check([_FAILED]):
                raise ConnectionAbortedError  # another rank has failed
        if now > self._until + (_LOOK_SECONDS if events else 0.0):
            raise TimeoutError

    def _accept(self) -> None:
        for listener in self._doors.listeners:
            for end in self._doors.accept(listener):
                waiting = [each for each in self._candidates.values() if each.is_unknown]
                if len(waiting) >= max(1, len(self._doors.others) - len(self._joined)):
                    # There are more callers than ranks. A real rank has sent its handshake, or will
                    # call again.
                    self._doors.on_refused("a process that said nothing")
                    self._drop(waiting[0])
                candidate = _Candidate(end, -1, where=called_at(end))
                self._add(candidate)
                self._receive(candidate)

    def _send_handshake(self, candidate: _Candidate) -> None:
        """Send the handshake to another host, now that connecting has succeeded or failed."""
        try:
            with _naming(candidate.rank):
                failed = candidate.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    raise OSError(failed, os.strerror(failed))
                candidate.socket.sendall(
                    candidate.unsent
                )  # the system always has room for the first bytes
        except _PeerError as error:
            if self._is_last(candidate, is_busy=error.errno in _BUSY):
                raise
            return
        candidate.unsent = b""
        self._events.modify(candidate.socket, select.POLLIN)

    def _is_last(self, candidate: _Candidate, *, is_busy: bool = False) -> bool:
        """Return whether a rank can't be reached, now that one of the calls to it has failed."""
        self._drop(candidate)
        self._calls[candidate.rank].candidates.remove(candidate)
        return self._is_out_of_reach(candidate.rank, is_busy=is_busy)

    def _receive(self, candidate: _Candidate) -> None:
        # Not a byte more than is due now: what follows belongs to the link.
        due = Doors.handshake_nbytes + len(_COMPLETE) * (candidate.rank in self._joined)
        if len(candidate.received) >= due:
            self._events.unregister(candidate.socket)
            return
        is_known, is_joined = candidate.rank >= 0, candidate.rank in self._joined
        failed = errno.ECONNABORTED, "it has closed the connection"
        try:
            came = candidate.socket.recv(due - len(candidate.received))
        except BlockingIOError:
            return
        except OSError as error:
            came, failed = b"", (error.errno or 0, error.strerror or "")
        candidate.received += came
        if came and len(candidate.received) < due:
            return
        if not came and is_known:
            # A rank that has too many callers may have dropped this one.
            if is_joined or self._is_last(candidate, is_busy=not candidate.received):
                raise _PeerError(candidate.rank, OSError(*failed), has_ended=is_joined)
        elif candidate.rank in self._joined:
            self._events.unregister(candidate.socket)
        elif candidate.rank >= 0:
            self._receive_answer(candidate)
        elif not came or not self._admits(candidate):  # not a rank
            self._drop(candidate)

    def _receive_answer(self, candidate: _Candidate) -> None:
        """Handle an answer, which may come from another process at one of the rank's addresses."""
        try:
            with _naming(candidate.rank):
                if not self._doors.has_answered(
                    candidate.rank, candidate.received, candidate.where
                ):
                    raise PermissionError(errno.EACCES, "another process has answered")
        except _PeerError as error:
            if error.is_final or self._is_last(candidate):
                raise
            return
        self._joined[candidate.rank] = candidate
        for each in self._calls.pop(candidate.rank).candidates:
            if each is not candidate:
                self._drop(each)

    def _admits(self, candidate: _Candidate) -> bool:
        """Return whether a rank of this meeting has called; answer it if it is a neighbor."""
        try:
            peer = self._doors.caller(candidate.socket, candidate.received)
        except OtherKeyError as error:
            with contextlib.suppress(OSError):  # shows it the different key, too
                candidate.socket.sendall(self._doors.handshake_to(error.peer, candidate.where))
            raise _PeerError(error.peer, error, has_ended=False) from error
        if peer is None or peer in self._joined:
            return False
        if peer not in self._neighbours:  # it knows that all ranks have met
            self._events.unregister(candidate.socket)
            return True
        if peer < self._doors.rank:
            return False
        candidate.rank = peer
        self._joined[peer] = candidate
        with _naming(peer, has_ended=True):
            candidate.socket.sendall(self._doors.handshake_to(peer, candidate.where))
        return True


@contextlib.contextmanager
def _naming(peer: int, *, has_ended: bool = False) -> Iterator[None]:
    """Attribute the errors of a block to one peer, unless this process is at fault."""
    try:
        yield
    except OSError as error:
        if error.errno in OWN_FAULTS:
            raise
        raise _PeerError(peer, error, has_ended=has_ended) from error


def _in_a_tree(doors: Doors) -> tuple[list[int], list[int]]:
    """Return the parent, if any, and the children of a rank in a binomial tree of all ranks.

    The ranks of a host are consecutive. On a single host, small messages from the first rank travel
    along this tree, see ``topology.binomial``.
    """
    ranks = sorted(doors.hosts, key=lambda rank: (doors.hosts[rank], rank))
    place = ranks.index(doors.rank)
    lowest = place & -place if place else len(ranks)
    steps = [1 << bit for bit in range(len(ranks).bit_length())]
    children = [
        ranks[place + step] for step in steps if step < lowest and place + step < len(ranks)
    ]
    return [ranks[place - lowest]] if place else [], children
