"""One rank's way through all steps; rank 0's differs in that it collects what the others find."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from objcomm._bootstrap.doctor.facts import (
    UNKNOWN,
    Contacts,
    Evidence,
    MeasuredLink,
    MeasuredLinks,
    Over,
    Peer,
    Plan,
    Report,
    Roll,
)
from objcomm._bootstrap.doctor.host import examine, lookups
from objcomm._bootstrap.doctor.links import Listener, contacts, measure, peers_of
from objcomm._bootstrap.doctor.meeting import Board, UnmetError, await_ranks, open_store
from objcomm._config import settings
from objcomm._environment import Placement
from objcomm.errors import UsageError, ranks_text

_PAUSE_SECONDS = 0.05
_QUIET_SECONDS = 3.0
_TRY_SECONDS = 3.0
_GRACE_SECONDS = 2.0
# A rank sees that all is over as soon as rank 0 says so; its store lives no longer than it must.
_LEAVE_SECONDS = 3.0
# For a store that does not answer, and for a machine that is busy.
_MARGIN_SECONDS = 30.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each step may take, in seconds.

    Attributes:
        meet: until all ranks must have come.
        attempt: to reach one rank's host.
        reach: to reach all.
        look: to look up names.
        connect: to make a group.
        measure: to measure the links.
    """

    meet: float
    attempt: float
    reach: float
    look: float
    connect: float
    measure: float

    @classmethod
    def of(cls, seconds: float) -> "Limits":
        """Those of a job: so much for the ranks to come, and as much again for all the rest."""
        third = seconds / 3
        return cls(seconds, min(_TRY_SECONDS, third), third, third / 2, third, third)

    @property
    def all(self) -> float:
        """When the command must have ended, whatever happens."""
        return 3 * self.meet + _MARGIN_SECONDS


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank knows at the end.

    Attributes:
        evidence: to draw conclusions from; None on a rank for which rank 0 does that.
        report: this rank's own.
        end: to be called with the exit status, once rank 0 has reported.
        status: the exit status that rank 0 has told, where it draws the conclusions.
    """

    evidence: Evidence | None
    report: Report
    end: Callable[[int], None]
    status: int = 0


def carry_out(environ: Mapping[str, str], limits: Limits, tell: Tell, *, is_quick: bool) -> Outcome:
    """Go through all steps that this rank can go.

    Args:
        environ: as ``os.environ``.
        limits: of each step.
        tell: given what is waited for, on rank 0.
        is_quick: whether the links are not measured.
    """
    report, place = examine(environ)
    if place is None:
        callers = dict.fromkeys(["127.0.0.1", report.gloo.address or "127.0.0.1"], report.rank)
        evidence = Evidence(
            report.world_size,
            {report.rank: report},
            is_alone=True,
            lookups={report.rank: lookups(callers, limits.look)},
        )
        return Outcome(evidence, report, _nothing)
    deadline = time.monotonic() + limits.meet
    try:
        store, seen = open_store(place, environ, report.interfaces, deadline)
    except UnmetError as error:
        return _alone(report, error)
    report = replace(report, rendezvous=seen)
    report, listener = _listening(report)
    try:
        rank = _Rank(report, place, Board(store), limits, tell, is_quick=is_quick)
        return rank.lead(deadline) if place.rank == 0 else rank.follow(deadline)
    except UnmetError as error:
        return _alone(report, error)
    finally:
        if listener is not None:
            listener.close()


def _nothing(_: int) -> None:
    """For a rank that nobody waits for."""


def _alone(report: Report, error: UnmetError) -> Outcome:
    seen = replace(report.rendezvous, problem=error.problem, remedy=error.remedy)
    report = replace(report, rendezvous=seen)
    return Outcome(
        Evidence(report.world_size, {report.rank: report}, is_alone=True), report, _nothing
    )


def _listening(report: Report) -> tuple[Report, Listener | None]:
    """Begin to listen where Gloo would, at one of objcomm's ports where the user names some."""
    if report.gloo.problem:
        return report, None
    try:
        listener = Listener(report.gloo.address, report.token, settings().chosen_ports)
    except (OSError, UsageError) as error:
        reason = error.strerror if isinstance(error, OSError) else ""
        problem = f"nobody can listen at {report.gloo.address}: {reason or error}"
        return replace(report, gloo=replace(report.gloo, problem=problem)), None
    return replace(report, port=listener.port), listener


