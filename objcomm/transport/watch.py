"""Lets Ctrl-C end a wait that sits in C++.

Python runs signal handlers between bytecodes of the main thread only, and a wait for a peer is one
long call. So while the main thread waits, the interpreter writes each signal's number into a
socket; a thread that sleeps on it aborts the link, the wait raises, and the handler runs.

Only SIGINT aborts: its handler usually raises, so the operation is lost anyway (one that does not
costs the connections too), whereas a SIGTERM handler usually sets a flag ("checkpoint after this
step") and must not cost them.
"""

import contextlib
import os
import signal
import socket
import threading
from types import TracebackType

from objcomm.transport.base import Link


class _Waker(threading.Thread):
    """Sleeps on the signals' socket; one per process, made by the first wait."""

    def __init__(self) -> None:
        super().__init__(name="objcomm-sigint", daemon=True)
        self.pid = os.getpid()
        self.target: Link | None = None  # these two are written by the main thread only
        self.forward_to = -1
        self._receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)  # noqa: FBT003  # socket's own signature
        self.start()

    def listen(self) -> None:
        """Let the interpreter write signals' numbers here."""
        self.forward_to = signal.set_wakeup_fd(self._sending.fileno(), warn_on_full_buffer=False)

    def rest(self) -> None:
        """Give the descriptor back to whoever had it."""
        signal.set_wakeup_fd(self.forward_to)
        self.forward_to = -1

    def run(self) -> None:
        while True:
            numbers = self._receiving.recv(64)
            target = self.target
            if signal.SIGINT in numbers and target is not None:
                target.abort()
            if self.forward_to != -1:
                with contextlib.suppress(OSError):  # its owner may have closed it
                    os.write(self.forward_to, numbers)  # asyncio finds its signals there


class _Wakers:
    """Holds this process's waker; a forked child, which has no threads, gets its own."""

    def __init__(self) -> None:
        self._waker: _Waker | None = None

    def get(self) -> _Waker:
        # No lock: only the main thread comes here.
        if self._waker is None or self._waker.pid != os.getpid():
            self._waker = _Waker()
        return self._waker


_wakers = _Wakers()


class interruptible:  # noqa: N801  # used as a function, like contextlib's
    """While entered, Ctrl-C aborts ``link`` within moments; nothing on other threads.

    A wake-up descriptor that was set before (asyncio sets one) is served meanwhile and put back
    afterwards.
    """

    __slots__ = ("_link", "_outer", "_waker")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waker: _Waker | None = None
        self._outer: Link | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._waker = _wakers.get()
            self._outer, self._waker.target = self._waker.target, self._link
            if self._outer is None:
                self._waker.listen()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._waker is not None:
            if self._outer is None:
                self._waker.rest()
            self._waker.target = self._outer  # a callback's call on another group ends here
