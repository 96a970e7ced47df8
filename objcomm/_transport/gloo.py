"""The link of ranks that can't have streams: a Gloo process group of objcomm's own.

The user's process group carries none of it, so a time-out or an abort here closes no connection
of theirs (on a shared Gloo group it would close them all, and end DDP).

All that is peculiar to Gloo stands here, as of torch 2.13; ``link`` says it without that name:

- Its errors are ``RuntimeError``, and only their text tells one from another.
- A wait whose limit passes closes all connections of this rank. So does ``abort``, by such a wait:
  ``ProcessGroup.abort()`` does not wake an operation that waits.
- When a connection closes (``Pair::signalException``) it wakes who waits for a receive, or for a
  send that the peer has not asked for yet. It forgets the receive that is being filled (``rx_``),
  and the send that is under way (the ``ubuf`` in ``tx_``): who waits for one of those waits until
  the limit. Hence the last byte by itself, and ``wait_apart``.
- A message leaves its rank after the peer's word that it has posted the receive. A receiver whose
  memory is too short for it aborts its process.
- A receive counts what has come for it: a second wait for one that has ended has no end.
- A receive that is being filled must be kept: if its work is gone, nothing is read any more from
  that connection, its end included, and Gloo's thread spins.
- While bytes stand before it, its thread reads on with the connection locked, and nothing leaves.
- A receive from any source is woken neither by a death nor by an abort, and there is no probe; so
  there is none in ``link``.
- Where no file can be opened for a rank that connects, its thread ends the process.
- It leaves its addresses in the store.
- A device, which has a thread and a port, serves any number of process groups, unless it connects
  at first use (``lazy_init``): then it tells connections apart by the ranks within their groups, so
  those of two groups are mixed up, and the first group that goes takes the device's thread along.
  Such a device will not do for one group either: what begins a send to a peer that has begun
  nothing itself does not return before it does, or 30 s later.
- A process group's own threads are for its collectives, of which none is called here.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import math
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch.autograd.profiler
import torch.distributed as dist

from objcomm._codecs.buffers import empty
from objcomm._config import FOREVER_SECONDS
from objcomm._transport.link import (
    HOST_LOST,
    PEER_LOST,
    Awaitable,
    Deadline,
    LinkClosed,
    LinkError,
    LinkTimeout,
    Memory,
    Pending,
)
from objcomm._transport.sockets import is_outage, notice_outages, open_sockets
from objcomm._transport.store import reason_of
from objcomm._transport.threads import AbandonedError, Apart, Signal
from objcomm._wire.header import WINDOW_NBYTES
from objcomm._world import CONNECT_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


# What Gloo says of connections that it closed because a wait of this rank's own timed out, and to
# the one that waited.
_OWN_DOING = "Application timeout"
_LATE = "Timed out"

# What it says where the other end of a connection that can't be made is at fault; all else is this
# process's own: no descriptors, no threads, no such network interface.
_OF_A_PEER = ("onnect", "imed out", "imeout")

#: Nothing is ever sent with this tag, which none of ``link``'s functions gives.
POKE_TAG = (1 << 31) - 1

# For a device, the store and what else the process opens just then.
_SPARE_FILES = 8

# So often it tries to connect to a rank, each time until its limit passes: 15.3 s with one of 3 s.
_ATTEMPTS = 5

# How often a rank without room for a message checks whether there is some.
_LOOK_SECONDS = 0.5

# It takes zero for its own default.
_INSTANT = timedelta(milliseconds=1)

_profiler = torch.autograd.profiler


class _Devices:
    """This process's devices: one for all of its links, as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_interface = weakref.WeakValueDictionary[tuple[int, str], Any]()

    def chosen(self) -> list[Any]:
        """Those of the interfaces that the user names for Gloo, or else that of the host's name.

        Raises:
            RuntimeError: there is no such interface, or the host has no address.
        """
        # As torch reads it (init.cpp). A forked child has none of its parent's threads.
        named = os.environ.get("GLOO_SOCKET_IFNAME", "")
        interfaces = named.split(",") if len(named) > 1 else [""]
        with self._lock:
            return [self._for(os.getpid(), interface) for interface in interfaces]

    def _for(self, pid: int, interface: str) -> Any:
        device = self._by_interface.get((pid, interface))
        if device is None:
            gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out much of it
            if interface:
                device = gloo.create_device(interface=interface, lazy_init=False)
            else:
                device = gloo.create_default_device(lazy_init=False)
            self._by_interface[pid, interface] = device
        return device


_devices = _Devices()


