"""The benchmarks: their statistics, their verdicts, and one real run of the command."""

import contextlib
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from bench.case import CASES, PROCESSOR_SHARE, SECONDS
from bench.machine import short_mpi_name
from bench.measure import Record, slowest, summarise, turns
from bench.payloads import MEDIUM, PAYLOADS, STEP, Tally, same
from bench.peers import PEERS
from bench.plot import shares
from bench.report import amount, one_line, page, scoreboard, table
from bench.results import Results
from bench.ring import Ring, block_nbytes
from tests.doctor.job import by_command

pytestmark = pytest.mark.long

_REPOSITORY = Path(__file__).parent.parent
_BESIDE_TORCH = ("objcomm", "torch")
_ABOUT = {"about": {"processor": "abacus", "cores": "2"}}


@pytest.fixture(autouse=True)
def _declared() -> None:
    """Import the cases here: it takes seconds, and pytest always reads this file."""
    import bench.suites  # noqa: F401, PLC0415  # see above


def _row(peer: str, median: float, **changed: object) -> dict[str, object]:
    row: dict[str, object] = {"operation": "gather", "payload": "small dict", "world": 4}
    row |= {"peer": peer, "metric": SECONDS, "n": 9, "median": median}
    return row | {"p10": median, "p90": median} | changed


def _results(*rows: dict[str, object]) -> Results:
    return Results.of([_ABOUT, *rows])


