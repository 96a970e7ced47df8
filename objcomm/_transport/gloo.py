"""The link of ranks that can't use streams: a private Gloo process group.

The user's process group carries none of its traffic, so a timeout or an abort here closes none of
the user's connections. On a shared Gloo group it would close all of them, and end DDP.

This module contains everything that is peculiar to Gloo, as of torch 2.13. ``link`` describes the
consequences without naming it:

- Its errors are ``RuntimeError``; only their text distinguishes them.
- A wait whose limit passes closes all connections of this rank. ``abort`` uses such a wait, because
  ``ProcessGroup.abort()`` does not wake a waiting operation.
- When a connection closes (``Pair::signalException``), Gloo wakes waits for receives, and for sends
  that the peer has not asked for yet. It forgets the receive that is being filled (``rx_``) and the
  send that is in progress (the ``ubuf`` in ``tx_``): a wait for one of those lasts until the limit.
  Hence the separate last byte, and ``wait_apart``.
- A message is sent only after the peer has reported that its receive is posted. A receiver whose
  memory is too short aborts its process.
- A receive counts its arrivals: a second wait for one that has ended never returns.
- A receive that is being filled must be kept alive. If its work object is gone, nothing more is
  read from that connection, not even its end, and Gloo's thread spins.
- While bytes are available, its thread keeps reading with the connection locked, and nothing can be
  sent.
- A receive from any source is woken neither by a death nor by an abort, and there is no probe. So
  ``link`` has neither.
- If no file can be opened for a connecting rank, Gloo's thread ends the process.
- It leaves its addresses in the store.
- A device, which has a thread and a port, can serve any number of process groups, unless it
  connects on first use (``lazy_init``). Such a device identifies connections by the ranks within
  their groups, so it mixes up those of two groups, and the first group that is destroyed takes the
  device's thread with it. It is unsuitable even for one group: beginning a send to a peer that has
  begun nothing itself blocks until the peer does, or for 30 s.
- A process group's own threads run its collectives, which are not used here.
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
    Pieces,
)
from objcomm._transport.sockets import is_outage, notice_outages, open_sockets
from objcomm._transport.store import reason_of
from objcomm._transport.threads import AbandonedError, Apart, Signal
from objcomm._wire.header import WINDOW_NBYTES
from objcomm._world import CONNECT_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


# Part of Gloo's error for connections that it closed because a wait of this rank timed out, and
# part of the error of that wait.
_OWN_DOING = "Application timeout"
_LATE = "Timed out"

# Parts of its errors if a connection can't be made because of the other end. Any other error is
# this process's own: no descriptors, no threads, no such network interface.
_OF_A_PEER = ("onnect", "imed out", "imeout")

#: No message ever has this tag, which none of ``link``'s functions returns.
POKE_TAG = (1 << 31) - 1

# For a device, the store and other files that the process opens at that time.
_SPARE_FILES = 8

# How often Gloo tries to connect to a rank, each time until its limit passes: a limit of 3 s takes
# 15.3 s.
_ATTEMPTS = 5

# How often a rank that could not accept a message tries again.
_LOOK_SECONDS = 0.5

# Gloo takes zero to mean its default.
_INSTANT = timedelta(milliseconds=1)

_profiler = torch.autograd.profiler


class _Devices:
    """This process's devices, shared by all of its links while there are any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_interface = weakref.WeakValueDictionary[tuple[int, str], Any]()

    def chosen(self) -> list[Any]:
        """Return devices for the interfaces that the user names for Gloo, or for the host's name.

        Raises:
            RuntimeError: there is no such interface, or the host has no address.
        """
        # As torch reads it (init.cpp). A forked child does not have its parent's threads.
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
    """Return the keys of ``size`` ranks' addresses (c10d::ProcessGroupGloo, first context)."""
    return [f"0/{place}" for place in range(size)]


