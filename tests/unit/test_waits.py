"""How long a call waits, and what ends its wait: limits, proposals and standing verdicts."""

import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from objcomm._algorithms.device import DevicePath
from objcomm._config import Settings
from objcomm._failures.deadlock import Deadlock, LaneWait, Step, WaitSnapshot
from objcomm._failures.liveness import Processes
from objcomm._failures.mesh import Mesh
from objcomm._failures.noticeboard import Board
from objcomm._failures.verdict import DESTROYED, Cause, Verdict, proposal_for
from objcomm._observe.history import CallRecord
from objcomm._transport.link import Deadline, LinkError
from objcomm._transport.store import pack_record
from objcomm._transport.streams import StreamLink
from objcomm.errors import TransportError, WireError
from tests.unit.memory_link import header_of, new_lane
from tests.unit.whereabouts import mesh_that_has_met

REPORT_AFTER_S = Settings().report_after


Jobs = list[Callable[[Board], object]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock in place of ``time.monotonic``; time passes only when a test sets ``now``."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


def test_a_limit_counts_all_waits_of_a_call_and_nothing_else(clock: SimpleNamespace) -> None:
    lane, deadline, entry = new_lane(), Deadline(10.0), CallRecord(header_of(0), "broadcast")
    clock.now += 100  # while its object is encoded
    lane.begin(entry, deadline)
    assert entry.waits_until == clock.now + 10
    assert entry.report_at == clock.now + REPORT_AFTER_S
    clock.now += 4
    lane.end(entry, deadline)
    clock.now += 100  # while the received message is decoded
    lane.begin(entry, deadline)
    assert (entry.waits_until, entry.limit_seconds) == (clock.now + 6, 10.0)
    clock.now += 5
    assert not deadline.has_passed
    clock.now += 1
    assert deadline.has_passed
    lane.end(entry, deadline)
    lane.begin(entry, deadline)
    assert entry.waits_until == clock.now
    deadline.restart()
    lane.begin(entry, deadline)
    assert entry.waits_until == clock.now + 10


def test_each_wait_of_a_call_can_pass_its_limit() -> None:
    """A call that was late once, and continued, would wait forever in its next step."""
    lane, deadline, entry = new_lane(), Deadline(10.0), CallRecord(header_of(0), "all_reduce")
    lane.begin(entry, deadline)
    entry.has_expired = True
    lane.begin(entry, deadline)
    assert not entry.has_expired


def test_a_limit_can_be_made_longer_for_the_next_wait(clock: SimpleNamespace) -> None:
    for limit_s, longer_s in ((0.02, 2.0), (10.0, 10.0)):
        lane, deadline, entry = new_lane(), Deadline(limit_s), CallRecord(header_of(0), "recv")
        deadline.leave(2.0)
        lane.begin(entry, deadline)
        assert (entry.waits_until, entry.limit_seconds) == (clock.now + longer_s, longer_s)


def test_missing_memory_is_a_ranks_failure_and_an_interrupt_its_end() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    own = TransportError("gather", (), "the backend of this rank's device has failed: NCCL error")
    for error in (caught.value, torch.OutOfMemoryError(), MemoryError(), WireError("no"), own):
        assert proposal_for(error, 1).cause is Cause.REFUSED
    assert proposal_for(TransportError("gather", (2,), "it died"), 1).cause is Cause.LOST
    for end in (KeyboardInterrupt(), SystemExit(1)):
        proposal = proposal_for(end, 1)
        assert (proposal.cause, proposal.ranks) == (Cause.LEFT, (1,))


def test_missing_memory_on_a_device_is_not_an_error_of_the_link() -> None:
    errors = {torch.OutOfMemoryError: torch.OutOfMemoryError("no room"), LinkError: RuntimeError()}
    for kind, error in errors.items():
        link: Any = unittest.mock.Mock(device=torch.device("cpu"))
        link.broadcast.side_effect = error
        with pytest.raises(kind) as caught:
            DevicePath([link]).broadcast_flat(torch.ones(1), 1)
        assert type(caught.value) is kind


@pytest.fixture
def store(tmp_path: Path) -> dist.Store:
    return dist.PrefixStore("objcomm", dist.FileStore(str(tmp_path / "store"), 1))


@pytest.fixture
def board(store: dist.Store) -> Board:
    return Board(store, 0, Processes())


@pytest.mark.parametrize(
    "raw",
    ["of another program", pack_record(Verdict.of(Cause.LOST)).decode("latin-1") + "\x01"],
    ids=["other bytes", "more bytes"],
)
def test_an_unreadable_verdict_ends_the_mesh(raw: str, store: dist.Store, board: Board) -> None:
    store.set("verdict/n", raw)
    mine = Verdict.of(Cause.TIMEOUT, ranks=(1,), seconds=1.0)
    found = board.look("n")
    assert found is not None
    assert board.propose("n", mine) == found
    assert "the store holds a verdict that can't be read" in str(found.error("gather"))
    assert not found.is_recoverable
    assert board.look("m") is None
    assert board.propose("m", mine) == mine


def test_a_deadlock_that_another_rank_found_is_passed_on(store: dist.Store, board: Board) -> None:
    """Rank 2 learns of it from a verdict; rank 1, which awaits rank 2, shares no mesh yet."""
    other = Board(store, 0, Processes())
    state = LaneWait("a", "", 0, 1, 1, 1, -1, Step(0, 1, 2, 0, "a.py:1"), 2, 5.0, 1.0, ())
    deadlock = Deadlock("each waits for another", ((1, state, Step(0, 1, 2, 0, "a.py:1")),))
    found = Verdict.of(Cause.DESYNC, reason=deadlock.reason, deadlock=pack_record(deadlock))
    other.propose("n", found)
    for _ in range(2):
        assert board.look("n") == found
    board.publish(WaitSnapshot(1, 1, ()))
    read = board.read(0, 1)
    assert read is not None
    (known,) = read.deadlocks
    assert known.known_seconds > 0
    assert 0 < known.known_since < time.monotonic()
    assert known._replace(known_seconds=0.0, known_since=0.0) == deadlock
    assert known.holds(1, state)
    other.propose("m", found._replace(deadlock=b"\x91\x01"))
    damaged = board.look("m")
    assert damaged is not None
    assert not damaged.is_recoverable


@pytest.fixture
def jobs() -> Jobs:
    """What a mesh gives its board to do."""
    return []


def run(jobs: Jobs, board: Board) -> None:
    for job in jobs:
        job(board)


def mesh_of(jobs: Jobs, members: tuple[int, ...] = (0, 1)) -> Mesh:
    return mesh_that_has_met(0, members, SimpleNamespace(submit=jobs.append))


def _mesh_over_a_link(rank: int, secret: bytes | None, session: str = "5e") -> Any:
    """Return one of three ranks; its link keeps its farewell and returns those put there."""
    mesh: Any = mesh_of([], (0, 1, 2))
    mesh.rank, mesh._secret, mesh._meeting.session = rank, secret, session  # noqa: SLF001  # as after the ranks have met
    said: dict[int, bytes] = {}
    mesh.link = SimpleNamespace(
        abort=lambda farewell: said.setdefault(rank, farewell),
        farewell_of=lambda peer: said.get(peer, b""),
        said=said,
    )
    return mesh


@pytest.mark.parametrize("secret", [None, b"s" * 32])
@pytest.mark.parametrize(
    ("verdict", "blamed"),
    [
        (Verdict.of(Cause.LOST, ranks=(2,)), (2,)),
        (Verdict.of(Cause.LOST, ranks=(2,), is_store_silent=True), (2,)),
        (Verdict.of(Cause.LOST), ()),
        (Verdict.of(Cause.LOST, ranks=(0, 2)), ()),  # this rank, which is alive
        (Verdict.of(Cause.LOST, ranks=(1, 2)), ()),  # the rank that says it
        (Verdict.of(Cause.LOST, ranks=(3,)), ()),  # not a rank of the group
        (Verdict.of(Cause.LOST, ranks=(2, -5)), ()),  # likewise
        (Verdict.of(Cause.LEFT, ranks=(2,)), ()),
        (Verdict.of(Cause.DESYNC, ranks=(2,)), ()),
    ],
)
def test_a_rank_that_closes_its_connections_blames_the_ranks_it_has_lost(
    verdict: Verdict, blamed: tuple[int, ...], secret: bytes | None
) -> None:
    mesh, sender = _mesh_over_a_link(0, secret), _mesh_over_a_link(1, secret)
    assert mesh.blamed_by(1) == ()
    sender.stop(verdict)
    mesh.link.said.update(sender.link.said)
    assert mesh.blamed_by(1) == blamed
    assert mesh.blamed_by(2) == ()


def test_no_other_rank_can_forge_a_farewell() -> None:
    mesh, sender = _mesh_over_a_link(0, b"s" * 32), _mesh_over_a_link(1, b"s" * 32)
    sender.stop(Verdict.of(Cause.LOST, ranks=(2,)))
    said = sender.link.said[1]
    for secret, session in ((None, "5e"), (b"t" * 32, "5e"), (b"s" * 32, "5f")):
        stranger = _mesh_over_a_link(1, secret, session)
        stranger.stop(Verdict.of(Cause.LOST, ranks=(2,)))
        mesh.link.said[1] = stranger.link.said[1]
        assert mesh.blamed_by(1) == ()
    for damaged in (said[1:], said[:-1], said[:5], b"", b"\1" + said[1:], bytes(len(said))):
        mesh.link.said[1] = damaged
        assert mesh.blamed_by(1) == ()
    mesh.link.said.clear()
    mesh.link.said[2] = said  # another rank's, replayed
    assert mesh.blamed_by(2) == ()
    mesh.link.said[1] = said
    assert mesh.blamed_by(1) == (2,)


def test_a_failed_block_ends_the_mesh_by_an_earlier_verdict_of_another_rank(board: Board) -> None:
    """Otherwise this rank's next call would wait alone for a new meeting."""
    mesh: Any = mesh_of([])
    mesh.board_thread.call = lambda job, _: job(board)
    standing = board.propose("n", Verdict.of(Cause.TIMEOUT, ranks=(1,)))
    failed = Verdict.of(Cause.FAILED, block="n/0")
    assert mesh.fail("n/0", failed) == failed
    assert mesh.verdict == standing
    assert board.look("n/0") == failed


def test_an_ended_mesh_is_neither_reported_nor_acknowledged_again(
    store: dist.Store, board: Board, jobs: Jobs
) -> None:
    mesh = mesh_of(jobs)
    silent = Verdict.of(Cause.LOST, ranks=(1,), is_store_silent=True)
    mesh.stop(silent)
    mesh.settle_on(board, Verdict.of(Cause.TIMEOUT, ranks=(1,)))
    run(jobs, board)
    assert mesh.verdict is silent
    assert not store.check(["verdict/n"])
    assert not store.check(["known/n"])


def test_an_end_is_acknowledged_before_the_next_mesh_can_be_made(jobs: Jobs) -> None:
    """The next meeting waits for earlier messages; a later one would stay in the store."""
    mesh = mesh_of(jobs)
    jobs_at_wake: list[int] = []
    mesh._connected.add_done_callback(lambda _: jobs_at_wake.append(len(jobs)))  # noqa: SLF001  # as a caller waits
    mesh.stop(Verdict.of(Cause.LEFT, ranks=(0,)))
    assert jobs_at_wake == [1]


@pytest.mark.parametrize("lost", [(), (1,), (0,)])
def test_a_rank_that_ends_without_the_store_acknowledges_what_it_finds_there_later(
    store: dist.Store, board: Board, jobs: Jobs, lost: tuple[int, ...]
) -> None:
    mesh_of(jobs).stop(Verdict.of(Cause.LEFT, ranks=(0,), is_store_silent=True))
    board.propose("n", Verdict.of(Cause.LOST if lost else Cause.LEFT, ranks=lost or (1,)))
    run(jobs, board)
    # It is one of two ranks that know, the only one, or the one that the others gave up.
    assert store.check(["verdict/n"]) == (lost != (1,))
    assert store.check(["known/n"]) == (not lost)


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_rank_that_ends_without_the_store_continues_as_the_others_do(
    board: Board, jobs: Jobs, *, is_gone: bool
) -> None:
    """If only this rank made new connections, or only it did not, waits for it would never end."""
    mesh = mesh_of(jobs)
    mesh.link = StreamLink(0, {})
    causes = [Cause.REFUSED, Cause.LOST] if is_gone else [Cause.LOST, Cause.REFUSED]
    own, others = (Verdict.of(cause, ranks=(1,)) for cause in causes)
    mesh.stop(own._replace(is_store_silent=True))
    assert mesh.can_be_replaced == is_gone
    assert board.propose("n", others) == others
    run(jobs, board)
    assert mesh.verdict == others._replace(name=own.name)  # the name under which it is raised once
    assert mesh.can_be_replaced != is_gone


@pytest.mark.parametrize(
    ("reason", "is_reported"),
    [("it was interrupted", True), (DESTROYED, False)],
    ids=["end", "farewell"],
)
def test_a_rank_that_ends_without_the_store_reports_it_later(
    store: dist.Store, board: Board, jobs: Jobs, reason: str, *, is_reported: bool
) -> None:
    """A rank that waits for a meeting has no connection whose end would report it."""
    mesh = mesh_of(jobs, (0, 1, 2))
    mesh.stop(Verdict.of(Cause.LEFT, ranks=(0,), reason=reason, is_store_silent=True))
    run(jobs, board)
    assert mesh.verdict is not None
    posted = mesh.verdict._replace(is_store_silent=False)
    assert board.look("n") == (posted if is_reported else None)
    assert store.check(["known/n"]) == is_reported  # one of three ranks knows
