"""``python -m objcomm top``: attach to a job through its store, and show what its ranks are doing.

It is not a rank. It asks on the job's noticeboard, as a rank does to find out where another one is,
and reads the answers. Whatever it reads is checked, and made printable, before it is shown.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from objcomm._bootstrap.doctor.meeting import reach, store_at
from objcomm._failures.activity import Activity, Monitor, RankActivity, activity_to_prometheus
from objcomm._failures.noticeboard import Reader, StoreSilentError, boards_in, reader_of
from objcomm._observe.terminal import aligned, show
from objcomm._transport.store import SharedStore
from objcomm._transport.threads import done_within
from objcomm.errors import text_of

R = TypeVar("R")

_CONNECT_SECONDS = 10.0
_STORE_SECONDS = 5.0
_LEAST_SECONDS = 0.5
# How long a client may take to send its request, or to read a part of the answer.
_CLIENT_SECONDS = 5.0
_KILO = 1000
# A store may have noticeboards of earlier attempts and worlds; only the latest are considered.
_MOST_BOARDS = 16
# Control sequences of xterm: the alternate screen, the way back, clearing it, bold, and plain.
_ENTER, _LEAVE, _CLEAR, _BOLD, _PLAIN = (
    "\x1b[?1049h",
    "\x1b[?1049l",
    "\x1b[H\x1b[J",
    "\x1b[1m",
    "\x1b[m",
)
# The exit status of a program that a signal ended: this plus the signal's number.
_SIGNALED = 128


class NoJobError(Exception):
    """There is no job to watch at the given address."""


def run(arguments: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    """Run the command, and return its exit status.

    Args:
        arguments: the parsed command line.
        refuse: ends the program because of a wrong argument.
    """
    host, port = _address(arguments.store, refuse)
    if not _LEAST_SECONDS <= arguments.interval < threading.TIMEOUT_MAX:
        refuse(f"--interval must be at least {_LEAST_SECONDS:g}, not {arguments.interval:g}")
    if arguments.prometheus is not None and not 0 <= arguments.prometheus < 1 << 16:
        refuse(f"--prometheus must be a port, not {arguments.prometheus}")
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as leaving:
        try:
            looks = _looks(_attached(host, port), arguments.interval)
            export = _export_at(arguments.prometheus, leaving)
        except NoJobError as error:
            return _say(str(error), 1)
        except OSError as error:
            return _say(f"--prometheus {arguments.prometheus}: {text_of(error)}", 1)
        is_live = sys.stdout.isatty() and not (arguments.json or arguments.once)
        if is_live:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(_SIGNALED + number))
            show(_ENTER)
            leaving.callback(show, _LEAVE)
        if arguments.once:  # rates need two looks
            looks = iter([*itertools.islice(looks, 2)][-1:])
        last = ""
        for activity in looks:
            export(activity)
            lines = _lines(activity, f"{host}:{port}")
            last = "\n".join([*lines, "", ""])
            text = _screen(activity, lines) if is_live else last
            text = json.dumps(asdict(activity)) + "\n" if arguments.json else text
            if not show(text) or arguments.once:
                return 0
        leaving.close()
        if is_live:
            show(last)  # the other screen is gone
        _say("all ranks have ended, or their store has closed; start again if the job does", 0)
    return 0


def _address(store: str | None, refuse: Callable[[str], Any]) -> tuple[str, int]:
    """Return host and port of the store, from the command line or the launcher's variables."""
    given = store or ":".join(os.environ.get(each, "") for each in ("MASTER_ADDR", "MASTER_PORT"))
    host, _, port = given.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port):
        refuse("give --store HOST:PORT, or set MASTER_ADDR and MASTER_PORT as the job has them")
    return host.strip("[]"), int(port)


def _say(text: str, status: int) -> int:
    sys.stderr.write(f"objcomm top: {text}\n")
    sys.stderr.flush()
    return status


def _attached(host: str, port: int) -> Monitor:
    """Return a monitor of the job whose store is at this address.

    Raises:
        NoJobError: there is none, or it can't be watched.
    """
    try:
        _, address = reach(host, port, 0.0)
    except OSError as error:
        raise NoJobError(
            f"{host}:{port} can't be reached: {error}; give the MASTER_ADDR and MASTER_PORT of a "
            "job that is running"
        ) from None
    shared = SharedStore()
    try:
        store = store_at(address, port, _CONNECT_SECONDS, is_master=False)
        if not hasattr(store, "list_keys"):
            raise NoJobError(
                "this torch can't list the keys of a store; install a newer one, or call "
                "objcomm.monitor in the job"
            )
        boards = boards_in(done_within(_STORE_SECONDS, store.list_keys))
        shared.open(store, math.inf)
        monitors = [
            _monitor(reader_of(shared, prefix), max(boards[prefix]) + 1)
            for prefix in sorted(boards, key=_with_numbers)[-_MOST_BOARDS:]
        ]
        if len(monitors) > 1:
            monitors.sort(key=lambda each: sum(map(_answers, each.look().ranks)))
    except (RuntimeError, TimeoutError, UnicodeDecodeError):
        raise NoJobError(
            f"{host}:{port} accepts connections, but is not the store of a running job"
        ) from None
    if not monitors:
        raise NoJobError(f"no rank of the job at {host}:{port} has used objcomm yet")
    return monitors[-1]


