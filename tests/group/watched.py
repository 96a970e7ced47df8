"""Shared by tests of what the watchdog finds, not how soon.

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
    """Investigate waits after a tenth of the time, and look and answer a dozen times as often."""
    with (
        mock.patch.object(watchdog, "OVERDUE_SECONDS", _OVERDUE_S),
        mock.patch.object(watchdog, "TICK_SECONDS", _TICK_S),
        answering_every(_TICK_S),
    ):
        watchdog._watchdogs.watchdog()._nudge()  # noqa: SLF001  # else it sleeps through its old pause
        yield


@contextlib.contextmanager
def answering_every(seconds: float) -> Iterator[None]:
    """Set how often this rank checks for questions while it waits for no rank."""
    if not dist.is_initialized():
        yield
        return
    world: Any = dist.group.WORLD
    board_thread = watchdog.board_thread_of(world)
    with mock.patch.object(board_thread, "_pause", seconds):
        board_thread.submit(lambda _: None)  # else it sleeps through its old pause
        yield


@contextlib.contextmanager
def patiently(answers_s: float = PATIENCE_S) -> Iterator[None]:
    """Wait for the other ranks' answers however late a busy machine makes them.

    Until then no closed connection alone ends a wait. A test's ranks always wait for the store
    itself; see ``hastily``.

    Args:
        answers_s: how long to wait for the answers of ranks; a stopped rank never answers.
    """
    with (
        mock.patch.object(inquiry, "_ANSWERS_WITHIN_SECONDS", answers_s),
        mock.patch.object(inquiry, "_BRIEF_SECONDS", 0.0),
        mock.patch.object(watchdog, "_EXPIRY_SECONDS", 2 * PATIENCE_S),
        mock.patch.object(link, "_GRACE_SECONDS", 2 * PATIENCE_S),
    ):
        yield
    watching, late = watchdog._watchdogs.watchdog(), time.monotonic() + PATIENCE_S  # noqa: SLF001  # no public way
    # A fallback that ends a call that late holds its group until then.
    watching._fallbacks = [each for each in watching._fallbacks if each[0] < late]  # noqa: SLF001  # likewise


@contextlib.contextmanager
def hastily() -> Iterator[None]:
    """Wait for the store as long as users' ranks do: for tests of a silent store or of timing."""
    with mock.patch.object(BoardThread.call, "__defaults__", (PATIENCE_SECONDS,)):
        yield


@contextlib.contextmanager
def after_looks(times: int, action: Callable[[], object]) -> Iterator[None]:
    """Watch closely, and run `action` once this rank's waits have been investigated `times` times.

    A conflict is found in the second look that the others have answered.
    """
    looks = itertools.count(1)

    def counted(board: Board, meshes: Sequence[Mesh], waiting: Sequence[Waiting]) -> None:
        investigate(board, meshes, waiting)
        if next(looks) == times:
            action()

    with mock.patch.object(watchdog, "investigate", counted), closely():
        yield