class GlooLink:
    """Connects ranks of one group by a private ``ProcessGroupGloo``.

    The constructor is a collective call.

    Attributes:
        kind: its name in the log.
        head_max_nbytes: length of the receives that are always posted.
        rank: this rank within the group.
        size: number of ranks that it connects.
        hosts: host number of each rank that it connects.
        needs_last_byte_apart: True, because Gloo does not wake a receive that is being filled. So a
            receiver first waits for the last byte, whose receive can be woken until all other bytes
            have arrived.
        is_interruptible: False, because its waits are torch's, in C++.
        ahead: with more pieces posted, no receipt could be sent: 1 GiB arrived in 9 s on a busy
            machine, and all of its receipts only then.
        shares_memory: False; Gloo copies everything.
    """

    kind = "Gloo"
    head_max_nbytes = WINDOW_NBYTES
    needs_last_byte_apart = True
    is_interruptible = False
    ahead = 4
    shares_memory = False

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
            store: a store connection that no other thread uses, with a prefix for this link alone.
            rank: this rank within the group.
            members: the ranks to connect, as ranks within the group; they have met.
            hosts: host number of each of them.
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
            raise _connect_error(error) from error
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
        # All ranks have met, so a rank that dies now must not block this thread for a call's limit.
        limit = min(deadline.left(), CONNECT_MAX / _ATTEMPTS)
        see_room_for(size)
        before = open_sockets()
        # Any: torch's stubs omit a backend's point-to-point operations.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001  # no public API
        options._devices = self._devices = _devices.chosen()  # noqa: SLF001  # likewise
        options._timeout, options._threads = limit, 0  # noqa: SLF001  # likewise
        self._mesh: Any = gloo(store, place, size, options)
        self._apart = Apart()
        self._standing: dict[tuple[int, int], _StandingReceive] = {}
        self._prompted = Signal()
        if len(set(self.hosts)) > 1:
            notice_outages(before, deadline.settings.lost_after)

    def sharing_with(self, peer: int) -> None:
        """See ``Link``. Gloo copies everything."""

    def send(self, flat: Memory | Pieces, peer: int, tag: int) -> Pending:
        """See ``Link``."""
        try:
            if not isinstance(flat, torch.Tensor):  # Gloo takes nothing else
                pieces = flat if isinstance(flat, list) else [flat]
                flat = torch.frombuffer(bytearray().join(pieces), dtype=torch.uint8)
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
        """See ``Connections``. Each tag has a thread, because each waits in Gloo."""
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

    def prompt(self, peer: int) -> None:  # noqa: ARG002  # one signal for all peers
        """See ``Connections``."""
        self._prompted.set()

    def signal(self) -> Awaitable:
        """See ``Connections``. Gloo's thread moves the bytes."""
        return Signal()

    def has_come(self, peer: int, tag: int) -> bool:  # noqa: ARG002  # checking would mean waiting for it
        """See ``Link``."""
        return False

    def came_late(self, peer: int, tag: int) -> bool:
        """See ``Link``. A completed transfer reports that even after the link has broken."""
        standing = self._standing.get((peer, tag))
        return standing is not None and standing.has_come()

    def wait_apart(self, wait: Callable[[], None]) -> None:
        """See ``Link``.

        A small send can be forgotten, too, if the peer has reset the connection and Gloo has not
        noticed yet: 1 of 400 interrupts on a busy machine left another rank waiting.
        """
        try:
            self._apart.do(wait)
        except AbandonedError as error:
            raise _ended(error) from error

    def is_interrupted(self) -> bool:
        """See ``Link``. It has no steps in Python."""
        return False

    def move(self, *, is_awaited: bool = True) -> None:
        """See ``Link``. Gloo's thread moves the bytes."""

    def farewell_of(self, peer: int) -> bytes:  # noqa: ARG002  # see below
        """See ``Connections``. Gloo carries nothing but requested messages."""
        return b""

    def abort(self, farewell: bytes = b"") -> None:  # noqa: ARG002  # likewise
        """See ``Link``. A receive that times out closes all of this rank's connections."""
        for peer in self.peers():
            # Tried for each peer, because a closed connection refuses it and closes no other.
            self._poke(peer)
        self._apart.abandon()

    def call(self, peer: int) -> None:
        """See ``Connections``. All ranks are connected from the beginning."""

    def await_delivery(self, until: float) -> None:
        """See ``Connections``. Gloo does not show what was delivered."""

    def closed(self) -> Sequence[int]:
        """See ``Connections``."""
        return [peer for peer in self.peers() if self.is_closed(peer)]

    def has_lost_all(self) -> bool:
        """See ``Connections``."""
        return len(self.closed()) == self.size - 1

    def peers(self) -> list[int]:
        """Return all ranks that it connects but this one."""
        return [peer for peer in self._places if peer != self.rank]

    def has_lost_any(self) -> bool:
        """See ``Connections``. The only check, beginning a receive, leaks a few bytes each time."""
        return False

    def is_closed(self, peer: int) -> bool:
        """See ``Connections``. Beginning a receive fails if the connection has ended."""
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
        answers = {peer: self._poke(peer) for peer in self.peers()}
        # A connection on which this timed out was open: another thread is about to abort.
        return [
            peer for peer, each in answers.items() if _OWN_DOING not in each and _LATE not in each
        ]

    def has_unread(self, peer: int) -> bool:  # noqa: ARG002  # Gloo's thread reads everything
        """See ``Connections``."""
        return False

    def unread(self) -> Sequence[bytes]:
        """See ``Connections``. There is no probe."""
        return ()

    def refuse(self) -> None:
        """See ``Connections``. A message stays with its sender until it is asked for."""

    def _poke(self, peer: int) -> str:
        """Begin a receive that ends immediately, and return its error; empty if there is none."""
        try:
            _begun(self._mesh.recv, empty(1), self._places[peer], POKE_TAG).wait(_INSTANT)
        except RuntimeError as error:
            return str(error)
        return ""


