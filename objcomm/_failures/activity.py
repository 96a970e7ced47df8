"""What each rank of a job is doing now, for people who watch it: ``objcomm.monitor`` and ``top``.

Ranks publish a snapshot when another rank wants to know what it waits for. A monitor asks the same
question at regular intervals, so a rank that nobody watches does no extra work.
"""

import contextlib
import math
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

from objcomm._config import seconds_of
from objcomm._failures.deadlock import WaitSnapshot
from objcomm._failures.inquiry import wait_snapshot
from objcomm._failures.liveness import Process, Processes
from objcomm._failures.noticeboard import Reader, StoreSilentError, pause_seconds
from objcomm._failures.watchdog import board_thread_of
from objcomm._observe.stacks import StackSampler
from objcomm._observe.terminal import printable
from objcomm._transport.threads import done_within
from objcomm._wire.header import operation_name
from objcomm._world import default_group, group_for_call, is_reachable
from objcomm.errors import UsageError

R = TypeVar("R")

State = Literal["waiting", "in call", "computing", "no answer", "stopped", "ended", "not started"]

# How far back waits for a rank count.
_WINDOW_SECONDS = 60.0
# How late a rank on a busy machine may answer.
_LATE_SECONDS = 0.5
_PAUSE_SECONDS = 0.05
# Answers closer together than this, to several monitors, yield no rate.
_LEAST_SECONDS = 0.01
# The board's thread may be busy with an investigation, which takes up to 1.2 s.
_STORE_SECONDS = 3.0
# Limits on what a stranger may have written to the store.
_MOST_RANKS = 1 << 16
_MOST_LETTERS = 200

_COUNTED = ("calls", "sent_nbytes", "received_nbytes")


@dataclass(frozen=True, slots=True)
class RankActivity:
    """What one rank is doing, as far as objcomm sees it. All ranks are global ranks.

    Attributes:
        rank: the rank.
        state: ``"waiting"`` for other ranks in a call; ``"in call"`` but not waiting, for example
            while it encodes; ``"computing"`` outside objcomm; ``"no answer"`` if it does not
            publish what it does; ``"stopped"`` by a signal or a debugger; ``"ended"``; or
            ``"not started"`` if it has not used objcomm yet.
        reason: why its process has ended; empty if it has not.
        operation: the call that it is in, or the last one; empty if there is none.
        call: how many calls it began before this one on the same lane; -1 if there is none.
        group: the name of the call's group.
        awaits: the rank that it waits for; -1 if there is none, or if any rank will do.
        seconds: how long it has been waiting; if it is computing, how long ago its last call
            ended; if it does not answer, how long it has been silent.
        line: where it is in the program, as ``file:line in function``; empty if unknown.
        line_seconds: how long it has been seen there.
        calls: number of calls that it has completed.
        sent_nbytes: bytes sent in these calls.
        received_nbytes: bytes received in these calls.
        calls_per_second: calls completed per second since its previous answer; None if unknown.
        sent_nbytes_per_second: bytes sent per second in these calls.
        received_nbytes_per_second: bytes received per second in these calls.
        awaited_seconds: how long other ranks waited for it within the last minute, in total.
    """

    rank: int
    state: State
    reason: str = ""
    operation: str = ""
    call: int = -1
    group: str = ""
    awaits: int = -1
    seconds: float = 0.0
    line: str = ""
    line_seconds: float = 0.0
    calls: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    calls_per_second: float | None = None
    sent_nbytes_per_second: float | None = None
    received_nbytes_per_second: float | None = None
    awaited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Activity:
    """What all ranks of a job are doing.

    Attributes:
        at: the time, in seconds since 1970.
        ranks: the activity of each rank, in rank order.
        slowest: the rank with the most ``awaited_seconds``; -1 if no rank has waited.
    """

    at: float
    ranks: tuple[RankActivity, ...]
    slowest: int


class OnBoard(Protocol):
    """Runs a job on the thread that may use a noticeboard."""

    def __call__(self, job: Callable[[Reader], R], /) -> R:
        """Return the job's result; raise StoreSilentError if the store does not answer in time."""


