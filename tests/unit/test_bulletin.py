"""The thread that talks to the store, at the end of its world."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from objcomm._failures.liveness import Processes
from objcomm._failures.noticeboard import Board, BoardThread, StoreSilentError
from objcomm._failures.watchdog import _watchdogs
from tests.waits import PATIENCE_S, wait_until


def started(folder: Path, worlds: list[str]) -> BoardThread:
    """Return a thread whose world exists while ``worlds`` is not empty."""
    store = dist.FileStore(str(folder / "store"), 1)
    answer: Any = None
    return BoardThread(
        store,
        0,
        1,
        lost_seconds=60.0,
        describe=answer,
        is_needed=lambda _: bool(worlds),
        is_cut_off=lambda _: False,
    )


def submitted(board_thread: BoardThread, done: list[Any]) -> weakref.ref[set[int]]:
    """Submit a job that adds an object to ``done``; return a weak reference to the object."""
    held: set[int] = set()
    board_thread.submit(lambda _: done.append(held))
    return weakref.ref(held)


def test_jobs_are_done_until_the_world_ends_and_dropped_afterwards(tmp_path: Path) -> None:
    worlds = ["alive"]
    board_thread = started(tmp_path, worlds)
    may_end = threading.Event()
    done: list[Any] = []
    board_thread.submit(lambda _: done.append(may_end.wait()))
    board_thread.submit(lambda _: done.append("done"))
    worlds.clear()
    may_end.set()
    board_thread.close(PATIENCE_S, "its program has ended")
    dropped = submitted(board_thread, done)
    gc.collect()
    assert dropped() is None
    assert done == [True, "done"]


def test_jobs_during_farewell_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, may_end = threading.Event(), threading.Event()

    def leave(_: Board, _reason: str) -> None:
        leaves.set()
        may_end.wait(PATIENCE_S)

    monkeypatch.setattr(Board, "leave", leave)
    board_thread = started(tmp_path, [])
    assert leaves.wait(PATIENCE_S)
    done: list[Any] = []
    dropped = submitted(board_thread, done)
    with ThreadPoolExecutor(1) as asking:
        question = asking.submit(board_thread.call, lambda _: None, 10 * PATIENCE_S)
        wait_until(lambda: board_thread._jobs.qsize() == 2, "its question")  # noqa: SLF001  # no public way
        may_end.set()
        board_thread.close(PATIENCE_S, "its program has ended")
        assert dropped() is None
        assert not done
        with pytest.raises(StoreSilentError):
            question.result(PATIENCE_S)


def test_a_question_from_the_thread_itself_is_answered_immediately(tmp_path: Path) -> None:
    """A group's finalizer may run on that thread, which would wait for itself."""
    worlds = ["alive"]
    board_thread = started(tmp_path, worlds)

    def ask(board: Board) -> bool:
        return board_thread.call(lambda own: own is board, 0.0)

    assert board_thread.call(ask, PATIENCE_S)
    board = weakref.ref(board_thread.call(lambda own: own, PATIENCE_S))
    worlds.clear()
    board_thread.close(PATIENCE_S, "its program has ended")
    gc.collect()
    assert board() is None  # its connection is not kept either


def test_a_question_after_the_end_of_a_world_keeps_nothing_alive(tmp_path: Path) -> None:
    # The question would keep a connection to the store.
    board_thread = started(tmp_path, [])
    board_thread.close(PATIENCE_S, "its program has ended")
    watched = weakref.ref(board_thread)
    gc.disable()
    try:
        _watchdogs.watchdog()._ask(board_thread, lambda _: None)  # noqa: SLF001  # as the watchdog does
        del board_thread
        assert watched() is None
    finally:
        gc.enable()


class Vanishing:
    """A store in which another rank removes each key right after it was looked up."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            found = getattr(self._store, operation)(*arguments)
            keys = arguments[0]
            self._store.delete_key(keys if isinstance(keys, str) else keys[0])
            return found

        return ask


@pytest.mark.parametrize(
    ("key", "look"),
    [
        ("verdict/n", lambda board: board.look("n")),
        ("where/1", lambda board: board.read(1, 0)),
        ("process/1", lambda board: board.learn([1])),
        ("asked", lambda board: board.asked()),
    ],
    ids=["a verdict", "whereabouts", "a process", "a question"],
)
def test_a_key_removed_meanwhile_blocks_nothing(key: str, look: Callable[[Board], Any]) -> None:
    """The thread was once stuck for 300 s, and this process neither reported nor learned."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))  # for a wait, which then raises
    board = Board(store, 0, Processes())
    board._store = Vanishing(store)  # noqa: SLF001  # there is no public way
    store.set(key, "7")
    look(board)


def test_two_questions_fetch_the_records_of_all_processes() -> None:
    class Store(dist.HashStore):
        def clone(self) -> dist.Store:
            return self

    store, processes = Store(), [Processes() for _ in range(30)]
    boards = [Board(store, rank, each) for rank, each in enumerate(processes[:-1])]
    counted = mock.Mock(wraps=boards[0]._store)  # noqa: SLF001  # there is no public way
    boards[0]._store = counted  # noqa: SLF001  # likewise
    boards[0].learn(range(29))
    assert len(counted.mock_calls) == 2
    names = [each.own.name for each in processes]
    assert [getattr(processes[0].of(rank), "name", "") for rank in range(30)] == [*names[:-1], ""]
    boards[0].learn(range(30))  # one has not introduced itself, and must not be waited for
    Board(store, 29, processes[29])
    boards[0].learn(range(30))
    assert getattr(processes[0].of(29), "name", "") == names[29]