def _with_numbers(prefix: str) -> list[str | int]:
    """Return a sort key by which attempt 10 comes after attempt 9."""
    return [int(each) if each.isdecimal() else each for each in re.split("([0-9]+)", prefix)]


def _monitor(reader: Reader, size: int) -> Monitor:
    def on_board(job: Callable[[Reader], R], /) -> R:
        try:
            return done_within(_STORE_SECONDS, lambda: job(reader))
        except TimeoutError:
            raise StoreSilentError from None

    return Monitor(on_board, size)


def _answers(row: RankActivity) -> bool:
    return row.state in {"waiting", "in call", "computing"}


def _looks(monitor: Monitor, interval: float) -> Iterator[Activity]:
    """Yield what the ranks are doing, until all have ended or their store has closed."""
    while True:
        due = time.monotonic() + interval
        try:
            activity = monitor.look()
        except RuntimeError:  # torch's DistNetworkError
            return
        yield activity
        if all(row.state == "ended" for row in activity.ranks):
            return
        time.sleep(max(0.0, due - time.monotonic()))


def _export_at(port: int | None, leaving: contextlib.ExitStack) -> Callable[[Activity], None]:
    """Serve the ranks' activity to Prometheus on this host; return a function to update it.

    Raises:
        OSError: the port can't be used.
    """
    if port is None:
        return lambda _: None
    pages = [b""]

    class Metrics(BaseHTTPRequestHandler):
        timeout = _CLIENT_SECONDS

        def do_GET(self) -> None:
            page = pages[-1]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", f"{len(page)}")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Log nothing: the terminal shows the ranks."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing about a client that has hung up."""
            del request, client_address

    server = Server(("127.0.0.1", port), Metrics)
    leaving.callback(server.server_close)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    leaving.callback(server.shutdown)
    _say(f"metrics at http://127.0.0.1:{server.server_port}/metrics", 0)

    def export(activity: Activity) -> None:
        pages[:] = [activity_to_prometheus(activity).encode()]

    return export


# The line comes before the rates, so that a terminal of 80 columns shows it.
_TITLES = (
    *("rank", "doing", "for", "call", "waits for", "awaited", "line"),
    *("calls/s", "sent/s", "received/s"),
)
_LINE_LETTERS = 48


def _lines(activity: Activity, place: str) -> list[str]:
    """Return the lines to show: two heading lines, then one for each rank."""
    now = time.strftime("%H:%M:%S", time.localtime(activity.at))
    text = "no rank has waited for another"
    if activity.slowest >= 0:
        seconds = activity.ranks[activity.slowest].awaited_seconds
        text = f"slowest in the last minute: rank {activity.slowest}, awaited for {seconds:.1f} s"
    rows = [_TITLES, *map(_cells, activity.ranks)]
    return [f"{now}  {place}  {text}", *aligned(rows)]


def _cells(row: RankActivity) -> tuple[str, ...]:
    is_timed = row.state not in {"ended", "not started"} and (row.seconds or row.operation)
    place = row.line.rpartition("/")[2] or row.reason
    is_long = len(place) > _LINE_LETTERS
    return (
        str(row.rank),
        row.state,
        f"{row.seconds:.1f} s" if is_timed else "",
        f"{row.operation} #{row.call}" if row.operation else "",
        f"rank {row.awaits}" if row.awaits >= 0 else "",
        f"{row.awaited_seconds:.1f} s" if row.awaited_seconds else "",
        f"{place[: _LINE_LETTERS - 3]}..." if is_long else place,
        "" if row.calls_per_second is None else f"{row.calls_per_second:.1f}",
        _bytes(row.sent_nbytes_per_second),
        _bytes(row.received_nbytes_per_second),
    )


def _bytes(count: float | None) -> str:
    """Return a number of bytes as text; empty if unknown."""
    if count is None:
        return ""
    for unit in ("B", "kB", "MB", "GB"):
        if count < _KILO or unit == "GB":
            break
        count /= _KILO
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _screen(activity: Activity, lines: list[str]) -> str:
    """Return what replaces a terminal's content: as much as it holds, the slowest rank in bold.

    The slowest rank is always shown: in the last row, if it would otherwise not fit.
    """
    size = shutil.get_terminal_size()
    at = 2 + activity.slowest if activity.slowest >= 0 else 0
    shown = [line[: size.columns] for line in lines]
    shown[at] = f"{_BOLD}{shown[at]}{_PLAIN}"
    if len(shown) >= size.lines > 1:
        room = size.lines - 2
        more = f"... and {len(shown) - room} more ranks; --json shows all"
        last = shown[max(at, room - 1)]
        shown = [*shown[: room - 1], last, more] if room else [more]
    return _CLEAR + "\n".join(shown)
