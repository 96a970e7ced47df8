"""Carry out a plan on one rank."""

import contextlib
import gc
import json
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import objcomm
from objcomm._observe import history
from objcomm._world import store_of
from tests.group.helpers import in_thread
from tests.same import assert_same
from tests.soak import measure
from tests.soak.faults import expected
from tests.soak.operations import OPERATIONS, world_colors
from tests.soak.plan import Round, round_of
from tests.soak.turn import Expected, Party, Subgroup, Turn
from tests.workers import here

_LANE = "soak"


def join(port: int) -> dist.TCPStore:
    """Initialize torch.distributed with a store on that port; return a separate client of it."""
    place = here()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    own: dist.TCPStore = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return own


def fill_histories() -> None:
    """Call each group that lives to the end until its history is full; every rank calls this.

    A history keeps the last 256 calls, 3,500 blocks of Python's allocator. The histories of the
    groups that the world is split into would grow for 15,000 turns, which looks like a leak.
    """
    for group in (None, *(objcomm.split(color) for color in world_colors(dist.get_rank()))):
        for _ in range(history.LENGTH):
            objcomm.barrier(group=group)


def ask_once() -> None:
    """Have every rank write its position to the store; every rank calls this.

    Ranks do this when some rank waits for half a second, which otherwise happens at any time or
    never.
    """
    if not dist.get_rank():  # the others wait for it in the barrier, and so ask
        answers = [f"where/{rank}" for rank in range(dist.get_world_size())]
        board = dist.PrefixStore("objcomm", store_of(dist.group.WORLD))
        board.wait(answers, timedelta(seconds=300))
    objcomm.barrier("all have asked")


class _Groups:
    """The process groups of the subgroups that are alive."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {0: None}
        self.made_count = 0
        self.left_by_torch = 0

    def make(self, subgroup: Subgroup) -> None:
        """Create a group; every rank of the world calls this."""
        self._made[subgroup.number] = dist.new_group(list(subgroup.members))
        self.made_count += 1
        # Measured with torch 2.13: each member's address stays in the store.
        self.left_by_torch += len(subgroup.members)

    def destroy(self, subgroup: Subgroup) -> None:
        """Destroy a group; members and other ranks both call this."""
        group = self._made.pop(subgroup.number)
        if dist.get_rank() in subgroup.members:
            dist.destroy_process_group(group)

    def of(self, subgroup: Subgroup) -> Any:
        """Return what to pass as ``group=``."""
        return self._made[subgroup.number]


class Soak:
    """One rank of a soak."""

    def __init__(self, seed: int, port: int, record: Path) -> None:
        measure.steady_allocator()
        measure.no_idle_threads()
        # A rank's first lookup of a name imports the codec, which takes 1,300 blocks. On a busy
        # machine that may be late.
        "localhost".encode("idna")
        self._seed = seed
        self._record = record / f"rank{here().rank}.jsonl"
        self._store = join(port)
        self._groups = _Groups()
        self._standing: tuple[Subgroup, ...] = ()
        self._lock = threading.Lock()
        self._turns = self._errors = 0
        self._descriptors = sys.maxsize
        self._began = time.monotonic()

    def run(self, seconds: float, turns: int, checkpoint: float) -> None:
        """Run rounds until both limits are reached; every rank calls this.

        Args:
            seconds: minimum duration.
            turns: minimum number of rank 0's turns.
            checkpoint: interval at which to stop, destroy all subgroups and measure: in seconds if
                ``seconds`` is given, otherwise in turns.
        """
        fill_histories()
        ask_once()
        number, due = 0, 0.0
        elapsed, taken = 0.0, 0
        while elapsed < seconds or taken < turns:
            if (now := elapsed if seconds else taken) >= due:
                self._checkpoint()
                due = now + checkpoint
            self._do(round_of(self._seed, number, here().world_size))
            number += 1
            # One clock and one counter decide for all ranks.
            elapsed, taken = objcomm.broadcast((time.monotonic() - self._began, self._turns))
        self._checkpoint()

    def _do(self, work: Round) -> None:
        self._stand(work.standing)

        def on_the_side() -> None:
            with objcomm.lane(_LANE):
                self._take(work.side)

        thread = in_thread(on_the_side)
        for turn in work.main:
            is_transient = turn.group.number < 0
            self._stand([*work.standing, turn.group] if is_transient else work.standing)
            self._take([turn])
        self._stand(work.standing)
        thread.join()

    def _stand(self, wanted: Sequence[Subgroup]) -> None:
        """Destroy and create groups until exactly the wanted ones are alive."""
        for subgroup in self._standing:
            if subgroup not in wanted:
                self._groups.destroy(subgroup)
        for subgroup in wanted:
            if subgroup not in self._standing:
                self._groups.make(subgroup)
        self._standing = tuple(wanted)

    def _take(self, turns: Sequence[Turn]) -> None:
        me = dist.get_rank()
        for turn in turns:
            if me in turn.group.members:
                party = Party(turn.group.members.index(me), self._groups.of(turn.group))
                raised = take(turn, party)
                with self._lock:
                    self._turns += 1
                    self._errors += raised

    def _checkpoint(self) -> None:
        """Record what this rank holds while no subgroup exists and no operation is in progress."""
        self._stand(())
        gc.collect()
        objcomm.barrier("before a checkpoint")
        held = measure.held(self._descriptors)
        self._descriptors = held[-1]
        figures = measure.Figures(
            round(time.monotonic() - self._began, 1),
            self._turns,
            self._errors,
            self._groups.made_count,
            *held,
            measure.keys_in(self._store, objcomm.world_size()) - self._groups.left_by_torch,
        )
        write(self._record, figures)
        objcomm.barrier("after a checkpoint")


def write(record: Path, figures: measure.Figures) -> None:
    """Append a line to this rank's record."""
    with record.open("a") as lines:
        lines.write(json.dumps(figures._asdict()) + "\n")


def take(turn: Turn, party: Party) -> bool:
    """Run one turn on this rank and check its result against the model.

    Returns:
        Whether it raised, as expected.
    """
    wanted = expected(turn, party.rank)
    got: Any = None
    caught: Exception | None = None
    try:
        got = OPERATIONS[turn.operation].call(turn, party)
    except objcomm.ObjcommError as error:
        caught = error
    try:
        if wanted.error is None:
            assert caught is None, f"raised {caught!r}"
            assert_same(got, wanted.value, sharing=False)
        else:
            _check_error(caught, wanted, party)
    except AssertionError as error:
        error.add_note(f"rank {party.rank} in {turn}")
        raise error from caught
    return wanted.error is not None


def _check_error(caught: Exception | None, wanted: Expected, party: Party) -> None:
    assert type(caught) is wanted.error, f"{wanted.error} was expected, not {caught!r}"
    assert wanted.text in str(caught), str(caught)
    if isinstance(caught, objcomm.CollectiveError):
        assert list(caught.failures) == [wanted.failed], str(caught)
        assert (caught.__cause__ is not None) == (party.rank == wanted.failed), str(caught)


def soak(
    *,
    seed: int,
    port: int,
    record: str,
    checkpoint: float,
    seconds: float = 0.0,
    turns: int = 0,
) -> None:
    """Run a soak on each worker."""
    running = Soak(seed, port, Path(record))
    try:
        running.run(seconds, turns, checkpoint)
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