class _StandingReceive:
    """A receive of one peer's next first message, posted again whenever one is taken.

    Gloo sends a message once it has learned that its receive is posted. With this, a peer's message
    need not wait until this rank enters the operation: broadcasting 1 KiB to 3 ranks takes 275 µs
    instead of 400, and to 7 ranks 0.8 ms instead of 3.3.
    """

    def __init__(self, link: GlooLink, peer: int, tag: int) -> None:
        self._raw = bytearray(WINDOW_NBYTES)
        self._flat = torch.frombuffer(self._raw, dtype=torch.uint8)
        self._link = weakref.proxy(link)  # the link refers to this object
        self._peer = peer
        self._tag = tag
        self._pending: Pending = link.recv(self._flat, peer, tag)
        self._refusal = ""

    def take(self, until: float) -> bytes:
        """Wait for the message and post the next receive; see ``Link.take``."""
        if self._refusal:
            raise LinkClosed(self._refusal)
        left = min(until - time.monotonic(), FOREVER_SECONDS)
        try:
            self._pending.wait(max(_INSTANT, timedelta(seconds=left)))
        except RuntimeError as error:
            raise _ended(error) from error
        message = bytes(self._raw)
        # The completed receive must not stay there: a second wait for it may never return.
        try:
            self._pending = self._link.recv(self._flat, self._peer, self._tag)
        except LinkClosed as error:  # the peer may have left after its message
            self._refusal = error.reason
        return message

    def has_come(self) -> bool:
        """Return whether the message that was not waited for is complete."""
        try:
            return not self._refusal and bool(self._pending.wait(_INSTANT))
        except RuntimeError:
            return False


def see_room_for(size: int) -> None:
    """Raise if this process can't open the files that are needed to connect ``size`` ranks.

    Gloo's thread ends the process if there is no file for a connecting rank, and torch tries for a
    minute to connect to the store.

    Raises:
        OSError: it can't.
    """
    opened = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    try:
        for _ in range(size - 1 + _SPARE_FILES):
            opened.append(os.dup(opened[0]))  # those before an error are closed
    finally:
        for each in opened:
            os.close(each)


def _ended(error: RuntimeError) -> LinkError:
    """Return the link's error for one that Gloo raised."""
    reason = reason_of(error)
    if _LATE in reason:
        return LinkTimeout(reason)
    return LinkClosed(f"{HOST_LOST if is_outage(reason) else PEER_LOST} ({reason})")


def _connect_error(error: RuntimeError) -> LinkError:
    """Return the link's error for one that Gloo raised while connecting."""
    reason = str(error)
    return LinkClosed(reason) if any(each in reason for each in _OF_A_PEER) else LinkError(reason)


def is_cut_off(group: dist.ProcessGroup, peer: int) -> bool:
    """Return whether a process group's own Gloo connection to one of its ranks has closed.

    Moves nothing and closes nothing: beginning a receive that nothing answers fails if the
    connection has ended. Each such receive occupies 130 bytes until the group is destroyed.
    """
    backend: Any = None
    with contextlib.suppress(RuntimeError):  # it has no backend for CPU memory
        backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001  # no public API
    if not isinstance(backend, dist.ProcessGroupGloo):
        return False
    receive: Callable[..., Pending] = backend.recv  # type: ignore[attr-defined]  # not in torch's stubs
    try:
        _begun(receive, empty(1), peer, POKE_TAG)
    except RuntimeError:
        return True
    return False


def _begun(begin: Callable[..., Pending], flat: Memory, place: int, tag: int) -> Pending:
    """Begin a transfer that ``torch.profiler`` does not record.

    When a recorded transfer ends, its end time is written into the profiler's memory, even if the
    profiler has stopped and that memory has been reused. Torch 2.13 corrupts the heap that way,
    with a plain ``irecv``, too. A receive that stays posted outlives any ``with profile()``.
    """
    if not _profiler._is_profiler_enabled:  # noqa: SLF001  # as torch.optim checks
        return begin([flat], place, tag)
    torch.autograd._enable_record_function(False)  # noqa: SLF001, FBT003  # no public API
    try:
        return begin([flat], place, tag)
    finally:
        torch.autograd._enable_record_function(True)  # noqa: SLF001, FBT003  # likewise
