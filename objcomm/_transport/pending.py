"""What a thread waits for: transfers on their way out or in, and signals from other threads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from objcomm._codecs.buffers import writable
from objcomm._transport.threads import guard

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from objcomm._transport.link import Memory
    from objcomm._transport.share import Share

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Awaited:
    """What a thread waits for, moving the link meanwhile.

    Attributes:
        is_over: whether the wait is.
        reason: why it ended before what was awaited; empty otherwise.
        turn: held by the waiting thread while another one is the mover.
    """

    __slots__ = ("is_over", "reason", "turn")

    def __init__(self) -> None:
        self.is_over = False
        self.reason = ""
        self.turn: threading.Lock | None = None

    def end(self, reason: str = "") -> None:
        """Let it be over, and the waiting thread go on."""
        self.reason = reason
        self.is_over = True
        turn = self.turn
        if turn is not None:
            self.turn = None
            turn.release()


class Transfer(Awaited):
    """A message on its way out or in.

    Attributes:
        flat: its memory, or the room for it. It lives as long as bytes may come, and may be used
            again when the transfer is over.
        view: the same as the system takes it.
    """

    __slots__ = ("flat", "view")

    def __init__(self, flat: Memory, view: memoryview | None = None) -> None:
        if view is None:
            view = writable(flat) if isinstance(flat, torch.Tensor) else memoryview(flat)
        self.flat = flat
        self.view = view
        self.is_over = False
        self.reason = ""
        self.turn = None


class Members(Transfer):
    """Several memories that go out or come in one after another.

    Attributes:
        flats: all of them.
        views: the same as the system takes them.
        nbytes: how long they are together.
    """

    __slots__ = ("flats", "nbytes", "views")

    def __init__(self, flats: Sequence[torch.Tensor]) -> None:
        super().__init__(flats[-1])
        self.flats = flats
        self.views = [writable(flat) for flat in flats]
        self.nbytes = sum(map(len, self.views))


class Lent(Members):
    """Members for a peer that maps them, or takes a copy.

    Attributes:
        share: has their content; None if there is only a copy.
        files: how many it has.
    """

    __slots__ = ("files", "share")

    def __init__(self, share: Share | None, flats: Sequence[torch.Tensor]) -> None:
        super().__init__(flats)
        self.share = share
        self.files = 0 if share is None else len(share.descriptors)

    def end(self, reason: str = "") -> None:
        """See ``Awaited``; an error may keep this object for long."""
        self.share = None
        super().end(reason)


class Loan(Transfer):
    """Memory that a peer lends; see ``link.Borrowed``.

    Attributes:
        nbytes: how long its members are together.
        peer: whose it is.
        number: of its offer, if its content can only be copied.
        share: the memory, once it is here.
    """

    __slots__ = ("nbytes", "number", "peer", "share")

    def __init__(self, nbytes: int, peer: int) -> None:
        super().__init__(_NOTHING)
        self.nbytes = nbytes
        self.peer = peer
        self.number = 0
        self.share: Share | None = None


class Attendance:
    """Takes in the first messages of a peer; see ``Connections.attend``.

    Attributes:
        accepts: by tag, what takes one in.
        error: what one of them has raised; it takes in no more.
        prompts: a descriptor on which the attending thread hears that it is to look again.
    """

    __slots__ = ("_lock", "accepts", "error", "prompts")

    def __init__(self, accepts: Mapping[int, Callable[[bytes], bool]]) -> None:
        self.accepts = accepts
        self.error: Exception | None = None
        self.prompts = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = guard()

    def prompt(self) -> None:
        """Let the thread look again; needs no lock of the link's, which the caller may hold."""
        with self._lock:
            if self.prompts >= 0:
                os.eventfd_write(self.prompts, 1)

    def close(self) -> None:
        """The thread attends no more."""
        with self._lock:
            os.close(self.prompts)
            self.prompts = -1
