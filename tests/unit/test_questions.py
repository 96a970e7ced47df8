"""What many waiting ranks ask the store when a limit passes or a long wait is reported."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from objcomm._failures import inquiry
from objcomm._failures.deadlock import Step, WaitSnapshot
from objcomm._failures.liveness import Processes
from objcomm._failures.noticeboard import Board
from objcomm._failures.verdict import Cause, Verdict
from objcomm._failures.watchdog import Watchdog
from objcomm._observe.history import CallRecord
from objcomm._transport.lane import Lane
from objcomm._wire.header import Operation
from tests.unit.memory_link import header_of
from tests.unit.whereabouts import MAIN, lane, mesh_that_has_met, step
from tests.waits import PATIENCE_S

_NONCE = "n"
_CALL = 3
_SIZE = 64
_AWAY, _SILENT = 20, 30  # one rank is in no call, and one does not answer


class Counted:
    """A store that counts the keys it is asked for, by their first part."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: Counter[str] = Counter()

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self.asked[f"{operation} {arguments[0]}".partition("/")[0]] += 1
            return getattr(self._store, operation)(*arguments)

        return ask


class Rank:
    """One rank of a world that has met; it has published its position, unless it is silent."""

    def __init__(self, store: dist.Store, rank: int, size: int, silent: set[int]) -> None:
        self.board = Board(dist.PrefixStore("objcomm", store), rank, Processes())
        self.store: Any = Counted(self.board._store)  # noqa: SLF001  # nothing else shows the questions
        setattr(self.board, "_store", self.store)  # noqa: B010  # a counter in place of the store
        thread = SimpleNamespace(submit=lambda job: job(self.board), processes=Processes())
        self.mesh: Any = mesh_that_has_met(rank, tuple(range(size)), thread)
        self.mesh.link = SimpleNamespace(abort=lambda _: None)
        self.waits = rank not in silent | {_AWAY}
        self.lane = Lane("main", 0, threading.current_thread())
        header = header_of(rank, sequence=_CALL, operation=Operation.BARRIER)
        self.entry = CallRecord(header, "barrier")
        self.entry.awaits, self.entry.limit_seconds = 0, 5.0
        self.entry.first_asked, self.entry.has_expired = 1, True
        self.entry.waits_since = self.entry.waits_until = time.monotonic()
        self.lane.entry = self.entry if self.waits else None
        call = step(_CALL if self.waits else _CALL - 1)
        state = lane("world", call, awaits=0 if self.waits else -1, nonce=_NONCE)
        self.where = WaitSnapshot(1, MAIN, (state,))
        if rank not in silent:
            self.board.publish(self.where)

    def expire(self) -> None:
        """Let its limit pass."""
        inquiry.expire(self.board, [self.mesh], deque([(self.mesh, self.lane, self.entry)]))

    def report(self) -> None:
        """Report that it has waited for long."""
        waiting = [(self.mesh, self.lane, self.entry)]
        inquiry.report(self.board, [self.mesh], waiting, threading.Event())