class _Rank:
    """One rank that has found the store."""

    def __init__(
        self,
        report: Report,
        place: Placement,
        board: Board,
        limits: Limits,
        tell: Tell,
        *,
        is_quick: bool,
    ) -> None:
        self._report = report
        self._place = place
        self._board = board
        self._limits = limits
        self._tell = tell
        self._is_quick = is_quick
        self._arrival = board.arrive(report)

    def follow(self, deadline: float) -> Outcome:
        """Any rank's way but rank 0's."""
        board, limits = self._board, self._limits
        roll = self._roll(deadline)
        if roll is None:
            return self._leaderless()
        if any(peer.arrival == self._arrival for peer in roll.peers):
            board.post(f"contacts/{self._place.rank}", self._contacts(roll))
            plan = board.fetch("plan", Plan, time.monotonic() + limits.reach + 2 * _GRACE_SECONDS)
            if plan is not None and plan.has_measurement:
                board.post(f"links/{self._place.rank}", self._links(roll))
        # Rank 0 waits for the last rank, reports, and says so.
        rest = limits.reach + limits.connect + limits.measure + 2 * _GRACE_SECONDS
        over = board.fetch("over", Over, time.monotonic() + rest)
        if over is None:
            raise UnmetError("rank 0 did not report", "see what it printed, and if it still runs")
        board.count("left")
        return Outcome(None, self._report, _nothing, over.status)

    def _roll(self, deadline: float) -> Roll | None:
        """Wait for rank 0, and then as long as it waits for others; None if it did not come."""
        while time.monotonic() < deadline and not self._board.has("leader is here"):
            time.sleep(_PAUSE_SECONDS)
        until = time.monotonic() + _GRACE_SECONDS
        if self._board.has("leader is here"):
            until += self._limits.meet
        return self._board.fetch("roll", Roll, until)

    def _leaderless(self) -> Outcome:
        seen = {report.rank for report in self._board.arrivals().values()}
        evidence = Evidence(
            self._place.world_size,
            {self._place.rank: self._report},
            waited_seconds=self._limits.meet,
            is_alone=True,
            seen=tuple(sorted(seen)),
        )
        return Outcome(evidence, self._report, _nothing)

    def lead(self, deadline: float) -> Outcome:
        """Rank 0's way: all the others', and collecting what they find."""
        board, size = self._board, self._place.world_size
        if board.count("leaders") > 1:
            return self.follow(deadline)  # another process is rank 0, too
        board.post("leader is here", Over(0))
        arrived = await_ranks(board, size, deadline, _Waiting(self._tell, deadline))
        chosen, others = self._chosen(arrived)
        here = [rank for rank, (_, report) in chosen.items() if report.rendezvous.is_here]
        roll = Roll(
            tuple(_peer(number, report) for number, report in chosen.values()),
            min(here, default=UNKNOWN),
        )
        board.post("roll", roll)
        evidence = Evidence(
            size,
            {rank: report for rank, (_, report) in sorted(chosen.items())},
            others=others,
            waited_seconds=self._limits.meet,
        )
        evidence = self._with_contacts(evidence, roll)
        plan = Plan(evidence.is_whole and size > 1 and not self._is_quick)
        board.post("plan", plan)
        if plan.has_measurement:
            evidence = self._with_links(evidence, roll)
        return Outcome(evidence, self._report, lambda status: self._end(status, len(arrived) - 1))

    def _chosen(
        self, arrived: Mapping[int, Report]
    ) -> tuple[dict[int, tuple[int, Report]], tuple[Report, ...]]:
        """Who takes part, with the number of its arrival; and who came besides."""
        chosen = {0: (self._arrival, self._report)}
        others = []
        for number, report in sorted(arrived.items()):
            if report.rank in chosen or not 0 <= report.rank < self._place.world_size:
                others += [report] * (number != self._arrival)
            else:
                chosen[report.rank] = (number, report)
        return chosen, tuple(others)

    def _end(self, status: int, others: int) -> None:
        """Say that all is over, and stay until the others have heard it: the store may be here."""
        try:
            self._board.post("over", Over(status))
            until = time.monotonic() + _LEAVE_SECONDS
            while self._board.count("left", 0) < others and time.monotonic() < until:
                time.sleep(_PAUSE_SECONDS)
        except UnmetError:
            return  # the report is out

    def _contacts(self, roll: Roll) -> Contacts:
        ranks = {peer.rank: peer for peer in roll.peers}
        ordered = sorted(ranks)
        mine = ordered.index(self._place.rank)
        wanted = [ranks[ordered[place]] for place in peers_of(mine, len(ordered))]
        limits = self._limits
        made = contacts(wanted, limits.attempt, limits.reach - limits.attempt)
        if roll.looker != self._place.rank:
            return Contacts(made)
        callers: dict[str, int] = {}
        for rank in ordered:
            if ranks[rank].caller:
                callers.setdefault(ranks[rank].caller, rank)
        return Contacts(made, lookups(callers, limits.look))

    def _links(self, roll: Roll) -> MeasuredLinks:
        machines = [peer.machine for peer in sorted(roll.peers, key=lambda peer: peer.rank)]
        limits = self._limits
        return measure(
            self._board.store, self._place.rank, machines, limits.connect, limits.measure
        )

    def _with_contacts(self, evidence: Evidence, roll: Roll) -> Evidence:
        found = {0: self._contacts(roll)}
        deadline = time.monotonic() + self._limits.reach + _GRACE_SECONDS
        for rank in evidence.reports:
            if rank:
                told = self._board.fetch(f"contacts/{rank}", Contacts, deadline)
                if told is not None:
                    found[rank] = told
        return replace(
            evidence,
            contacts={rank: each.made for rank, each in found.items()},
            lookups={rank: each.lookups for rank, each in found.items() if each.lookups},
            silent=tuple(rank for rank in evidence.reports if rank not in found),
        )

    def _with_links(self, evidence: Evidence, roll: Roll) -> Evidence:
        deadline = time.monotonic() + self._limits.connect + self._limits.measure + _GRACE_SECONDS
        told = {0: self._links(roll)}
        for rank in evidence.reports:
            if (
                rank
                and (links := self._board.fetch(f"links/{rank}", MeasuredLinks, deadline))
                is not None
            ):
                told[rank] = links
        measured: list[MeasuredLink] = [link for links in told.values() for link in links.measured]
        return replace(
            evidence,
            links=tuple(measured),
            failures={rank: links.problem for rank, links in told.items() if links.problem},
            left_out=told[0].left_out,
            silent=tuple(rank for rank in evidence.reports if rank not in told),
        )


class _Waiting:
    """Says once whom rank 0 waits for, if that takes long."""

    def __init__(self, tell: Tell, deadline: float) -> None:
        self._tell = tell
        self._deadline = deadline
        self._quiet_until = time.monotonic() + _QUIET_SECONDS
        self._has_told = False

    def __call__(self, awaited: set[int]) -> None:
        if not self._has_told and time.monotonic() > self._quiet_until:
            self._has_told = True
            left = max(self._deadline - time.monotonic(), 0.0)
            self._tell(f"waiting up to {left:.0f} s more for {ranks_text(awaited)}")


def _peer(number: int, report: Report) -> Peer:
    address = "" if report.gloo.problem else report.gloo.address
    return Peer(
        report.rank,
        report.machine,
        address,
        report.port,
        report.token,
        number,
        report.rendezvous.caller,
    )
