"""Meet the other ranks in one of torch's stores, through which they exchange what they know.

Under torchrun this is the agent's store, which exists already; otherwise rank 0 creates it. Every
wait has a timeout, whatever happens to the store's host: a ``TCPStore`` waits forever for a server
that accepts a connection and never answers (torch 2.13).
"""

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from objcomm._bootstrap.doctor.facts import Report, is_loopback
from objcomm._bootstrap.doctor.links import cause_of
from objcomm._environment import Placement, has_agent_store
from objcomm._transport.store import pack_record, read, unpack_record
from objcomm._transport.threads import done_within
from objcomm.errors import WireError

T = TypeVar("T")

_PREFIX = "objcomm.doctor"
_IS_OURS = f"{_PREFIX}/is ours"
_PAUSE_SECONDS = 0.05
_RESOLVE_SECONDS = 5.0
_ATTEMPT_SECONDS = 3.0
# With a name server that never answers, torch's store takes 10 s, which is one of the findings.
_ASK_SECONDS = 15.0
_TOUCH = timedelta(seconds=2.0)


class UnmetError(Exception):
    """There is no store, or it does not answer. The text says why, and what to set."""


def open_store(
    place: Placement, environ: Mapping[str, str], report: Report, deadline: float
) -> tuple[dist.Store, Report]:
    """Open the store in which the ranks of a job meet; rank 0 creates it unless torchrun has.

    Args:
        place: the placement of this process.
        environ: a mapping like ``os.environ``.
        report: this rank's report.
        deadline: when to stop trying, in seconds of ``time.monotonic``.

    Returns:
        The store, and the report, completed with how this rank reaches the store. On rank 0 the
        store may be one that no other rank can reach; ``Report.meeting_problem`` then says so.

    Raises:
        UnmetError: this rank can't reach the store.
    """
    is_of_agent = has_agent_store(environ)
    store = _made(place.port) if place.rank == 0 and not is_of_agent else None
    is_own = store is not None
    try:
        caller, address = reach(place.host, place.port, 0.0 if is_own else deadline)
    except OSError as error:
        problem = _why(place, report, str(error), is_own=is_own)
        if store is None:
            raise UnmetError(problem) from None
        report = replace(report, meeting_problem=problem)
    else:
        is_here = caller == address or is_loopback(address)
        report = replace(report, caller=caller, is_at_store=is_own or is_here)
        if store is None:
            store = _joined(address, place.port, deadline, is_of_agent=is_of_agent)
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{_PREFIX}/{restart}", store), report


def reach(host: str, port: int, deadline: float) -> tuple[str, str]:
    """Try to connect to a port of a host until it accepts, and close the connection again.

    Args:
        host: its name or address.
        port: its port.
        deadline: when to stop trying, in seconds of ``time.monotonic``; there is at least one
            attempt.

    Returns:
        The addresses of this end of the connection and of the other end.

    Raises:
        OSError: the port did not accept a connection. The text says how the last attempt ended.
    """
    while True:
        try:
            with done_within(
                _RESOLVE_SECONDS + _ATTEMPT_SECONDS,
                lambda: socket.create_connection((host, port), _ATTEMPT_SECONDS),
            ) as connection:
                return str(connection.getsockname()[0]), str(connection.getpeername()[0])
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise OSError(cause_of(error)) from None
        time.sleep(_PAUSE_SECONDS)


def _why(place: Placement, report: Report, reason: str, *, is_own: bool) -> str:
    """Explain why a rank can't reach the store, and what to set."""
    host, port = place.host, place.port
    if is_own:
        mine = [each for _, each in report.interfaces if not is_loopback(each)] or ["127.0.0.1"]
        return (
            f"MASTER_ADDR={host} does not lead to rank 0's store on its own host ({reason}); "
            f"set MASTER_ADDR={mine[0]}, or start rank 0 on {host}"
        )
    return (
        f"{host}:{port} can't be reached: {reason}; see that rank 0 runs on {host}, that every "
        "other host knows it by this MASTER_ADDR, that MASTER_PORT is the same on every rank, and "
        "that no firewall closes it"
    )


def _made(port: int) -> dist.TCPStore | None:
    """Create a store at a port; return None if the port is taken, perhaps by another rank 0."""
    try:
        # Not at MASTER_ADDR, which may be wrong and is checked later.
        store = store_at("127.0.0.1", port, _ASK_SECONDS, is_master=True)
    except (RuntimeError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            return None
        raise UnmetError(
            f"rank 0 can't listen at port {port}: {_first_line(error)}; "
            "set MASTER_PORT to a free port above 1023, the same on every rank"
        ) from None
    store.set(_IS_OURS, "")
    return store


def _joined(address: str, port: int, deadline: float, *, is_of_agent: bool) -> dist.TCPStore:
    """Connect to the store that torchrun or rank 0 has created."""
    seconds = max(deadline - time.monotonic(), _ASK_SECONDS)
    try:
        store = store_at(address, port, seconds, is_master=False)
        if not is_of_agent:  # rank 0 may be about to mark the store as its own
            done_within(_ASK_SECONDS, lambda: store.wait([_IS_OURS], _TOUCH))
    except (RuntimeError, TimeoutError):
        raise UnmetError(
            f"{address}:{port} accepts connections, but no doctor's rank 0 has its store there; "
            "another program has this port: set MASTER_PORT to a free one, the same on every rank"
        ) from None
    return store


def store_at(host: str, port: int, seconds: float, *, is_master: bool) -> dist.TCPStore:
    """Create a store at a port, or connect to one; raise TimeoutError if that takes too long."""
    limit = timedelta(seconds=seconds)
    return done_within(
        seconds,
        lambda: dist.TCPStore(
            host, port, is_master=is_master, wait_for_workers=False, timeout=limit
        ),
    )


class Board:
    """Named records that the ranks exchange through the store."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self._arrived: dict[int, Report] = {}

    def arrive(self, report: Report) -> None:
        """Announce that this process has arrived."""
        self.post(f"arrival/{self.count('arrivals')}", report)

    def arrivals(self) -> list[Report]:
        """Return the reports of all processes that have arrived so far, in order of arrival."""
        for number in range(1, self.count("arrivals", 0) + 1):
            if number not in self._arrived:
                report = self.find(f"arrival/{number}", Report)
                self._arrived |= {} if report is None else {number: report}
        return [report for _, report in sorted(self._arrived.items())]

    def post(self, name: str, record: Any) -> None:
        """Write a record for the other ranks."""
        packed: Any = pack_record(record)  # torch's stub allows only text
        self._ask(lambda: self.store.set(name, packed))

    def find(self, name: str, kind: type[T]) -> T | None:
        """Read a record; return None if there is none, or if another version has written it."""
        raw = self._ask(lambda: read(self.store, name))
        try:
            return None if raw is None else unpack_record(raw, kind, f"a doctor's {name}")
        except WireError:
            return None

    def fetch(self, name: str, kind: type[T], deadline: float) -> T | None:
        """Wait until another rank has written a record; return None at the deadline."""
        while (found := self.find(name, kind)) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        return found

    def count(self, name: str, amount: int = 1) -> int:
        """Add to a counter that all ranks share, and return its value."""
        return int(self._ask(lambda: self.store.add(name, amount)))

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return done_within(_ASK_SECONDS, call)
        except (RuntimeError, TimeoutError) as error:
            raise UnmetError(
                f"the store in which the ranks meet fell silent: {_first_line(error)}; "
                "see that rank 0, or torchrun on its host, still runs"
            ) from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