Job = Callable[..., list[Rank]]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Create the ranks of a job, each of which waits ``within`` for answers; return those in it."""

    def make(*silent: int, size: int = _SIZE, within: float = PATIENCE_S) -> list[Rank]:
        monkeypatch.setattr(inquiry, "_ANSWERS_WITHIN_SECONDS", within)
        store = dist.HashStore()
        ranks = [Rank(store, rank, size, set(silent)) for rank in range(size)]
        of = {rank.mesh: rank for rank in ranks}
        monkeypatch.setattr(inquiry, "wait_snapshot", lambda meshes, _: of[meshes[0]].where)
        monkeypatch.setattr(Board, "ask", lambda _: 1)  # so that no answer is too old
        monkeypatch.setattr(Board, "asked", lambda _: 1)
        return [rank for rank in ranks if rank.waits]

    return make


def on_all(ranks: list[Rank], action: Callable[[Rank], object]) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(action, ranks))


def answers_read(ranks: list[Rank]) -> int:
    return sum(rank.store.asked["compare_set where"] for rank in ranks)


def verdict_of(ranks: list[Rank]) -> Verdict:
    """Return the one verdict that all ranks have."""
    found = {rank.mesh.verdict for rank in ranks}
    assert len(found) == 1
    verdict: Verdict | None = found.pop()
    assert verdict is not None
    return verdict


def test_one_of_many_ranks_that_time_out_asks_all(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = job()  # none is silent, so the first gets all answers without waiting
    take_turn, all_have_come = Board.take_turn, threading.Barrier(len(ranks))

    def together(board: Board, key: str) -> int:
        turn = take_turn(board, key)
        all_have_come.wait(PATIENCE_S)
        return turn

    monkeypatch.setattr(Board, "take_turn", together)
    on_all(ranks, Rank.expire)
    assert verdict_of(ranks).ranks == (_AWAY,)
    assert len(verdict_of(ranks).positions) == _SIZE
    assert answers_read(ranks) == _SIZE - 1
    # Every rank that waits knows the verdict; the last rank to learn of it removes the keys.
    store = ranks[0].store
    assert store.check([f"turns/{_NONCE}"])
    ranks[0].board.retract(_NONCE)
    assert not store.check([f"turns/{_NONCE}"])


@pytest.mark.parametrize("lost", [1, 2, 9])
def test_if_the_ranks_that_should_ask_are_lost_another_one_asks(job: Job, lost: int) -> None:
    ranks = job(_SILENT, within=0.1)
    for _ in range(lost):
        ranks[0].board.take_turn(_NONCE)
    on_all(ranks, Rank.expire)
    assert verdict_of(ranks).ranks == (_AWAY, _SILENT)
    assert verdict_of(ranks).silent == (_SILENT,)
    assert len(verdict_of(ranks).positions) == _SIZE - 1


def out_of_step(rank: Rank, theirs: int, number: int = _CALL) -> Verdict:
    """Return what ``rank`` proposes after a message of rank ``theirs`` for its call ``number``."""
    rank.mesh.lanes["main"] = rank.lane
    mine = rank.entry.header.position
    other = mine._replace(rank=theirs, sequence=number)
    pair = Verdict.of(Cause.DESYNC, reason="different roots", positions=(mine, other))
    return inquiry.with_all_ranks(rank.board, [rank.mesh], rank.mesh, 0, pair)


def called(rank: Rank, *calls: Step) -> None:
    """Publish that a rank has made these calls and waits in the last one."""
    state = lane("world", *calls, awaits=0, nonce=_NONCE)
    rank.where = rank.where._replace(lanes=(state,))
    rank.board.publish(rank.where)


def test_a_desync_shows_what_all_ranks_called(job: Job) -> None:
    """The silent rank is left out; the late rank's last call is the one before."""
    ranks = job(_SILENT, within=0.1)
    called(ranks[2], step(_CALL, root=7))
    found = out_of_step(ranks[0], 2)
    assert found.reason == "different roots"
    places = {each.rank: (each.sequence, each.root, each.is_over) for each in found.positions}
    together = dict.fromkeys({*range(_SIZE)} - {_SILENT}, (_CALL, -1, False))
    assert places == {**together, 2: (_CALL, 7, False), _AWAY: (_CALL - 1, -1, True)}
    assert len(out_of_step(ranks[1], 2).positions) == 2  # the first has asked, and posts it


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_mismatch_found_later_is_blamed_on_the_call_where_it_began(job: Job, ahead: int) -> None:
    """A rank that only sends continues, so it may find the mismatch in a later call."""
    ranks = job(size=2)
    called(ranks[ahead], step(_CALL, root=ahead), step(_CALL + 1))
    called(ranks[1 - ahead], step(_CALL, root=1 - ahead))
    ranks[0].entry.header = ranks[0].entry.header._replace(sequence=_CALL + 1 - ahead)
    found = out_of_step(ranks[0], 1, _CALL + ahead)
    assert found.reason == "different roots"
    assert [(each.sequence, each.root) for each in found.positions] == [(_CALL, 0), (_CALL, 1)]


def test_matching_calls_explain_no_mismatch(job: Job) -> None:
    ranks = job(size=2)
    for rank in ranks:
        called(rank, step(_CALL), step(_CALL + 1))
    found = out_of_step(ranks[0], 1, _CALL + 1)
    assert [each.sequence for each in found.positions] == [_CALL, _CALL + 1]


def test_few_ranks_all_ask(job: Job) -> None:
    ranks = job(size=4)
    ranks[0].lane.entry = None
    ranks[0].board.publish(WaitSnapshot(1, MAIN, ()))
    ranks[1].expire()
    assert verdict_of(ranks[1:2]).ranks == (0,)
    assert not ranks[1].store.asked["add turns"]


def test_a_rank_whose_wait_ends_while_it_asks_leaves_its_turn_to_others(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = job()[:2]
    read = Board.read

    def succeed(board: Board, rank: int, asked: int) -> WaitSnapshot | None:
        first.lane.entry = None
        return read(board, rank, asked)

    with monkeypatch.context() as patch:
        patch.setattr(Board, "read", succeed)
        first.expire()
    assert first.mesh.verdict is None
    assert not first.store.check([f"turns/{_NONCE}"])
    second.expire()
    assert second.mesh.verdict is not None


@pytest.mark.parametrize("silent", [(), (0, 1, 2), (_SILENT,)], ids=str)
def test_if_many_ranks_wait_only_the_lowest_asks_all_and_reports(
    job: Job, monkeypatch: pytest.MonkeyPatch, silent: tuple[int, ...]
) -> None:
    # A rank delayed for most of this time asks all ranks. A silent rank costs all of it.
    ranks = job(*silent, within=3.0 if silent else PATIENCE_S)
    reports: list[tuple[int, Verdict]] = []
    monkeypatch.setattr(inquiry, "_warn", lambda mesh, _, got: reports.append((mesh.rank, got)))
    on_all(ranks, Rank.report)
    ((rank, verdict),) = reports
    assert rank == min(each.mesh.rank for each in ranks)
    assert verdict.ranks == tuple(sorted({_AWAY, *silent}))
    assert verdict.silent == tuple(sorted(silent))
    others = [each for each in ranks if each.mesh.rank != rank]
    # Nearly all find the reporting rank in their first few questions; some are unlucky.
    assert answers_read(others) < _SIZE * _SIZE / 4


@pytest.mark.parametrize(
    ("size", "looks", "later"), [(8, 100, 25), (300, 50, 25), (1000, 25, 25), (4000, 7, 7)]
)
def test_in_a_large_group_each_rank_asks_less_often(size: int, looks: int, later: int) -> None:
    def asks(waited: float) -> int:
        of: list[Any] = [SimpleNamespace(_looks=look) for look in range(100)]
        return sum(Watchdog._is_to_ask(each, waited, range(size)) for each in of)  # noqa: SLF001  # otherwise it takes minutes

    assert (asks(1.0), asks(60.0)) == (looks, later)
