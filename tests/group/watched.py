"""What tests share that ask what the watchdog finds, and not how soon.

They run on the ranks themselves, and change the watchdog of the process in which they are entered.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist

from objcomm._failures import inquiry, watchdog
from objcomm._failures.inquiry import Waiting, investigate
from objcomm._failures.mesh import Mesh
from objcomm._failures.noticeboard import PATIENCE_SECONDS, Board, BoardThread
from objcomm._transport import link
from tests.waits import PATIENCE_S

_OVERDUE_S = 0.05
_TICK_S = 0.02


@contextlib.contextmanager
def closely() -> Iterator[None]:
    """Investigate each wait after a tenth of the time, a dozen times as often, and answer so."""
    with (
        mock.patch.object(watchdog, "OVERDUE_SECONDS", _OVERDUE_S),
        mock.patch.object(watchdog, "TICK_SECONDS", _TICK_S),
        answering_every(_TICK_S),
    ):
        watchdog._watchdogs.watchdog()._nudge()  # noqa: SLF001  # or it sleeps out its old pause
        yield


@contextlib.contextmanager
def answering_every(seconds: float) -> Iterator[None]:
    """How often this rank looks whether it is asked, while it waits for nobody."""
    if not dist.is_initialized():
        yield
        return
    world: Any = dist.group.WORLD
    board_thread = watchdog.board_thread_of(world)
    with mock.patch.object(board_thread, "_pause", seconds):
        board_thread.submit(lambda _: None)  # or it sleeps out its old pause
        yield


@contextlib.contextmanager
def patiently(answers_s: float = PATIENCE_S) -> Iterator[None]:
    """Wait for the other ranks' answers however late a busy machine makes them.

    Until then no connection ends a wait by itself. For the store itself a test's ranks always wait;
    see ``hastily``.

    Args:
        answers_s: how long to wait for the answers of ranks; of one that is stopped none comes.
    """
    with (
        mock.patch.object(inquiry, "_ANSWERS_WITHIN_SECONDS", answers_s),
        mock.patch.object(inquiry, "_BRIEF_SECONDS", 0.0),
        mock.patch.object(watchdog, "_EXPIRY_SECONDS", 2 * PATIENCE_S),
        mock.patch.object(link, "_GRACE_SECONDS", 2 * PATIENCE_S),
    ):
        yield
    watching, late = watchdog._watchdogs.watchdog(), time.monotonic() + PATIENCE_S  # noqa: SLF001  # no public way
    # What would end a call in so long holds its group until then.
    watching._fallbacks = [each for each in watching._fallbacks if each[0] < late]  # noqa: SLF001  # likewise


@contextlib.contextmanager
def hastily() -> Iterator[None]:
    """Wait for the store as long as users' ranks do: where it is silent, or time is the promise."""
    with mock.patch.object(BoardThread.call, "__defaults__", (PATIENCE_SECONDS,)):
        yield


@contextlib.contextmanager
def after_looks(times: int, action: Callable[[], object]) -> Iterator[None]:
    """Watch closely, and run `action` when this rank's waits have been investigated so often.

    A conflict would be found in the second look for which the others have answered.
    """
    looks = itertools.count(1)

    def counted(board: Board, meshes: Sequence[Mesh], waiting: Sequence[Waiting]) -> None:
        investigate(board, meshes, waiting)
        if next(looks) == times:
            action()

    with mock.patch.object(watchdog, "investigate", counted), closely():
        yield
