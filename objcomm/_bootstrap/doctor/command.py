"""``python -m objcomm doctor``: run all steps on one rank, and output the findings.

Rank 0 also collects the results of the other ranks, and reports.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from objcomm._bootstrap.doctor.facts import (
    UNKNOWN,
    Contact,
    Evidence,
    Lookup,
    Measured,
    Peer,
    Report,
)
from objcomm._bootstrap.doctor.findings import findings, status
from objcomm._bootstrap.doctor.host import examine, lookups
from objcomm._bootstrap.doctor.links import answering, contacts, measure, peers_of
from objcomm._bootstrap.doctor.meeting import Board, UnmetError, open_store
from objcomm._bootstrap.doctor.report import conclusions, draw, plain, report
from objcomm._bootstrap.launch import launch
from objcomm._config import settings
from objcomm._observe.terminal import show
from objcomm.errors import LaunchError, MissingDependencyError, UsageError, ranks_text, text_of

T = TypeVar("T")

_START_SECONDS = 60.0
_LEAST_SECONDS = 1.0
_PAUSE_SECONDS = 0.05
_QUIET_SECONDS = 3.0
_TRY_SECONDS = 3.0
_GRACE_SECONDS = 2.0
# Two processes with the same rank usually start at the same time.
_SETTLE_SECONDS = 0.3
# How long rank 0 keeps its store after the report; the other ranks see immediately that it is done.
_LEAVE_SECONDS = 3.0
# Allows for a store that does not answer, and for a busy machine.
_MARGIN_SECONDS = 30.0


class Options(NamedTuple):
    """The options of the command line.

    Attributes:
        seconds: how long ranks may take to arrive; all later steps together may take as long again.
        is_quick: whether to skip the measurement of links.
        png: where to draw the links.
        json: where to write everything that was found.
    """

    seconds: float
    is_quick: bool = False
    png: Path | None = None
    json: Path | None = None


def run(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    """Run the command, and return its exit status.

    Args:
        arguments: the parsed command line.
        refuse: ends the program because of a wrong argument.
    """
    if not _LEAST_SECONDS <= arguments.timeout < threading.TIMEOUT_MAX:
        refuse(f"--timeout must be at least {_LEAST_SECONDS:g}, not {arguments.timeout:g}")
    if arguments.nproc is not None and arguments.nproc < 1:
        refuse(f"--nproc must be at least 1, not {arguments.nproc}")
    options = Options(arguments.timeout, arguments.quick, arguments.png, arguments.json)
    if arguments.nproc is None:
        return check(options)
    if "RANK" in os.environ:
        refuse("--nproc starts ranks, but RANK is set: this is a rank already")
    limit = longest(options.seconds) + _START_SECONDS
    try:
        return max(launch(check, arguments.nproc, options, joined=False, timeout=limit))
    except LaunchError as error:
        _print_line(str(error))
        return 1


def longest(seconds: float) -> float:
    """Return the number of seconds after which the command must have ended in any case."""
    return 3 * seconds + _MARGIN_SECONDS


def check(options: Options) -> int:
    """Run this rank's part, report if it is this rank's task, and return the exit status."""
    faulthandler.dump_traceback_later(longest(options.seconds), exit=True)
    with contextlib.ExitStack() as leaving:
        leaving.callback(faulthandler.cancel_dump_traceback_later)
        own, place = examine(os.environ)
        if place is None:
            callers = dict.fromkeys(["127.0.0.1", own.address or "127.0.0.1"], own.rank)
            looked = lookups(own.rank, callers, options.seconds / 6)
            return _conclude(Evidence(1, {own.rank: own}, lookups=looked), own, options)
        deadline = time.monotonic() + options.seconds
        try:
            store, own = open_store(place, os.environ, own, deadline)
            own = _answering(own, leaving)
            return _Job(own, Board(store), options).run(deadline)
        except UnmetError as error:
            own = replace(own, meeting_problem=str(error))
            return _conclude(Evidence(own.world_size, {own.rank: own}), own, options)


def _answering(own: Report, leaving: contextlib.ExitStack) -> Report:
    """Start answering at Gloo's address, on one of objcomm's ports if the user has set any."""
    if not own.address:
        return own
    try:
        answers = answering(own.address, own.token, settings().chosen_ports)
        return replace(own, port=leaving.enter_context(answers))
    except (OSError, UsageError) as error:
        reason = getattr(error, "strerror", None) or error
        return replace(own, gloo_problem=f"cannot listen at {own.address}: {reason}")


def _conclude(evidence: Evidence, own: Report, options: Options) -> int:
    """Report on rank 0, or on a rank that has not met it, and return the exit status."""
    found = findings(evidence)
    if status(found):
        _leave_for_torchrun("\n".join(conclusions(found)))
    if own.rank != 0:
        name = "a process without a rank" if own.rank == UNKNOWN else f"rank {own.rank}"
        head = f"{name} (pid {own.pid} on {own.host}) has not met rank 0"
        _print_line("\n".join([head, *conclusions(found)]))
        return status(found)
    show(report(evidence, found))
    try:
        if options.json is not None:
            options.json.write_text(plain(evidence, found), encoding="utf-8")
        if options.png is not None and evidence.links:
            draw(evidence, options.png)
        elif options.png is not None:
            _print_line(f"no links were measured, so there is no {options.png}")
    except (MissingDependencyError, OSError, ValueError) as error:
        _print_line(text_of(error))
    return status(found)


def _leave_for_torchrun(text: str) -> None:
    """Make torchrun's own report of failed ranks, which it prints last, end with the findings.

    Torchrun shows the file of the rank that failed first, by its timestamp in whole seconds.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}
        with contextlib.suppress(OSError):  # then it shows only an exit status
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def _print_line(text: str) -> None:
    sys.stderr.write(f"objcomm doctor: {text}\n")  # in one call, because other ranks write too
    sys.stderr.flush()


