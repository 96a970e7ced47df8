"""Moves the bytes of a link's sockets, on the threads that wait for them.

There is no dedicated thread. One of the waiting threads, the *leader*, runs the loop for all of
them: it sleeps until any socket is readable or writable, handles it, and wakes the threads whose
waits are over. When its own wait is over, another waiting thread becomes the leader.

In a series of calls, falling asleep and waking up takes longer than most waits. So a rank that has
its own core polls for ``SPIN_SECONDS`` before it sleeps, unless its last wait took longer.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from objcomm._transport.link import LinkClosed, LinkError, LinkTimeout
from objcomm._transport.pending import Awaited
from objcomm._transport.threads import guard

if TYPE_CHECKING:
    from collections.abc import Callable

#: How long a wait may poll before it sleeps. In a series of broadcasts between two ranks with one
#: core each, a broadcast takes 123 µs without polling, 120 µs with a quarter of this limit (most
#: waits last longer) and 66 µs with all of it. The processor time is the same: sleeping and waking
#: up costs as much.
SPIN_SECONDS = 200e-6
# The system counts milliseconds in 31 bits.
_SLEEP_MAX_SECONDS = 1e6

# Only Linux has these constants and this link, but the module is imported on other systems, too.
#: The events that are watched on every socket, and those that mean that the other end closed it.
READS = sum(getattr(select, name, 0) for name in ("EPOLLIN", "EPOLLRDHUP"))
ENDS = sum(getattr(select, name, 0) for name in ("EPOLLRDHUP", "EPOLLHUP", "EPOLLERR"))

OWN_DOING = "this rank has closed its connections"
IN_A_HANDLER = "a signal's handler has used connections that it had interrupted"


class EventHandler(Protocol):
    """An owner of sockets."""

    def handle(self, descriptor: int, event: int) -> None:
        """Move what can be moved on one of its sockets; called with the loop's lock held."""