def _plain(text: str) -> str:
    """Return a page with ordinary spaces in its figures."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_summary_is_the_median_and_the_outer_deciles() -> None:
    assert summarise([float(value) for value in range(11)]) == (11, 5.0, 1.0, 9.0)
    assert summarise([0.5]) == (1, 0.5, 0.5, 0.5)
    assert summarise([1.0, 1.0, 1.0, 1.0, 99.0]).median == 1.0


def test_the_slowest_rank_of_each_call_counts() -> None:
    assert slowest([[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]]) == [2.0, 5.0, 3.0]
    with pytest.raises(ValueError, match="zip"):
        slowest([[1.0], [1.0, 2.0]])


def test_peers_alternate_and_take_turns_to_begin_a_round() -> None:
    order = turns(["a", "b", "c"], rounds=3)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_the_declared_cases_name_payloads_and_peers_that_exist() -> None:
    for case in CASES:
        if case.measure != "import":
            assert set(case.payloads) <= set(PAYLOADS)
            assert set(case.peers) <= set(PEERS)
        assert all(target.world in case.worlds for target in case.targets)
        against = {target.against for target in case.targets if isinstance(target.against, str)}
        assert against <= set(case.peers)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_is_the_same_each_time(name: str) -> None:
    build = PAYLOADS[name]
    assert same(build(1, 64), build(1, 64))


def test_the_config_has_about_a_kibibyte() -> None:
    assert 900 < len(json.dumps(PAYLOADS["config dict, 1 KiB"](0, 1))) < 1150


@pytest.mark.parametrize(
    ("name", "nbytes"), [(STEP, 300), ("100 kB list of ints", 100_000), ("1 MiB of bytes", 1 << 20)]
)
def test_a_payload_has_about_the_size_that_its_name_says(name: str, nbytes: int) -> None:
    assert len(pickle.dumps(PAYLOADS[name](0, 1), protocol=5)) == pytest.approx(nbytes, rel=0.05)


def test_sameness_looks_into_arrays_tensors_and_their_types() -> None:
    assert same({"a": [np.arange(3)]}, {"a": [np.arange(3)]})
    assert not same({"a": [np.arange(3)]}, {"a": [np.arange(1, 4)]})
    assert not same(np.arange(3), np.arange(3.0))
    assert not same(torch.ones(1), np.ones(1))
    assert not same([1], (1,))


def test_merging_tallies_changes_neither() -> None:
    left, right = Tally({"a": 1}, 1), Tally({"a": 2, "b": 3}, 1)
    assert left.merge(right) == Tally({"a": 3, "b": 3}, 2)
    assert (left, right) == (Tally({"a": 1}, 1), Tally({"a": 2, "b": 3}, 1))


@pytest.mark.parametrize(("ours", "met"), [(0.19, True), (0.20, True), (0.21, False)])
def test_a_target_is_met_at_its_limit_and_missed_above(ours: float, met: bool) -> None:  # noqa: FBT001  # parametrized
    (found,) = _results(_row("objcomm", ours), _row("torch", 1.0)).judgements()
    assert (found.value, found.is_met) == (ours, met)


def test_a_target_is_judged_at_its_own_world_only() -> None:
    rows = [_row("objcomm", 1.0, world=8), _row("torch", 1.0, world=8)]
    assert _results(*rows).judgements() == []


def test_losses_are_named_with_the_worst_first() -> None:
    rows = [_row("objcomm", 2.0), _row("torch", 9.0), _row("raw", 1.0), _row("mpi4py", 0.1)]
    losses = _results(*rows).losses()
    assert [(loss.theirs.peer, loss.ratio) for loss in losses] == [("mpi4py", 20.0), ("raw", 2.0)]


def test_objcomm_under_the_names_of_torch_is_judged_too() -> None:
    rows = [_row(peer, at, operation="gather_object") for peer, at in (("torch", 1), ("raw", 0.1))]
    results = _results(_row("objcomm.compat", 0.4, operation="gather_object"), *rows)
    (found,) = results.judgements()
    assert (found.value, found.is_met) == (0.4, True)
    assert [(loss.theirs.peer, loss.ratio) for loss in results.losses()] == [("raw", 4.0)]


def test_of_two_runs_of_one_case_the_later_counts() -> None:
    results = Results.of([_ABOUT, _row("objcomm", 1.0), _ABOUT, _row("objcomm", 2.0)])
    assert [record.median for record in results] == [2.0]


def test_figures_of_different_machines_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="one machine"):
        Results.of([_ABOUT, {"about": {"processor": "slide rule"}}])


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (1.234, "seconds", "1.23 s"),
        (0.0123, "seconds", "12.3 ms"),
        (0.000456, "seconds", "456 µs"),
        (3e-7, "seconds", "0.30 µs"),
        (67.1e6, "root peak_nbytes", "67.1 MB"),
        (1234, "root sent_nbytes", "1,234 B"),
        (0, "others mistakes", "0"),
    ],
)
def test_amounts_have_three_digits_and_a_unit(value: float, metric: str, text: str) -> None:
    assert amount(value, metric) == text


def test_the_pages_say_what_is_met_missed_and_lost() -> None:
    rows = [_row("objcomm", 0.3), _row("torch", 1.0), _row("mpi4py", 0.1)]
    results = _results(*rows)
    written, targets = page(results), scoreboard(results)
    assert "| processor | abacus |" in written
    assert "in which a peer was better than objcomm: mpi4py in 1." in written
    assert "0 of 1 met." in targets
    missed = "| gather | small dict | 4 | time | 0.30 × torch | 0.20 | **missed** |"
    assert missed in _plain(targets)
    assert missed not in written
    assert "| gather | small dict | 4 | time | mpi4py | 3.00 |" in written


def test_the_page_begins_with_the_rows_to_decide_by() -> None:
    rows = [_row("objcomm", 0.3), _row("torch", 1.0), _row("mpi4py", 0.1)]
    head, _, rest = _plain(page(_results(*rows))).partition("## Five rows to decide by")
    assert "|" not in head
    assert "from each rank | 300 ms | 1.00 s (0.30) | – | 100 ms (3.00) |\n" in rest


def test_a_figure_is_not_broken_and_a_column_of_figures_is_aligned() -> None:
    head, alignment, row = table(["what", "took"], [["1 MiB array", "1 s (2 to 3 s)"]]).splitlines()
    assert (head, alignment) == ("| what | took |", "| --- | ---: |")
    assert row.replace("\N{NO-BREAK SPACE}", "_") == "| 1_MiB array | 1_s (2_to_3_s) |"


def test_the_recorded_figures_have_every_row_to_decide_by() -> None:
    written = page(Results.load([_REPOSITORY / "docs" / "benchmarks.jsonl"]))
    table = written.partition("## Five rows to decide by")[2].partition("\n## ")[0]
    assert len([line for line in table.splitlines() if line.startswith("| ")]) == 2 + 5


def test_the_page_has_the_mean_ratio_to_mpi4py_of_small_calls_in_a_row() -> None:
    rows = [_row("objcomm", 4.0, operation="gathers"), _row("mpi4py", 1.0, operation="gathers")]
    rows += [_row("objcomm", 9.0, operation="barriers"), _row("mpi4py", 1.0, operation="barriers")]
    written = page(_results(*rows))
    assert "Small calls in a row × mpi4py's, geometric mean: with 4 ranks 6.00." in written


def test_the_page_has_ratios_to_a_ring_and_steps_per_second() -> None:
    of = {"operation": "steps_in_a_row", "payload": STEP}
    rows = [_row("ring", 0.001, **of), _row("objcomm", 0.002, **of)]
    rows += [_row("ring", 1.5, metric=PROCESSOR_SHARE, **of)]
    rows += [_row("objcomm", 0.3, metric=PROCESSOR_SHARE, **of)]
    results = _results(*rows)
    written = _plain(page(results))
    section = written.partition("## A step of an inference engine")[2].partition("\n## ")[0]
    assert f"| {STEP} | 4 | time | 2.00 ms; 2.00 × ring | 1.00 ms |" in section
    assert f"| {STEP} | 4 | calls per second | 500; 0.50 × ring | 1,000 |" in section
    assert f"| {STEP} | 4 | processors busy, all ranks | 0.30; 0.20 × ring | 1.50 |" in section
    assert written.count("### steps_in_a_row") == 1
    (found,) = results.judgements()
    assert (found.value, found.is_met) == (2.0, False)


def test_the_picture_leaves_out_cases_that_make_a_table() -> None:
    rows = [_row(peer, 1.0, operation="broadcasts", payload=MEDIUM[0]) for peer in _BESIDE_TORCH]
    rows += [_row(peer, 1.0) for peer in _BESIDE_TORCH]
    assert list(shares(_results(*rows))) == ["gather: small dict"]


def test_smoke_figures_are_marked_and_never_judged() -> None:
    rows = [_row("objcomm", 0.1, smoke=True), _row("torch", 1.0, smoke=True)]
    results = _results(*rows)
    assert results.judgements() == []
    assert "These figures mean nothing" in page(results)
    assert "These figures mean nothing" in scoreboard(results)


def test_an_mpi_is_named_without_the_host_that_built_it() -> None:
    assert short_mpi_name("MPICH Version:      5.0.2\nMPICH Release date: x") == "MPICH 5.0.2"
    assert short_mpi_name("Open MPI v5.0.11, package: Open MPI me@home") == "Open MPI v5.0.11"


def _smoke_run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the figures of a smoke run."""
    figures = folder / "figures.jsonl"
    _bench(*arguments, "--smoke", "--json", str(figures))
    about, *rows = map(json.loads, figures.read_text().splitlines())
    assert "about" in about
    return rows


