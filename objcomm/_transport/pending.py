"""What threads wait for: transfers in either direction, and signals from other threads."""

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


def _viewed(flat: Memory) -> memoryview:
    return writable(flat) if isinstance(flat, torch.Tensor) else memoryview(flat)


class Awaited:
    """What a thread waits for while it moves the link.

    Attributes:
        is_over: whether the wait is over.
        reason: why the wait failed; empty otherwise.
        turn: held by the waiting thread while another thread is the leader.
    """

    __slots__ = ("is_over", "reason", "turn")

    def __init__(self) -> None:
        self.is_over = False
        self.reason = ""
        self.turn: threading.Lock | None = None

    def end(self, reason: str = "") -> None:
        """End the wait and wake the waiting thread."""
        self.reason = reason
        self.is_over = True
        turn = self.turn
        if turn is not None:
            self.turn = None
            turn.release()


class Transfer(Awaited):
    """A message being sent or received.

    Attributes:
        flat: its memory, which must stay alive while bytes may arrive, and may be reused when the
            transfer is over.
        view: the same memory as a byte view for system calls.
        views: all views that are sent or filled one after another; the last one is ``view``.
        nbytes: their total length.
    """

    __slots__ = ("flat", "nbytes", "view", "views")

    def __init__(self, flat: Memory) -> None:
        view = _viewed(flat)
        self.flat = flat
        self.view = view
        self.views: Sequence[memoryview] = (view,)
        self.nbytes = view.nbytes
        self.is_over = False
        self.reason = ""
        self.turn = None


class Members(Transfer):
    """Several blocks of memory that are sent or received one after another.

    Attributes:
        flats: all of them.
    """

    __slots__ = ("flats",)

    def __init__(self, flats: Sequence[Memory]) -> None:
        super().__init__(flats[-1])
        self.flats = flats
        self.views = [_viewed(flat) for flat in flats]
        self.nbytes = sum(map(len, self.views))


class Lent(Members):
    """Members offered to a peer that maps them or receives a copy.

    Attributes:
        share: holds their content; None if they can only be copied.
        files: number of files of ``share``.
    """

    __slots__ = ("files", "share")

    def __init__(self, share: Share | None, flats: Sequence[torch.Tensor]) -> None:
        super().__init__(flats)
        self.share = share
        self.files = 0 if share is None else len(share.descriptors)

    def end(self, reason: str = "") -> None:
        """See ``Awaited``; drops the share, because an error may keep this object alive."""
        self.share = None
        super().end(reason)


class Loan(Transfer):
    """Memory that a peer offers; see ``link.Borrowed``.

    Attributes:
        lent_nbytes: total length of its members.
        peer: the rank that offers it.
        number: number of the offer, for content that can only be copied.
        share: the memory, once it has arrived.
    """

    __slots__ = ("lent_nbytes", "number", "peer", "share")

    def __init__(self, nbytes: int, peer: int) -> None:
        super().__init__(_NOTHING)
        self.lent_nbytes = nbytes
        self.peer = peer
        self.number = 0
        self.share: Share | None = None


class Attendance:
    """Takes in the first messages of a peer; see ``Connections.attend``.

    Attributes:
        accepts: by tag, the function that takes in a message.
        error: the exception that one of them raised, after which nothing more is taken in.
        prompts: an eventfd that wakes the attending thread to look again.
    """

    __slots__ = ("_lock", "accepts", "error", "prompts")

    def __init__(self, accepts: Mapping[int, Callable[[bytes], bool]]) -> None:
        self.accepts = accepts
        self.error: Exception | None = None
        self.prompts = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = guard()

    def prompt(self) -> None:
        """Wake the attending thread; may be called while the link's lock is held."""
        with self._lock:
            if self.prompts >= 0:
                os.eventfd_write(self.prompts, 1)

    def close(self) -> None:
        """Stop attending."""
        with self._lock:
            os.close(self.prompts)
            self.prompts = -1