class _Job:
    """The steps of a rank that has found the store; each has a timeout."""

    def __init__(self, own: Report, board: Board, options: Options) -> None:
        self._own = own
        self._board = board
        self._options = options
        # Each step has this long: reaching all ranks, creating a group, measuring links.
        self._seconds = options.seconds / 3

    def run(self, deadline: float) -> int:
        """Run all steps, and return the exit status."""
        board, own = self._board, self._own
        board.arrive(own)
        if own.rank == 0 and board.count("leaders") == 1:
            return self._lead(self._call_roll(deadline))
        while time.monotonic() < deadline and not board.count("leaders", 0):
            time.sleep(_PAUSE_SECONDS)
        has_leader = board.count("leaders", 0) > 0  # it waits for others just as long
        until = time.monotonic() + _GRACE_SECONDS + has_leader * self._options.seconds
        peers = board.fetch("peers", tuple[Peer, ...], until)
        if peers is None:
            return _conclude(self._evidence({own.rank: own}, board.arrivals()), own, self._options)
        if any(peer.token == own.token for peer in peers):
            self._try(peers)
            until = time.monotonic() + self._seconds + 2 * _GRACE_SECONDS
            if board.fetch("has measurement", bool, until):
                self._measure(peers)
        # Rank 0 waits for the last rank, reports, and posts its status.
        until = time.monotonic() + 3 * self._seconds + 2 * _GRACE_SECONDS
        ends = board.fetch("status", int, until)
        if ends is None:
            raise UnmetError("rank 0 did not report; see what it printed, and if it still runs")
        board.count("left")
        return ends

    def _call_roll(self, deadline: float) -> list[Report]:
        """Wait until all ranks have arrived or the deadline has passed; return all processes."""
        quiet_until = time.monotonic() + _QUIET_SECONDS
        while missing := self._evidence({}, self._board.arrivals()).missing:
            left = deadline - time.monotonic()
            if left < 0:
                break
            if time.monotonic() > quiet_until:
                quiet_until = deadline
                _print_line(f"waiting up to {left:.0f} s more for {ranks_text(missing)}")
            time.sleep(_PAUSE_SECONDS)
        time.sleep(_SETTLE_SECONDS)
        return self._board.arrivals()

    def _evidence(self, reports: dict[int, Report], arrived: Iterable[Report]) -> Evidence:
        """Return what is known after the ranks have arrived."""
        size, came = self._own.world_size, {each.rank for each in arrived}
        missing = tuple(rank for rank in range(size) if rank not in came)
        return Evidence(size, reports, missing, waited_seconds=self._options.seconds)

    def _lead(self, arrived: Sequence[Report]) -> int:
        """Collect the results of all ranks on rank 0, and report."""
        board, size = self._board, self._own.world_size
        first = {each.rank: each for each in reversed(arrived)} | {0: self._own}
        reports = {rank: first[rank] for rank in range(size) if rank in first}
        tokens = {each.token for each in reports.values()}
        others = tuple(each for each in arrived if each.token not in tokens)
        peers = tuple(
            Peer(*(getattr(each, name.name) for name in fields(Peer))) for each in reports.values()
        )
        board.post("peers", peers)
        self._try(peers)
        made = self._collect("contacts", tuple[Contact, ...], reports, self._seconds)
        evidence = replace(
            self._evidence(reports, arrived),
            others=others,
            contacts={
                rank: tuple(each for each in contacts if each.peer in reports)
                for rank, contacts in made.items()
            },
            lookups=board.find("lookups", tuple[Lookup, ...]) or (),
            silent=tuple(rank for rank in reports if rank not in made),
        )
        has_measurement = evidence.is_whole and size > 1 and not self._options.is_quick
        board.post("has measurement", has_measurement)
        if has_measurement:
            self._measure(peers)
            measured = self._collect("links", Measured, reports, 2 * self._seconds)
            evidence = replace(
                evidence,
                links=tuple(link for each in measured.values() for link in each.links),
                failures={rank: each.problem for rank, each in measured.items() if each.problem},
                silent=tuple(rank for rank in reports if rank not in measured),
            )
        ends = _conclude(evidence, self._own, self._options)
        with contextlib.suppress(UnmetError):  # the report is out
            board.post("status", ends)
            until = time.monotonic() + _LEAVE_SECONDS
            while board.count("left", 0) < len(arrived) - 1 and time.monotonic() < until:
                time.sleep(_PAUSE_SECONDS)
        return ends

    def _collect(
        self, name: str, kind: type[T], ranks: Iterable[int], seconds: float
    ) -> dict[int, T]:
        """Return what the ranks post under a name, for those that do so in time."""
        until = time.monotonic() + seconds + _GRACE_SECONDS
        found = {rank: self._board.fetch(f"{name}/{rank}", kind, until) for rank in ranks}
        return {rank: each for rank, each in found.items() if each is not None}

    def _try(self, peers: Sequence[Peer]) -> None:
        """Try to reach other ranks; one rank on the store's host also looks up all ranks' names."""
        rank = self._own.rank
        mine = [peer.rank for peer in peers].index(rank)
        wanted = [peers[at] for at in peers_of(mine, len(peers))]
        attempt = min(_TRY_SECONDS, self._seconds)
        made = contacts(wanted, attempt, self._seconds - attempt)
        if rank == next((peer.rank for peer in peers if peer.is_at_store), None):
            callers = {peer.caller: peer.rank for peer in reversed(peers) if peer.caller}
            self._board.post("lookups", lookups(rank, callers, self._seconds / 2))
        self._board.post(f"contacts/{rank}", made)

    def _measure(self, peers: Sequence[Peer]) -> None:
        machines = [peer.machine for peer in peers]
        seconds, store, rank = self._seconds, self._board.store, self._own.rank
        self._board.post(f"links/{rank}", measure(store, rank, machines, seconds, seconds))