def test_a_smoke_run_at_world_two_measures_every_peer_and_reports(tmp_path: Path) -> None:
    peers = ["--peers", "objcomm", "torch", "raw"]
    rows = _smoke_run(tmp_path, "gather", "--world", "2", *peers)
    assert {row["peer"] for row in rows} == {"objcomm", "torch", "raw"}
    assert all(row["smoke"] and 0 < row["p10"] <= row["median"] <= row["p90"] for row in rows)
    written = tmp_path / "benchmarks.md"
    _bench("report", str(tmp_path / "figures.jsonl"), "-o", str(written))
    assert "### gather" in written.read_text()
    assert "# Targets" in written.with_name("targets.md").read_text()
    assert one_line(Record(**rows[0])).startswith("gather")


def test_a_smoke_run_of_the_memory_cases_finds_no_wrong_result(tmp_path: Path) -> None:
    peers = ["--peers", "objcomm", "objcomm over Gloo"]
    rows = _smoke_run(tmp_path, "memory", "--world", "2", *peers)
    by_metric = {row["metric"]: row["median"] for row in rows}
    assert by_metric["others mistakes"] == 0
    assert by_metric["root elsewhere_nbytes"] == by_metric["others elsewhere_nbytes"] == 0


@pytest.mark.parametrize("operation", ["step_after_pause", "step_after_answers", "steps_in_a_row"])
def test_a_smoke_run_of_steps_measures_objcomm_and_torch_beside_a_ring(
    operation: str, tmp_path: Path
) -> None:
    rows = _smoke_run(tmp_path, operation, "--world", "2")
    assert {row["peer"] for row in rows} == {"ring", "objcomm", "torch"}
    assert all(row["median"] > 0 for row in rows)
    busy = [row["median"] for row in rows if row["metric"] == PROCESSOR_SHARE]
    assert len(busy) == 2 * 3
    assert max(busy) < 2.1  # two ranks with one computing thread each


def test_a_smoke_run_takes_two_payloads_of_many(tmp_path: Path) -> None:
    rows = _smoke_run(tmp_path, "gathers", "--world", "2", "--peers", *_BESIDE_TORCH)
    assert {row["payload"] for row in rows} == {"small dict", *MEDIUM[:2]}


@pytest.mark.parametrize("operation", ["barriers", "first_call"])
def test_a_smoke_run_with_many_ranks_measures_objcomm_and_torch(
    operation: str, tmp_path: Path
) -> None:
    rows = _smoke_run(tmp_path, operation, "--world", "16")
    timed = [row for row in rows if row["metric"] == SECONDS]
    assert {row["peer"] for row in timed} == {"objcomm", "torch"}
    assert all(row["median"] > 0 for row in timed)
    more = [row["median"] for row in rows if row["metric"] == "root sockets"]
    assert all(count > 0 for count in more)
    assert len(more) == 2 * (operation == "first_call")


