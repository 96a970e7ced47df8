"""The thread that talks to the store, at the end of its world."""

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from objcomm._failures.liveness import Processes
from objcomm._failures.noticeboard import Board, BoardThread, StoreSilentError
from objcomm._failures.watchdog import _watchdogs
from tests.waits import PATIENCE_S, wait_until


class Held:
    """An object that can be weakly referenced."""


def beginning(folder: Path, worlds: list[str]) -> BoardThread:
    """Return a thread whose world lives while ``worlds`` is not empty."""
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


def test_what_is_to_be_told_when_the_world_ends_is_told_or_let_go(tmp_path: Path) -> None:
    worlds = ["alive"]
    board_thread = beginning(tmp_path, worlds)
    may_end = threading.Event()
    done: list[Any] = []
    board_thread.submit(lambda _: done.append(may_end.wait()))
    board_thread.submit(lambda _: done.append("told"))
    worlds.clear()
    may_end.set()
    board_thread.close(PATIENCE_S, "its program has ended")
    assert done == [True, "told"]
    held = Held()
    watched = weakref.ref(held)
    board_thread.submit(lambda _, held=held: done.append(held))  # type: ignore[misc]  # bound as a default
    del held
    gc.collect()
    assert watched() is None
    assert done == [True, "told"]


def test_what_comes_during_the_last_word_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaks, may_end = threading.Event(), threading.Event()

    def leave(_: Board, _word: str) -> None:
        speaks.set()
        may_end.wait(PATIENCE_S)

    monkeypatch.setattr(Board, "leave", leave)
    board_thread = beginning(tmp_path, [])
    assert speaks.wait(PATIENCE_S)
    held = Held()
    watched = weakref.ref(held)
    done: list[Any] = []
    board_thread.submit(lambda _, held=held: done.append(held))  # type: ignore[misc]  # bound as a default
    del held
    told: list[type[BaseException]] = []

    def ask() -> None:
        try:
            board_thread.call(lambda _: None, 10 * PATIENCE_S)
        except StoreSilentError as error:
            told.append(type(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    wait_until(lambda: board_thread._jobs.qsize() == 2, "its question")  # noqa: SLF001  # no public way
    may_end.set()
    board_thread.close(PATIENCE_S, "its program has ended")
    assert watched() is None
    assert not done
    asking.join(PATIENCE_S)
    assert told == [StoreSilentError]


def test_who_asks_on_its_own_thread_is_answered_at_once(tmp_path: Path) -> None:
    """A group's finalizer may run on that thread, which would wait for itself."""
    worlds = ["alive"]
    board_thread = beginning(tmp_path, worlds)

    def ask(board: Board) -> bool:
        return board_thread.call(lambda own: own is board, 0.0)

    assert board_thread.call(ask, PATIENCE_S)
    board = weakref.ref(board_thread.call(lambda own: own, PATIENCE_S))
    worlds.clear()
    board_thread.close(PATIENCE_S, "its program has ended")
    gc.collect()
    assert board() is None  # its connection is not kept either


def test_a_question_after_the_end_of_a_world_keeps_nothing_of_it(tmp_path: Path) -> None:
    # The question would keep a connection to the store.
    board_thread = beginning(tmp_path, [])
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
            self._store.delete_key(
                arguments[0] if isinstance(arguments[0], str) else arguments[0][0]
            )
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
def test_what_is_removed_while_it_is_looked_for_holds_nobody(
    key: str, look: Callable[[Board], Any]
) -> None:
    """The thread was stuck for 300 s, with everything this process had to report and to learn."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))  # for a wait, which then raises
    board = Board(store, 0, Processes())
    board._store = Vanishing(store)  # noqa: SLF001  # there is no public way
    store.set(key, "7")
    look(board)


def test_all_that_have_told_who_they_are_are_learned_of_by_two_questions() -> None:
    asked = []

    class Store(dist.HashStore):
        def clone(self) -> dist.Store:
            return self

    store, processes = Store(), [Processes() for _ in range(30)]
    boards = [Board(store, rank, each) for rank, each in enumerate(processes[:-1])]
    for name in ("check", "multi_get", "compare_set"):
        ask = getattr(boards[0]._store, name)  # noqa: SLF001  # the questions it asks

        def counted(*arguments: Any, ask: Callable[..., Any] = ask) -> Any:
            asked.append(arguments)
            return ask(*arguments)

        setattr(boards[0]._store, name, counted)  # noqa: SLF001  # likewise
    boards[0].learn(range(29))
    assert len(asked) == 2
    names = [each.own.name for each in processes]
    assert [getattr(processes[0].of(rank), "name", "") for rank in range(30)] == [*names[:-1], ""]
    boards[0].learn(range(30))  # one has not introduced itself, and must not be waited for
    Board(store, 29, processes[29])
    boards[0].learn(range(30))
    assert getattr(processes[0].of(29), "name", "") == names[29]