class EventLoop:
    """See the module docstring.

    Attributes:
        lock: held during each step of the link. It knows its owner, because a signal handler must
            not wait for the code that it has interrupted.
        is_interrupted: see ``Link``.
        is_aborted: whether moving has stopped for good.
        leader_wait: what the leader itself waits for; None if there is no leader.
        sockets: the handler of each descriptor.
        events: the epoll object on which the leader sleeps.
    """

    def __init__(self, spin_seconds: float) -> None:
        """Create the epoll object and the sockets that wake the leader.

        Args:
            spin_seconds: how long a wait may poll before it sleeps.
        """
        self._spin_seconds = spin_seconds
        self._waited_seconds = math.inf  # of the last thread that moved until its wait was over
        self._waited_until = -math.inf  # when that wait ended
        self.sockets: dict[int, EventHandler] = {}
        # A byte sent here wakes the leader.
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self.events = select.epoll()
        self.events.register(self._wake_receiver, select.EPOLLIN)
        for end in (self._wake_sender, self._wake_receiver):
            end.settimeout(0)
        self.lock = guard()
        # As threading.Condition does. A plain attribute, because every message checks it.
        self.is_interrupted: Callable[[], bool] = self.lock._is_owned  # noqa: SLF001  # see above
        self.is_aborted = False
        self.leader_wait: Awaited | None = None
        self._leader = 0  # a thread identifier
        self._waiting: deque[Awaited] = deque()

    def watch(self, end: socket.socket, handler: EventHandler) -> None:
        """Handle the events of a socket."""
        self.sockets[end.fileno()] = handler
        self.events.register(end, READS)

    def unwatch(self, end: socket.socket) -> None:
        """Stop handling a socket, which may be closed already."""
        self.sockets.pop(end.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self.events.unregister(end)

    def close_socket(self, end: socket.socket) -> None:
        """Close a socket, which may be watched, and may be closed already."""
        self.unwatch(end)
        hang_up(end)
        end.close()

    def close(self) -> None:
        """Close the sockets that wake the leader, after moving has stopped."""
        self._wake_sender.close()
        self._wake_receiver.close()
        self.sockets.clear()  # they may refer to this loop

    # ------------------------------------------------------------------ waits

    def run_until_over(  # noqa: C901, PLR0912  # one loop: a function for each step would cost a call
        self, awaited: Awaited, until: float
    ) -> None:
        """Move bytes until a wait is over, or sleep until the thread that moves them ends it.

        Args:
            awaited: what to wait for.
            until: when to give up, on the clock of ``time.monotonic``.

        Raises:
            LinkTimeout: that time came first.
            LinkClosed: the link was aborted.
            LinkError: called from a signal handler that has interrupted a step of the link.
        """
        if self.is_interrupted():
            raise LinkError(IN_A_HANDLER)
        me = threading.get_ident()
        while True:
            turn = None
            with self.lock:
                if awaited.is_over:
                    return
                if self._leader not in (0, me):
                    turn = awaited.turn = threading.Lock()
                    turn.acquire()
                    self._waiting.append(awaited)
                else:
                    # If a signal handler interrupted the leader's sleep, this thread is the leader.
                    before = self._leader, self.leader_wait
                    self._leader, self.leader_wait = me, awaited
            if turn is None:
                began = time.monotonic()
                is_likely_short = self._waited_seconds <= self._spin_seconds
                try:
                    while (left := until - time.monotonic()) > 0 and not self.is_aborted:
                        if is_likely_short:
                            self._spin(min(until, began + self._spin_seconds))
                        self._run_once(min(left, _SLEEP_MAX_SECONDS))
                        if awaited.is_over:
                            break
                finally:
                    self._waited_until = now = time.monotonic()
                    self._waited_seconds = now - began
                    with self.lock:
                        self._leader, self.leader_wait = before
                        if before[0]:
                            self.wake_leader_if_over()  # its wait may have ended in the meantime
                        elif self._waiting:
                            self._wake_one()
            else:
                try:
                    left = until - time.monotonic()
                    turn.acquire(timeout=min(max(0.0, left), _SLEEP_MAX_SECONDS))
                finally:
                    self._take_back(awaited)
            if awaited.is_over:
                return
            if self.is_aborted:
                raise LinkClosed(OWN_DOING)
            if time.monotonic() >= until:
                raise LinkTimeout("timeout")

    def _spin(self, until: float) -> None:
        """Poll until something can be moved, or until ``until``."""
        while time.monotonic() < until and not self.events.poll(0):
            os.sched_yield()  # another thread may need this core

    def _take_back(self, awaited: Awaited) -> None:
        """Stop waiting; if this thread was made the leader too late, pick the next one."""
        with self.lock:
            awaited.turn = None
            if awaited in self._waiting:
                self._waiting.remove(awaited)
            elif not self._leader:
                self._wake_one()

    def _wake_one(self) -> None:
        """Make one of the waiting threads the leader."""
        while self._waiting:
            awaited = self._waiting.popleft()
            turn, awaited.turn = awaited.turn, None
            if turn is not None:  # else its wait is over, and it was woken
                turn.release()
                return

    # ------------------------------------------------------------------ other threads

    def is_in_use(self, seconds: float) -> bool:
        """Return whether a waiting thread moves bytes, or did so within the last ``seconds``."""
        return self.leader_wait is not None or time.monotonic() < self._waited_until + seconds

    def end(self, awaited: Awaited) -> None:
        """End a wait; any thread may call this."""
        # After its own step the leader checks its wait; another thread's step must wake it.
        is_leaders_step = self._leader == threading.get_ident() and self.is_interrupted()
        with self.lock:
            awaited.is_over = True
            if awaited.turn is not None:
                awaited.end()
            elif self.leader_wait is awaited and not is_leaders_step:
                self.wake_leader()

    def wake_leader_if_over(self) -> None:
        """Wake the leader if another thread has ended its wait."""
        if self.leader_wait is not None and self.leader_wait.is_over:
            self.wake_leader()

    def wake_leader(self) -> None:
        """Wake the leader."""
        with contextlib.suppress(BlockingIOError):  # it has not read the earlier bytes yet
            self._wake_sender.send(b"!")

    def wake_all(self) -> None:
        """Make every waiting thread check its state again; the caller holds the lock."""
        while self._waiting:
            self._wake_one()
        self.wake_leader()

    # ------------------------------------------------------------------ moving

    def handle_pending(self) -> None:
        """Handle the events that are pending, unless another thread is about to."""
        if self.is_interrupted() or not self.lock.acquire(blocking=False):
            return
        me = threading.get_ident()
        try:
            if self._leader not in (0, me):
                return
            before = self._leader, self.leader_wait
            self._leader = me
        finally:
            self.lock.release()
        try:
            self._run_once(0.0)
        finally:
            with self.lock:  # as in ``run_until_over``
                self._leader, self.leader_wait = before
                if before[0]:
                    self.wake_leader_if_over()
                else:
                    self._wake_one()

    def _run_once(self, seconds: float) -> None:
        """Handle the events that come within ``seconds``."""
        events = self.events.poll(seconds)
        if not events:
            return
        with self.lock:
            for descriptor, event in events:
                handler = self.sockets.get(descriptor)
                if handler is not None:
                    handler.handle(descriptor, event)
                # After an abort the byte stays there, so that attending threads wake up as well.
                elif descriptor == self._wake_receiver.fileno() and not self.is_aborted:
                    with contextlib.suppress(BlockingIOError):  # a signal handler has read it
                        self._wake_receiver.recv(64)


class Signal(Awaited):
    """See ``Connections.signal``."""

    __slots__ = ("_link", "_loop")

    def __init__(self, loop: EventLoop, link: object) -> None:
        """Create a signal that is not set.

        Args:
            loop: moves bytes while a thread waits.
            link: the loop's link, which closes it when it is garbage-collected; it must outlive
                the wait.
        """
        super().__init__()
        self._loop = loop
        self._link = link

    def set(self) -> None:
        """See ``Awaitable``."""
        self._loop.end(self)

    def wait(self, seconds: float = -1) -> bool:
        """See ``Awaitable``."""
        until = math.inf if seconds < 0 else time.monotonic() + seconds
        try:
            self._loop.run_until_over(self, until)
        except LinkTimeout:
            pass
        except LinkError:  # nothing moves any more; the thread that knows the reason sets this
            turn = threading.Lock()
            turn.acquire()
            self.turn = turn
            if not self.is_over:
                turn.acquire(timeout=seconds)
        return self.is_over


def hang_up(end: socket.socket) -> None:
    """End a stream, even if a process forked in the meantime has a copy of its socket."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