def test_a_forked_rank_that_fails_is_named_and_ends_the_others(tmp_path: Path) -> None:
    # In a separate process: this one has threads.
    program = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
from bench.fork import run_forked

def body(rank, store):
    store.add("came", 1)
    while store.add("came", 0) < 3:
        time.sleep(0.01)
    Path(sys.argv[1], str(os.getpid())).touch()
    if rank != 1:
        store.wait(["never"], timedelta(minutes=9))
    while len(list(Path(sys.argv[1]).iterdir())) < 3:
        time.sleep(0.01)
    raise ValueError("of rank 1")

run_forked(3, body, timedelta(minutes=1))
"""
    done = by_command([sys.executable, "-c", program, str(tmp_path)])
    assert done.status == 1
    assert "ValueError: of rank 1" in done.err
    assert "RuntimeError: rank 1 failed; exit status 1" in done.err
    assert not any(Path("/proc", each.name).exists() for each in tmp_path.iterdir())


class _MustWaitError(Exception):
    """Raised where a place on a ring would wait."""


@pytest.fixture
def _never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error instead of waiting."""

    def instead_of(name: str) -> Callable[..., None]:
        def must_wait(*_: float) -> None:
            raise _MustWaitError(name)

        return must_wait

    monkeypatch.setattr(os, "sched_yield", instead_of("yield"))
    monkeypatch.setattr(time, "sleep", instead_of("sleep"))


@contextlib.contextmanager
def _ring(readers: int, *, spin_seconds: float = 60.0) -> Iterator[list[Ring]]:
    """Yield the writer's place and the readers' places."""
    chunks = {"chunks": 2, "chunk_nbytes": 64}
    block = SharedMemory(create=True, size=block_nbytes(readers, *chunks.values()))
    try:
        yield [
            Ring(block, readers, spin_seconds=spin_seconds, **chunks) for _ in range(1 + readers)
        ]
    finally:
        block.close()
        block.unlink()


class _Watched(bytearray):
    """Memory that calls a function after each store."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.looks: list[Callable[[], None]] = []

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(at, value)
        looks, self.looks = self.looks, []
        for look in looks:
            look()
        self.looks = looks


@pytest.mark.usefixtures("_never_waits")
def test_a_reader_of_a_ring_never_sees_half_an_object_or_the_last_one_again() -> None:
    memory = _Watched(block_nbytes(1, 1, 64))
    block = cast("SharedMemory", SimpleNamespace(buf=memory))
    writer, reader = (Ring(block, 1, chunks=1, chunk_nbytes=64) for _ in range(2))
    seen: list[object] = []

    def look() -> None:
        with contextlib.suppress(_MustWaitError):
            seen.append(reader.read(0))

    memory.looks.append(look)
    writer.write("first")
    writer.write("second")
    assert seen == ["first", "second"]


def test_every_reader_of_a_ring_gets_every_object_in_order() -> None:
    with _ring(3) as (writer, *readers):
        got: list[list[int]] = [[] for _ in readers]

        def read(reader: int) -> None:
            got[reader] = [readers[reader].read(reader) for _ in range(100)]

        threads = [threading.Thread(target=read, args=(at,)) for at in range(3)]
        for thread in threads:
            thread.start()
        for number in range(100):
            writer.write(number)
        for thread in threads:
            thread.join()
        assert got == [list(range(100))] * 3


@pytest.mark.usefixtures("_never_waits")
def test_a_writer_waits_for_the_slowest_reader_of_a_ring() -> None:
    with _ring(2) as (writer, quick, slow):
        writer.write("first")
        writer.write("second")
        assert [quick.read(0), quick.read(0)] == ["first", "second"]
        with pytest.raises(_MustWaitError, match="yield"):
            writer.write("third")
        assert [slow.read(1), slow.read(1)] == ["first", "second"]
        with pytest.raises(_MustWaitError, match="yield"):
            quick.read(0)


def test_an_object_larger_than_a_chunk_is_refused_and_the_next_one_is_sent() -> None:
    with _ring(1) as (writer, reader):
        with pytest.raises(ValueError, match="has 115 bytes, a chunk 56"):
            writer.write(bytes(100))
        writer.write("fits")
        assert reader.read(0) == "fits"


@pytest.mark.usefixtures("_never_waits")
def test_a_reader_of_a_ring_that_has_spun_long_enough_sleeps() -> None:
    with _ring(1, spin_seconds=0.0) as (_, reader), pytest.raises(_MustWaitError, match="sleep"):
        reader.read(0)


def _bench(*arguments: str) -> None:
    done = by_command([sys.executable, "-m", "bench", *arguments])
    assert done.status == 0, done.err