class Monitor:
    """Asks all ranks of a world what they are doing, and compares the answers with earlier ones."""

    def __init__(self, on_board: OnBoard, size: int) -> None:
        """Create a monitor that has not asked yet.

        Args:
            on_board: see ``OnBoard``.
            size: the number of ranks as far as known; the ranks' records may show that it is more.
        """
        self._on_board = on_board
        self._size = min(size, _MOST_RANKS)
        self._processes = Processes()
        self._last: dict[int, WaitSnapshot] = {}
        self._rates: dict[int, tuple[float, float, float]] = {}
        self._heard_at: dict[int, float] = {}
        self._looked_at = math.nan
        self._waits: deque[tuple[float, dict[int, float]]] = deque()

    def look(self) -> Activity:
        """Ask all ranks, give them time to answer, and return what they are doing.

        If the store does not answer, no rank does.
        """
        answers: dict[int, WaitSnapshot] = {}
        with contextlib.suppress(StoreSilentError):
            processes = self._on_board(lambda board: board.processes_of(range(self._size)))
            for rank, process in processes.items():
                self._processes.note(rank, process)
                self._size = min(max(self._size, process.world_size), _MOST_RANKS)
            asked = self._on_board(lambda board: board.ask())
            answers = self._answers(
                asked, [rank for rank in processes if not self._processes.end_of(rank)]
            )
        now = time.monotonic()
        for rank, answer in answers.items():
            if _is_sound(answer, self._size):
                self._note(rank, answer, now)
        stopped = self._processes.stopped()
        rows = [self._row(rank, now, is_stopped=rank in stopped) for rank in range(self._size)]
        awaited = self._awaited(rows, now)
        slowest = max(awaited, key=awaited.__getitem__, default=-1)
        rows = [replace(row, awaited_seconds=awaited.get(row.rank, 0.0)) for row in rows]
        return Activity(time.time(), tuple(rows), slowest)

    def _answers(self, asked: int, ranks: Iterable[int]) -> dict[int, WaitSnapshot]:
        """Return these ranks' answers to a question, once all have answered or time is up."""
        missing, found = set(ranks), dict[int, WaitSnapshot]()
        until = time.monotonic() + pause_seconds(self._size) + _LATE_SECONDS
        pause = pause_seconds(self._size)

        def read(board: Reader) -> dict[int, WaitSnapshot | None]:
            return {rank: board.read(rank, asked) for rank in missing}

        while missing and time.monotonic() < until:
            time.sleep(pause)
            read_now = self._on_board(read)
            found |= {rank: answer for rank, answer in read_now.items() if answer is not None}
            missing -= found.keys()
            pause = _PAUSE_SECONDS
        return found

    def _note(self, rank: int, answer: WaitSnapshot, now: float) -> None:
        """Keep an answer, and compute the rates since the previous one."""
        before = self._last.get(rank, answer)
        seconds = answer.taken_at - before.taken_at
        self._rates.pop(rank, None)
        if seconds >= _LEAST_SECONDS:
            # A counter that was reset starts again at zero.
            calls, sent, received = (
                max(0, getattr(answer, each) - getattr(before, each)) / seconds for each in _COUNTED
            )
            self._rates[rank] = calls, sent, received
        self._last[rank], self._heard_at[rank] = answer, now

    def _row(self, rank: int, now: float, *, is_stopped: bool) -> RankActivity:
        """Return what a rank is doing; the answers of this look were noted at ``now``."""
        answer = self._last.get(rank)
        counted: dict[str, Any] = {each: getattr(answer, each, 0) for each in _COUNTED}
        if self._processes.of(rank) is None:
            return RankActivity(rank, "not started")
        if end := self._processes.end_of(rank):
            return RankActivity(rank, "ended", printable(end[:_MOST_LETTERS]), **counted)
        silent = now - self._heard_at.setdefault(rank, now)
        if is_stopped:
            return RankActivity(rank, "stopped", seconds=silent, **counted)
        if answer is None or silent:
            return RankActivity(rank, "no answer", seconds=silent, **counted)
        calls, sent, received = self._rates.get(rank, (None, None, None))
        thread = _thread_of(answer)
        running = next((each for each in answer.running if each.thread == thread), None)
        row = RankActivity(
            rank,
            "computing",
            line="" if running is None else printable(running.text[-_MOST_LETTERS:]),
            line_seconds=0.0 if running is None else running.seconds,
            calls_per_second=calls,
            sent_nbytes_per_second=sent,
            received_nbytes_per_second=received,
            **counted,
        )
        return _with_call(row, answer, thread)

    def _awaited(self, rows: Iterable[RankActivity], now: float) -> dict[int, float]:
        """Return how long each rank was waited for within the last minute, in total.

        A rank that is waiting when it answers counts as waiting since the previous look. On average
        that is right, because the longer a rank waits, the more often it is found waiting. A wait
        for a rank that is itself waiting counts for the rank at the end of the chain.
        """
        seconds, self._looked_at = now - self._looked_at, now
        awaits = {row.rank: row.awaits for row in rows if row.state == "waiting"}
        ends: list[int] = []
        for first, rank in awaits.items():
            seen = {first}
            while rank in awaits and rank not in seen:
                seen.add(rank)
                rank = awaits[rank]  # noqa: PLW2901  # the next of the chain
            ends += [rank] if rank >= 0 and rank not in awaits else []
        if seconds > 0:  # it is NaN at the first look
            self._waits.append((now, {rank: seconds * ends.count(rank) for rank in set(ends)}))
        while self._waits and self._waits[0][0] < now - _WINDOW_SECONDS:
            self._waits.popleft()
        sums: dict[int, float] = defaultdict(float)
        for _, each in self._waits:
            for rank, waited in each.items():
                sums[rank] += waited
        return sums


