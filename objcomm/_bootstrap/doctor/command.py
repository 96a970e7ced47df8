"""``python -m objcomm doctor``: what it does, and all its conclusions, the worst first."""

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objcomm._bootstrap.doctor.examination import Limits, Outcome, carry_out
from objcomm._bootstrap.doctor.facts import UNKNOWN, Evidence
from objcomm._bootstrap.doctor.findings import Finding, Severity, attendance, installation
from objcomm._bootstrap.doctor.network import network, speed
from objcomm._bootstrap.doctor.report import conclusions, draw, plain, report
from objcomm._bootstrap.launch import launch
from objcomm._observe.terminal import show
from objcomm.errors import LaunchError, MissingDependencyError, text_of

_START_SECONDS = 60.0
_LEAST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for.

    Attributes:
        seconds: how long ranks may take to come.
        is_quick: whether links are not measured.
        png: where to draw them.
        json: where to write all that is known.
    """

    seconds: float
    is_quick: bool
    png: Path | None
    json: Path | None


def run(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    """Carry out what the command line asks for; return the exit status.

    Args:
        arguments: as the parser has read them.
        refuse: ends the program because of a wrong argument.
    """
    if not _LEAST_SECONDS <= arguments.timeout < threading.TIMEOUT_MAX:
        refuse(f"--timeout must be at least {_LEAST_SECONDS:g}, it is {arguments.timeout:g}")
    if arguments.nproc is not None and arguments.nproc < 1:
        refuse(f"--nproc must be at least 1, it is {arguments.nproc}")
    options = Options(arguments.timeout, arguments.quick, arguments.png, arguments.json)
    if arguments.nproc is None:
        return check(options)
    if "RANK" in os.environ:
        refuse("--nproc starts ranks, but RANK is set: this is a rank already")
    return _launched(options, arguments.nproc)


def _launched(options: Options, nproc: int) -> int:
    limit = Limits.of(options.seconds).all + _START_SECONDS
    try:
        return max(launch(check, nproc, options, joined=False, timeout=limit))
    except LaunchError as error:
        sys.stderr.write(f"objcomm doctor: {error}\n")
        return 1


def check(options: Options) -> int:
    """Do this rank's part, report if that is its task, and return the exit status."""
    began = time.time()
    limits = Limits.of(options.seconds)
    watchdog = threading.Timer(limits.all, _give_up, [limits.all])
    watchdog.daemon = True
    watchdog.start()
    try:
        outcome = carry_out(os.environ, limits, _tell, is_quick=options.is_quick)
        if outcome.evidence is not None:
            return _concluded(outcome, outcome.evidence, options, began)
        if outcome.status:
            _leave_for_torchrun("see what rank 0 has printed", time.time())
        return outcome.status
    finally:
        watchdog.cancel()


def _concluded(outcome: Outcome, evidence: Evidence, options: Options, began: float) -> int:
    found = findings(evidence)
    ends = status(found)
    if ends:
        # torchrun counts whole seconds: a rank that met this one may end in that in which it began.
        _leave_for_torchrun("\n".join(conclusions(found)), began - 1)
    if outcome.report.rank == 0:
        show(report(evidence, found))
        _files(evidence, found, ends, options)
    else:
        _complain(outcome, found)
    outcome.end(ends)
    return ends


def _complain(outcome: Outcome, found: list[Finding]) -> None:
    """Say what a rank has found that could not meet rank 0."""
    own = outcome.report
    name = "a process without a rank" if own.rank == UNKNOWN else f"rank {own.rank}"
    head = f"objcomm doctor: {name} (pid {own.pid} on {own.host}) has not met rank 0"
    sys.stderr.write("\n".join([head, *conclusions(found), ""]))  # in one piece: others write, too
    sys.stderr.flush()


def _files(evidence: Evidence, found: list[Finding], ends: int, options: Options) -> None:
    try:
        if options.json is not None:
            options.json.write_text(plain(evidence, found, ends), encoding="utf-8")
        if options.png is not None and evidence.links:
            draw(evidence, options.png)
        elif options.png is not None:
            _tell(f"no links were measured, so there is no {options.png}")
    except MissingDependencyError as error:
        _tell(f"no picture: {error}")
    except (OSError, ValueError) as error:
        _tell(text_of(error))


def _leave_for_torchrun(text: str, at: float) -> None:
    """Let torchrun's own report of ranks that failed end with the findings.

    It comes last, and shows what stands in this file of the failure with the earliest time.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        told = {"py_callstack": text, "timestamp": str(int(at))}
        with contextlib.suppress(OSError):  # then it shows an exit status only
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": told}}))


def _tell(text: str) -> None:
    sys.stderr.write(f"objcomm doctor: {text}\n")
    sys.stderr.flush()


def _give_up(seconds: float) -> None:
    """End a process in which something waits without a limit."""
    _tell(f"not done after {seconds:g} s, and ended; the process stood here:")
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


_ORDER = tuple(Severity)


def findings(evidence: Evidence) -> list[Finding]:
    """Draw all conclusions; those first that end a job, and among them what others may come of."""
    found = [
        each
        for conclude in (attendance, network, installation, speed)
        for each in conclude(evidence)
    ]
    return sorted(found, key=lambda each: _ORDER.index(each.severity))


def status(found: list[Finding]) -> int:
    """The command's exit status: 1 if anything will break or slow a job."""
    return int(any(each.severity.counts for each in found))