def keys_left(size: int) -> list[str]:
    """Where ``size`` ranks leave their addresses (c10d::ProcessGroupGloo, first context)."""
    return [f"0/{place}" for place in range(size)]


class GlooLink:
    """Joins ranks of one group by a private ``ProcessGroupGloo``.

    Constructing it is collective.

    Attributes:
        kind: what the log calls it.
        head_max_nbytes: as long are the receives that stand ready.
        rank: rank within the group.
        size: number of ranks that it joins.
        hosts: of each rank that it joins, as a number.
        needs_last_byte_apart: it does not wake a receive that is being filled. So a receiver waits
            for the last byte first, which is posted until all before it has come.
        is_interruptible: its waits are torch's, in C++.
        ahead: with more pieces than that posted no receipt could leave: 1 GiB arrived in 9 s on a
            busy machine, and so did all its receipts.
    """

    kind = "Gloo"
    head_max_nbytes = WINDOW_NBYTES
    needs_last_byte_apart = True
    is_interruptible = False
    ahead = 4

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        members: tuple[int, ...],
        hosts: tuple[int, ...],
        deadline: Deadline,
    ) -> None:
        """Connect to each other rank; may block in C++ up to the limit.

        Args:
            store: a connection to it that no other thread uses, with a prefix that is this link's
                alone.
            rank: this one, within the group.
            members: those that it joins, as ranks within the group; they have met.
            hosts: of each of them.
            deadline: how long to wait.

        Raises:
            DistNetworkError: the store is gone.
            LinkClosed: another rank was lost, or does not answer.
            LinkError: this process can't connect to any.
        """
        try:
            self._connect(store, rank, members, hosts, deadline)
        except dist.DistNetworkError:
            raise
        except RuntimeError as error:
            raise _in_vain(error) from error
        except OSError as error:
            raise LinkError(str(error)) from error

    def _connect(
        self,
        store: dist.Store,
        rank: int,
        members: tuple[int, ...],
        hosts: tuple[int, ...],
        deadline: Deadline,
    ) -> None:
        self.rank = rank
        self.size = size = len(members)
        self._places = {member: place for place, member in enumerate(members)}
        place = self._places[rank]
        self.hosts = hosts
        # All ranks are here: one that dies now must not hold this thread for as long as a call.
        limit = min(deadline.left(), CONNECT_MAX / _ATTEMPTS)
        see_room_for(size)
        before = open_sockets()
        # Any: torch's stubs leave out point-to-point of a backend.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001  # there is no public way
        options._devices = self._devices = _devices.chosen()  # noqa: SLF001  # likewise
        options._timeout, options._threads = limit, 0  # noqa: SLF001  # likewise
        self._mesh: Any = gloo(store, place, size, options)
        self._apart = Apart()
        self._standing: dict[tuple[int, int], _StandingReceive] = {}
        self._prompted = Signal()
        if len(set(self.hosts)) > 1:
            notice_outages(before, deadline.settings.lost_after)

    def sharing_with(self, peer: int) -> None:
        """See ``Link``: it copies all."""

    def send(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        try:
            if not isinstance(flat, torch.Tensor):  # it takes nothing else
                flat = torch.frombuffer(bytearray(flat), dtype=torch.uint8)
            return _begun(self._mesh.send, flat, self._places[peer], tag)
        except RuntimeError as error:
            raise _ended(error) from error

    def recv(self, flat: Memory, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        try:
            return _begun(self._mesh.recv, flat, self._places[peer], tag)
        except RuntimeError as error:
            raise _ended(error) from error

    def wait(self, pending: Pending, limit: timedelta) -> None:
        """See ``Link``."""
        try:
            pending.wait(limit)
        except RuntimeError as error:
            raise _ended(error) from error

    def expect(self, peers: Sequence[int], tag: int) -> None:
        """See ``Link``."""
        for peer in peers:
            if (peer, tag) not in self._standing:
                with contextlib.suppress(LinkError):
                    self._standing[peer, tag] = _StandingReceive(self, peer, tag)

    def take(self, peer: int, tag: int, until: float) -> bytes:
        """See ``Link``."""
        standing = self._standing.get((peer, tag))
        if standing is None:
            standing = self._standing[peer, tag] = _StandingReceive(self, peer, tag)
        return standing.take(until)

    def attend(self, peer: int, accepts: Mapping[int, Callable[[bytes], bool]]) -> NoReturn:
        """See ``Connections``: a thread for each tag takes all in, because each waits in Gloo."""
        failed: list[BaseException] = []

        def attend_to(tag: int, accept: Callable[[bytes], bool]) -> None:
            try:
                self._take_all(peer, tag, accept)
            except LinkClosed:
                pass
            except BaseException as error:  # noqa: BLE001  # raised by the calling thread
                failed.append(error)
                self.abort()

        first, *others = accepts.items()
        name = threading.current_thread().name
        threads = [
            threading.Thread(target=attend_to, args=each, name=name, daemon=True) for each in others
        ]
        for each in threads:
            each.start()
        try:
            self._take_all(peer, *first)
        except LinkClosed:
            for each in threads:
                each.join()
            if failed:
                raise failed.pop() from None
            raise

    def _take_all(self, peer: int, tag: int, accept: Callable[[bytes], bool]) -> NoReturn:
        while True:
            message = self.take(peer, tag, math.inf)
            while not accept(message):
                if self._prompted.wait(_LOOK_SECONDS):
                    self._prompted = Signal()

    def prompt(self, peer: int) -> None:  # noqa: ARG002  # one signal is for all peers
        """See ``Connections``."""
        self._prompted.set()

    def signal(self) -> Awaitable:
        """See ``Connections``: Gloo's thread moves all."""
        return Signal()

    def has_come(self, peer: int, tag: int) -> bool:  # noqa: ARG002  # to ask is to wait for it
        """See ``Link``."""
        return False

    def came_late(self, peer: int, tag: int) -> bool:
        """See ``Link``: a transfer that is done says so even after the link has broken."""
        standing = self._standing.get((peer, tag))
        return standing is not None and standing.has_come()

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``.

        A small send can be forgotten, too, if the peer has reset the connection and Gloo has not
        noticed yet: of 400 interrupts on a busy machine one left another rank waiting so.
        """
        try:
            self._apart.do(wait)
        except AbandonedError as error:
            raise _ended(error) from error

    def is_interrupted(self) -> bool:
        """See ``Link``: it has no steps in Python."""
        return False

    def move(self, *, is_awaited: bool = True) -> None:
        """See ``Link``: Gloo's thread does."""

    def farewell_of(self, peer: int) -> bytes:  # noqa: ARG002  # see below
        """See ``Connections``; Gloo carries nothing beside what it was asked for."""
        return b""

    def abort(self, farewell: bytes = b"") -> None:  # noqa: ARG002  # likewise
        """See ``Link``: a receive that times out closes all of this rank's connections."""
        for peer in self.peers():
            # To each in turn: a connection that is closed already refuses, and closes no other.
            self._poke(peer)
        self._apart.abandon()

    def call(self, peer: int) -> None:
        """See ``Connections``: all are connected from the beginning."""

    def await_delivery(self, until: float) -> None:
        """See ``Connections``: nothing of it can be seen here."""

    def closed(self) -> Sequence[int]:
        """See ``Connections``."""
        return [peer for peer in self.peers() if self.is_closed(peer)]

    def has_lost_all(self) -> bool:
        """See ``Connections``."""
        return len(self.closed()) == self.size - 1

    def peers(self) -> list[int]:
        """All ranks that it joins but this one."""
        return [peer for peer in self._places if peer != self.rank]

    def has_lost_any(self) -> bool:
        """See ``Connections``: what tells of one connection's end here leaves bytes behind."""
        return False

    def is_closed(self, peer: int) -> bool:
        """See ``Connections``: what begins a receive is told of the end of a connection."""
        return bool(self._why_closed(peer))

    def is_out_of_reach(self, peer: int) -> bool:
        """See ``Connections``."""
        return HOST_LOST in self._why_closed(peer)

    def _why_closed(self, peer: int) -> str:
        try:
            self.recv(empty(1), peer, POKE_TAG)
        except LinkClosed as error:
            return error.reason
        return ""

    def beside(self, peers: Collection[int]) -> Sequence[int]:
        """See ``Connections``."""
        theirs = {self.hosts[self._places[peer]] for peer in peers}
        return [peer for peer in self.peers() if self.hosts[self._places[peer]] in theirs]

    def closed_by(self) -> Sequence[int]:
        """See ``Connections``."""
        told = {peer: self._poke(peer) for peer in self.peers()}
        # A connection on which this could time out was open: another thread is about to abort.
        return [peer for peer, each in told.items() if _OWN_DOING not in each and _LATE not in each]

    def has_unread(self, peer: int) -> bool:  # noqa: ARG002  # Gloo's thread takes in what comes
        """See ``Connections``."""
        return False

    def unread(self) -> Sequence[bytes]:
        """See ``Connections``: there is no probe."""
        return ()

    def refuse(self) -> None:
        """See ``Connections``: a message stays with its sender until it is asked for."""

    def _poke(self, peer: int) -> str:
        """Begin a receive that ends at once, and say how."""
        try:
            _begun(self._mesh.recv, empty(1), self._places[peer], POKE_TAG).wait(_INSTANT)
        except RuntimeError as error:
            return str(error)
        return ""


class _StandingReceive:
    """A receive of one peer's next first message, posted again whenever one was taken.

    Gloo sends a message when it has heard that its receive is posted. So a peer's message need not
    wait until this rank enters the operation: broadcasting 1 KiB to 3 ranks took 275 µs so instead
    of 400, to 7 ranks 0.8 ms instead of 3.3.
    """

    def __init__(self, link: GlooLink, peer: int, tag: int) -> None:
        self._raw = bytearray(WINDOW_NBYTES)
        self._flat = torch.frombuffer(self._raw, dtype=torch.uint8)
        self._link = weakref.proxy(link)  # which holds this
        self._peer = peer
        self._tag = tag
        self._pending: Pending = link.recv(self._flat, peer, tag)
        self._refusal = ""

    def take(self, until: float) -> bytes:
        """Wait for the message, and post the next receive; see ``Link.take``."""
        if self._refusal:
            raise LinkClosed(self._refusal)
        left = min(until - time.monotonic(), FOREVER_SECONDS)
        try:
            self._pending.wait(max(_INSTANT, timedelta(seconds=left)))
        except RuntimeError as error:
            raise _ended(error) from error
        message = bytes(self._raw)
        # The last one must not stay in its place: a second wait for a transfer may have no end.
        try:
            self._pending = self._link.recv(self._flat, self._peer, self._tag)
        except LinkClosed as error:  # the peer may have left after its message
            self._refusal = error.reason
        return message

    def has_come(self) -> bool:
        """Whether the message is there, for which nobody has waited."""
        try:
            return not self._refusal and bool(self._pending.wait(_INSTANT))
        except RuntimeError:
            return False


def see_room_for(size: int) -> None:
    """Raise where this process can't open the files that it takes to connect so many ranks.

    Gloo's thread ends the process if there is none for a rank that connects, and torch tries for a
    minute to connect to the store.

    Raises:
        OSError: it can't.
    """
    opened = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    try:
        for _ in range(size - 1 + _SPARE_FILES):
            opened.append(os.dup(opened[0]))  # those before the error are closed
    finally:
        for each in opened:
            os.close(each)


def _ended(error: RuntimeError) -> LinkError:
    """What Gloo raised, in the words of links."""
    told = reason_of(error)
    if _LATE in told:
        return LinkTimeout(told)
    return LinkClosed(f"{HOST_LOST if is_outage(told) else PEER_LOST} ({told})")


def _in_vain(error: RuntimeError) -> LinkError:
    """The same of connections that were not made."""
    told = str(error)
    return LinkClosed(told) if any(each in told for each in _OF_A_PEER) else LinkError(told)


def is_cut_off(group: dist.ProcessGroup, peer: int) -> bool:
    """Whether a process group's own Gloo connection to one of its ranks has closed.

    Moves nothing, and closes nothing: what begins a receive that nobody answers is told of the end
    of a connection. Each such receive keeps 130 bytes until the group is destroyed.
    """
    backend: Any = None
    with contextlib.suppress(RuntimeError):  # it has none for CPU memory
        backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001  # no public way
    if not isinstance(backend, dist.ProcessGroupGloo):
        return False
    receive: Callable[..., Pending] = backend.recv  # type: ignore[attr-defined]  # not in torch's stubs
    try:
        _begun(receive, empty(1), peer, POKE_TAG)
    except RuntimeError:
        return True
    return False


def _begun(begin: Callable[..., Pending], flat: Memory, place: int, tag: int) -> Pending:
    """Begin a transfer that ``torch.profiler`` does not see.

    Of one that it sees, the time of its end is written into the profiler's memory, even when the
    profiler was stopped before and that memory is somebody else's: torch 2.13 damages the heap so,
    with a plain ``irecv`` too. A receive that stands ready outlives any ``with profile()``.
    """
    if not _profiler._is_profiler_enabled:  # noqa: SLF001  # torch.optim's own way to ask
        return begin([flat], place, tag)
    torch.autograd._enable_record_function(False)  # noqa: SLF001, FBT003  # there is no public way
    try:
        return begin([flat], place, tag)
    finally:
        torch.autograd._enable_record_function(True)  # noqa: SLF001, FBT003  # likewise