def _is_sound(answer: WaitSnapshot, size: int) -> bool:
    """Whether all numbers in a snapshot are plausible: a stranger may have written it."""
    seconds = [lane.seconds for lane in answer.lanes] + [each.seconds for each in answer.running]
    return (
        all(0 <= each < math.inf for each in [answer.taken_at, *seconds])
        and all(-1 <= lane.waits_for < size for lane in answer.lanes)
        and all(getattr(answer, each) >= 0 for each in _COUNTED)
    )


def _thread_of(answer: WaitSnapshot) -> int:
    """Return the thread to show: the main one, if it uses objcomm or no thread does."""
    used = {each for lane in answer.lanes for each in (lane.thread, lane.waiter)}
    if answer.main_thread in used or not answer.lanes:
        return answer.main_thread
    waiting = [lane.waiter for lane in answer.lanes if lane.waiter]
    return waiting[0] if waiting else min(answer.lanes, key=lambda lane: lane.seconds).thread


def _with_call(row: RankActivity, answer: WaitSnapshot, thread: int) -> RankActivity:
    """Add the call that a thread is in, or its last one."""
    state: State = "waiting"
    lane = answer.waiting_of(thread)
    step = None if lane is None else lane.now
    if lane is None or step is None:
        own = [each for each in answer.lanes if each.thread == thread and each.past]
        lane = min(own, key=lambda each: (not each.is_inside, each.seconds), default=None)
        if lane is None:
            return row
        state, step = "in call" if lane.is_inside else "computing", lane.past[-1]
    name = step.operation_name or operation_name(step.operation)
    return replace(
        row,
        state=state,
        operation=printable(name[:_MOST_LETTERS]),
        call=max(0, step.sequence),
        group=printable(lane.group[:_MOST_LETTERS]),
        awaits=lane.waits_for if state == "waiting" else -1,
        seconds=lane.seconds,
    )


class _Alone(Reader):
    """Answers for a process that is the only rank, and has no store."""

    def __init__(self) -> None:
        self._asked = 0
        self._sampler = StackSampler()

    def on_board(self, job: Callable[[Reader], R], /) -> R:
        """Run a job on another thread, which can see where this one is."""
        return done_within(_STORE_SECONDS, lambda: job(self))

    def ask(self) -> int:
        self._asked += 1
        return self._asked

    def processes_of(self, ranks: Iterable[int]) -> dict[int, Process]:
        return dict.fromkeys(ranks, Process.own())

    def read(self, rank: int, asked: int) -> WaitSnapshot | None:
        del rank
        answer = wait_snapshot((), asked)
        running = self._sampler.sample({answer.main_thread}, answer.taken_at)
        return answer._replace(running=running)


class _Looks(Iterator[Activity]):
    """Looks at regular intervals, until the world is left."""

    def __init__(self, monitor: Monitor, seconds: float, is_left: Callable[[], bool]) -> None:
        self._monitor = monitor
        self._seconds = seconds
        self._is_left = is_left
        self._due = 0.0

    def __next__(self) -> Activity:
        time.sleep(max(0.0, self._due - time.monotonic()))
        if self._is_left():
            raise StopIteration
        self._due = time.monotonic() + self._seconds
        return self._monitor.look()


