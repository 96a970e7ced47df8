"""Moves what comes and goes over a link's sockets, on the threads that wait for it.

There is no thread for that. A thread that waits moves whatever can be moved, for all: the *mover*
sleeps until any socket has bytes or room, handles them, and wakes the threads whose waits are over.
When its own wait is over, the next thread that waits becomes the mover.

Falling asleep and being woken takes longer than most waits in a row of calls. So a rank with a core
of its own polls for ``SPIN_SECONDS`` before it sleeps, unless its last wait took longer than that.
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

#: How long a wait may poll before it sleeps. In a row of broadcasts between two ranks, each with a
#: core, one takes 123 µs without this, 120 µs with a quarter of it, which most waits outlast, and
#: 66 µs with all of it. The processor's time is the same: to sleep and be woken costs as much.
SPIN_SECONDS = 200e-6
# The system counts milliseconds in 31 bits.
_SLEEP_MAX_SECONDS = 1e6

# Other systems than Linux have none of these, and no such link; but this module is imported there.
#: What is waited for on every socket, and what says that the other end has closed it.
READS = sum(getattr(select, name, 0) for name in ("EPOLLIN", "EPOLLRDHUP"))
ENDS = sum(getattr(select, name, 0) for name in ("EPOLLRDHUP", "EPOLLHUP", "EPOLLERR"))

OWN_DOING = "this rank has closed its connections"
IN_A_HANDLER = "a signal's handler has used connections that it had interrupted"


class Socketed(Protocol):
    """What sockets belong to."""

    def handle(self, descriptor: int, event: int) -> None:
        """Move what can be moved over one of its sockets, with the mover's lock held."""