def monitor(interval: float | timedelta = 1.0) -> Iterator[Activity]:
    """Report at intervals what every rank is doing while the program runs.

    One rank calls this, usually rank 0 in a thread. The other ranks need not call anything. Each
    step of the iterator asks all ranks through the store and takes 0.3 s, up to 0.8 s if a rank
    does not answer, and longer with more than 300 ranks. Between steps nothing is asked.

    Only objcomm's calls are visible, and under ``objcomm.run`` those of torch's object functions.
    Calls and bytes are counted when a call has ended. ``python -m objcomm top`` shows the same from
    outside the job.

    Args:
        interval: seconds or timedelta between updates.

    Returns:
        An iterator that ends when this process leaves the world. A rank that does not answer, and
        all of them if the store does not, has the state ``"no answer"``. Rates and
        ``awaited_seconds`` are known from the second update on.

    Raises:
        UsageError: ``interval`` is invalid; or the environment says that there are other ranks, but
            torch.distributed is not initialized; or the world's ranks have no store in common.

    Examples:
        >>> import objcomm
        >>> for activity in objcomm.monitor(interval=10):
        ...     for row in activity.ranks:
        ...         print(row.rank, row.state, row.operation, row.awaits)
        ...     break
        0 computing  -1
    """
    try:
        seconds = seconds_of("monitor", interval)
    except UsageError:
        raise UsageError(
            f"monitor: interval={interval!r} must be a positive number of seconds or a timedelta"
        ) from None
    world = group_for_call(None, "monitor")
    if world is None or world.size() == 1:
        return _Looks(Monitor(_Alone().on_board, 1), seconds, lambda: False)
    if not is_reachable(None):
        raise UsageError("monitor: the ranks of this process group have no store in common")
    board_thread = board_thread_of(world)
    there = weakref.ref(world)

    def on_board(job: Callable[[Reader], R], /) -> R:
        return board_thread.call(job, _STORE_SECONDS)

    def is_left() -> bool:
        return there() is None or default_group() is not there()

    return _Looks(Monitor(on_board, world.size()), seconds, is_left)


# The name of each metric, its type, its help text, and its value.
_SERIES: dict[str, tuple[str, str, Callable[[RankActivity], float]]] = {
    "answers": (
        "gauge",
        "1 if the rank publishes what it does, else 0.",
        lambda row: int(row.state in {"waiting", "in call", "computing"}),
    ),
    "waiting_seconds": (
        "gauge",
        "For how long the rank has been waiting for others in its current call.",
        lambda row: row.seconds if row.state == "waiting" else 0.0,
    ),
    "awaits": (
        "gauge",
        "The rank that this rank waits for, or -1.",
        lambda row: row.awaits,
    ),
    "awaited_seconds": (
        "gauge",
        "For how long other ranks waited for this rank within the last minute, added up.",
        lambda row: row.awaited_seconds,
    ),
    "calls_total": ("counter", "Calls that the rank has completed.", lambda row: row.calls),
    "sent_bytes_total": ("counter", "Bytes sent in these calls.", lambda row: row.sent_nbytes),
    "received_bytes_total": (
        "counter",
        "Bytes received in these calls.",
        lambda row: row.received_nbytes,
    ),
}


def activity_to_prometheus(activity: Activity) -> str:
    """Return what all ranks are doing, in Prometheus' text format.

    ``python -m objcomm top --prometheus PORT`` serves this.

    Args:
        activity: an item of ``objcomm.monitor()``.

    Returns:
        The text of the metrics ``objcomm_rank_answers``, ``objcomm_rank_waiting_seconds``,
        ``objcomm_rank_awaits``, ``objcomm_rank_awaited_seconds``, ``objcomm_rank_calls_total``,
        ``objcomm_rank_sent_bytes_total`` and ``objcomm_rank_received_bytes_total``, each with the
        label ``rank``.

    Raises:
        UsageError: ``activity`` is not such an item.

    Examples:
        >>> import objcomm
        >>> activity = next(objcomm.monitor())
        >>> text = objcomm.exporters.activity_to_prometheus(activity)
        >>> [line for line in text.splitlines() if "awaits{" in line]
        ['objcomm_rank_awaits{rank="0"} -1']
    """
    if not isinstance(activity, Activity):
        raise UsageError(
            f"activity_to_prometheus: activity={activity!r} must be an item of objcomm.monitor()"
        )
    lines = []
    for name, (kind, meaning, value) in _SERIES.items():
        metric = f"objcomm_rank_{name}"
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {kind}"]
        lines += [f'{metric}{{rank="{row.rank}"}} {value(row)}' for row in activity.ranks]
    return "\n".join([*lines, ""])