class Mover:
    """See the module.

    Attributes:
        lock: held in each step of the link. It knows its owner: a signal's handler must not wait
            for what it has interrupted.
        is_interrupted: see ``Link``.
        is_aborted: whether nothing moves any more.
        moved_for: what the mover itself waits for; None if there is no mover.
        sockets: to whom each descriptor belongs.
        events: where the mover sleeps.
    """

    def __init__(self, spin_seconds: float) -> None:
        """Begin.

        Args:
            spin_seconds: for how long a wait may poll before it sleeps.
        """
        self._spin_seconds = spin_seconds
        self._waited_seconds = math.inf  # by the last thread that moved until its wait was over
        self._waited_until = -math.inf  # when that was
        self.sockets: dict[int, Socketed] = {}
        # A byte in there wakes the mover.
        self._alarm, self._heard = socket.socketpair()
        self.events = select.epoll()
        self.events.register(self._heard, select.EPOLLIN)
        for end in (self._alarm, self._heard):
            end.settimeout(0)
        self.lock = guard()
        # As threading.Condition asks. A plain attribute: it is asked for each message.
        self.is_interrupted: Callable[[], bool] = self.lock._is_owned  # noqa: SLF001  # see above
        self.is_aborted = False
        self.moved_for: Awaited | None = None
        self._mover = 0  # a thread's number
        self._waiting: deque[Awaited] = deque()

    def watch(self, end: socket.socket, handler: Socketed) -> None:
        """Handle what comes over a socket."""
        self.sockets[end.fileno()] = handler
        self.events.register(end, READS)

    def unwatch(self, end: socket.socket) -> None:
        """Handle it no more; it may be closed already."""
        self.sockets.pop(end.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self.events.unregister(end)

    def let_go(self, end: socket.socket) -> None:
        """Close a socket that may be watched, and may be closed already."""
        self.unwatch(end)
        hang_up(end)
        end.close()

    def close(self) -> None:
        """Close what wakes the mover; nothing moves any more."""
        self._alarm.close()
        self._heard.close()
        self.sockets.clear()  # which may know this mover

    # ------------------------------------------------------------------ waits

    def await_end(  # noqa: C901, PLR0912  # one loop, of which each step by itself would cost a call
        self, awaited: Awaited, until: float
    ) -> None:
        """Move all until a wait is over, or sleep until the thread that moves has ended it.

        Args:
            awaited: what for.
            until: when to give up, in seconds of ``time.monotonic``.

        Raises:
            LinkTimeout: that time came first.
            LinkClosed: the link was aborted.
            LinkError: a signal's handler has interrupted a step of the link, and waits.
        """
        if self.is_interrupted():
            raise LinkError(IN_A_HANDLER)
        me = threading.get_ident()
        while True:
            turn = None
            with self.lock:
                if awaited.is_over:
                    return
                if self._mover not in (0, me):
                    turn = awaited.turn = threading.Lock()
                    turn.acquire()
                    self._waiting.append(awaited)
                else:
                    # The mover is this thread already if a signal's handler has interrupted its
                    # sleep.
                    before = self._mover, self.moved_for
                    self._mover, self.moved_for = me, awaited
            if turn is None:
                began = time.monotonic()
                is_likely_short = self._waited_seconds <= self._spin_seconds
                try:
                    while (left := until - time.monotonic()) > 0 and not self.is_aborted:
                        if is_likely_short:
                            self._spin(min(until, began + self._spin_seconds))
                        self._move_once(min(left, _SLEEP_MAX_SECONDS))
                        if awaited.is_over:
                            break
                finally:
                    self._waited_until = now = time.monotonic()
                    self._waited_seconds = now - began
                    with self.lock:
                        self._mover, self.moved_for = before
                        if before[0]:
                            self.wake_mover()  # it sleeps on, whatever was moved meanwhile
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
        """Poll until something can be moved, or until that time."""
        while time.monotonic() < until and not self.events.poll(0):
            os.sched_yield()  # another thread may need this core

    def _take_back(self, awaited: Awaited) -> None:
        """Wait no longer; a turn that came too late is the next thread's."""
        with self.lock:
            awaited.turn = None
            if awaited in self._waiting:
                self._waiting.remove(awaited)
            elif not self._mover:
                self._wake_one()

    def _wake_one(self) -> None:
        """Let one of the threads that wait be the next to move."""
        while self._waiting:
            awaited = self._waiting.popleft()
            turn, awaited.turn = awaited.turn, None
            if turn is not None:  # else it is over, and was woken
                turn.release()
                return

    # ------------------------------------------------------------------ other threads

    def is_in_use(self, seconds: float) -> bool:
        """Whether a thread that waits moves all, or one did within the last so many seconds."""
        return self.moved_for is not None or time.monotonic() < self._waited_until + seconds

    def end(self, awaited: Awaited) -> None:
        """Let a wait be over, by any thread."""
        is_within = self.is_interrupted()  # what the mover has found it looks at itself
        with self.lock:
            awaited.is_over = True
            if awaited.turn is not None:
                awaited.end()
            elif self.moved_for is awaited and not is_within:
                self.sound()

    def wake_mover(self) -> None:
        """Wake the mover if another thread has ended what it waits for."""
        if self.moved_for is not None and self.moved_for.is_over:
            self.sound()

    def sound(self) -> None:
        """Wake the mover."""
        with contextlib.suppress(BlockingIOError):  # it has not heard the last ones yet
            self._alarm.send(b"!")

    def wake_all(self) -> None:
        """Let every wait look again; with the lock held."""
        while self._waiting:
            self._wake_one()
        self.sound()

    # ------------------------------------------------------------------ moving

    def move_what_is_there(self) -> None:
        """Handle what has come, unless another thread does so anyway."""
        if self.is_interrupted() or not self.lock.acquire(blocking=False):
            return
        me = threading.get_ident()
        try:
            if self._mover not in (0, me):
                return
            before = self._mover, self.moved_for
            self._mover = me
        finally:
            self.lock.release()
        try:
            self._move_once(0.0)
        finally:
            with self.lock:  # as in ``await_end``
                self._mover, self.moved_for = before
                if before[0]:
                    self.wake_mover()
                else:
                    self._wake_one()

    def _move_once(self, seconds: float) -> None:
        """Handle what comes within so many seconds."""
        events = self.events.poll(seconds)
        if not events:
            return
        with self.lock:
            for descriptor, event in events:
                handler = self.sockets.get(descriptor)
                if handler is not None:
                    handler.handle(descriptor, event)
                # Once nothing moves any more, the attending threads must hear it, too.
                elif descriptor == self._heard.fileno() and not self.is_aborted:
                    with contextlib.suppress(BlockingIOError):  # a signal's handler has heard it
                        self._heard.recv(64)


class Signal(Awaited):
    """See ``Connections.signal``."""

    __slots__ = ("_link", "_mover")

    def __init__(self, mover: Mover, link: object) -> None:
        """Begin.

        Args:
            mover: moves while a thread waits.
            link: the mover's, which closes it when it is dropped: it must outlive the wait.
        """
        super().__init__()
        self._mover = mover
        self._link = link

    def set(self) -> None:
        """See ``Awaitable``."""
        self._mover.end(self)

    def wait(self, seconds: float = -1) -> bool:
        """See ``Awaitable``."""
        until = math.inf if seconds < 0 else time.monotonic() + seconds
        try:
            self._mover.await_end(self, until)
        except LinkTimeout:
            pass
        except LinkError:  # nothing moves any more; the thread that knows why sets this
            turn = threading.Lock()
            turn.acquire()
            self.turn = turn
            if not self.is_over:
                turn.acquire(timeout=seconds)
        return self.is_over


def hang_up(end: socket.socket) -> None:
    """End a stream, even if a process forked since has a copy of its socket."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
