"""Where the ranks meet: a store of torch's, in which they leave what they know for one another.

Under torchrun the store is the agent's and is there already; otherwise rank 0 has it. Every wait
has a limit, whatever becomes of the store's host.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from objcomm._bootstrap.doctor.facts import (
    Interface,
    Rendezvous,
    Report,
    is_loopback,
    read,
    written,
)
from objcomm._bootstrap.doctor.host import (
    UnreachedError,
    interface_of,
    is_own,
    reach,
    resolve,
    touch,
    within,
)
from objcomm._environment import Placement, has_agent_store
from objcomm.errors import UsageError

T = TypeVar("T")

_PREFIX = "objcomm.doctor"
_PAUSE_SECONDS = 0.05
# A name server that never answers costs torch's store 10 s, and that is to be found out.
_ASK_SECONDS = 15.0
_TOUCH_SECONDS = 2.0
# A rank of which there are two mostly starts together with its double.
_SETTLE_SECONDS = 0.3
_TAKEN = "EADDRINUSE"

_ARRIVALS = "arrivals"
_IS_OURS = f"{_PREFIX}/is ours"


class UnmetError(Exception):
    """There is no store, or it does not answer.

    Attributes:
        problem: why.
        remedy: what to set.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy


def open_store(
    place: Placement, environ: Mapping[str, str], there: Sequence[Interface], deadline: float
) -> tuple[dist.Store, Rendezvous]:
    """Open the store in which the ranks of a job meet; rank 0 makes it unless torchrun has.

    Args:
        place: of this process.
        environ: as ``os.environ``.
        there: this host's interfaces.
        deadline: how long to try, in seconds of ``time.monotonic``.

    Returns:
        The store, and how this rank reaches it. Rank 0 may have one that nobody else can reach,
        which ``Rendezvous.problem`` says.

    Raises:
        UnmetError: this rank can't reach it.
    """
    is_of_agent = has_agent_store(environ)
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"{_PREFIX}/{restart}"
    seen = Rendezvous(place.host, place.port)
    at = f"{place.host}:{place.port}"
    try:
        addresses = resolve(place.host)
    except UnreachedError as error:
        remedy = "set MASTER_ADDR to a name or address of rank 0's host that every host knows"
        raise UnmetError(f"MASTER_ADDR={place.host}: {error}", remedy) from None
    seen = replace(seen, addresses=addresses, is_here=any(map(is_own, addresses)))
    if place.rank == 0 and not is_of_agent:
        made = _made(place.port)
        if made is not None:
            made.set(_IS_OURS, "")
            return dist.PrefixStore(prefix, made), _seen_by_its_host(seen, there)
    try:
        own = reach(addresses, place.port, deadline)
    except UnreachedError as error:
        raise UnmetError(f"{at} can't be reached: {error}", _remedy(str(error), seen)) from None
    store = _joined(addresses, place.port, deadline, at)
    if not is_of_agent and not _is_ours(store):
        raise _taken(f"{at} is the store of another job")
    return dist.PrefixStore(prefix, store), _from(seen, own, there)


def _made(port: int) -> dist.TCPStore | None:
    """A store at a port of this host; None if the port is taken, perhaps by another rank 0."""
    try:
        # Not at MASTER_ADDR: what is wrong with that is to be found out, not to be suffered.
        return within(
            _ASK_SECONDS,
            lambda: dist.TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_ASK_SECONDS),
            ),
        )
    except (RuntimeError, TimeoutError) as error:
        if _TAKEN in str(error):
            return None
        reason = str(error).partition("\n")[0] or "no answer"
        raise UnmetError(
            f"rank 0 can't listen at port {port}: {reason}",
            "set MASTER_PORT to a free port above 1023, the same on every rank",
        ) from None


def _joined(addresses: Sequence[str], port: int, deadline: float, at: str) -> dist.TCPStore:
    seconds = max(deadline - time.monotonic(), _ASK_SECONDS)
    try:
        return within(
            seconds,
            lambda: dist.TCPStore(
                addresses[0],
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            ),
        )
    except (RuntimeError, TimeoutError):
        raise _taken(f"{at} accepts connections, but as no store of torch does") from None


def _taken(problem: str) -> UnmetError:
    remedy = "another program has this port: set MASTER_PORT to a free one, the same on every rank"
    return UnmetError(problem, remedy)


def _is_ours(store: dist.TCPStore) -> bool:
    """Whether rank 0 of a doctor has made a store, or does so in a moment."""
    try:
        within(_ASK_SECONDS, lambda: store.wait([_IS_OURS], timedelta(seconds=_TOUCH_SECONDS)))
    except (RuntimeError, TimeoutError):
        return False
    return True


def _seen_by_its_host(seen: Rendezvous, there: Sequence[Interface]) -> Rendezvous:
    """How rank 0 reaches its own store at the address that the others were given."""
    reasons = []
    for address in seen.addresses:
        try:
            own = touch(address, seen.port, _TOUCH_SECONDS)
        except UnreachedError as error:
            reasons.append(f"{address}: {error}")
        else:
            return _from(seen, own, there)
    mine = [address for each in there for address in each.addresses if not each.is_loopback]
    why = "does not lead to rank 0's store" if seen.is_here else "is no address of rank 0's host"
    return replace(
        seen,
        problem=f"MASTER_ADDR={seen.host} {why} ({'; '.join(reasons)})",
        remedy=f"set MASTER_ADDR={(mine or ['127.0.0.1'])[0]}, or start rank 0 on {seen.host}",
    )


def _from(seen: Rendezvous, own: str, there: Sequence[Interface]) -> Rendezvous:
    """The same by a rank that reaches the store from its address ``own``."""
    return replace(seen, interface=interface_of(own, there), caller=own)


def _remedy(reason: str, seen: Rendezvous) -> str:
    if all(map(is_loopback, seen.addresses)):
        return (
            "see that rank 0 runs on this host, and that MASTER_PORT is the same on every rank; if "
            f"rank 0 is on another host, set MASTER_ADDR to its address: {seen.host} is every "
            "host's name for itself"
        )
    if "refused" in reason:
        return (
            f"see that rank 0 runs on {seen.host}, and that MASTER_PORT is the same on every rank"
        )
    return (
        "see that MASTER_ADDR is an address of rank 0's host that this host can reach, and that no "
        f"firewall closes port {seen.port}"
    )


class Board:
    """What the ranks leave in the store for one another."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self._known: dict[int, Report] = {}

    def arrive(self, report: Report) -> int:
        """Say that this process is here; returns the number of its arrival, from 1."""
        number = int(self._ask(lambda: self.store.add(_ARRIVALS, 1)))
        self.post(f"arrival/{number}", report)
        return number

    def arrivals(self) -> dict[int, Report]:
        """The reports of all that have come so far, by number."""
        count = int(self._ask(lambda: self.store.add(_ARRIVALS, 0)))
        for number in range(1, count + 1):
            key = f"arrival/{number}"
            if number not in self._known and self.has(key):
                with contextlib.suppress(UsageError):  # of another version: as if it never came
                    self._known[number] = read(Report, self._get(key))
        return dict(self._known)

    def post(self, key: str, facts: Any) -> None:
        """Leave something for the others."""
        self._ask(lambda: self.store.set(key, written(facts)))

    def has(self, key: str) -> bool:
        """Whether somebody has left it."""
        return bool(self._ask(lambda: self.store.check([key])))

    def fetch(self, key: str, kind: type[T], deadline: float) -> T | None:
        """Wait for what another rank leaves; None if it has not by then."""
        while not self.has(key):
            if time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE_SECONDS)
        return read(kind, self._get(key))

    def count(self, key: str, amount: int = 1) -> int:
        """Add to a number that all ranks have in common, and return it."""
        return int(self._ask(lambda: self.store.add(key, amount)))

    def _get(self, key: str) -> bytes:
        return bytes(self._ask(lambda: self.store.get(key)))

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return within(_ASK_SECONDS, call)
        except (RuntimeError, TimeoutError) as error:
            reason = str(error).partition("\n")[0] or f"no answer within {_ASK_SECONDS:g} s"
            raise UnmetError(
                f"the store in which the ranks meet fell silent: {reason}",
                "see that rank 0, or torchrun on its host, still runs",
            ) from None


def await_ranks(
    board: Board, size: int, deadline: float, tell: Callable[[set[int]], None]
) -> dict[int, Report]:
    """Wait until all ranks have come, or until the deadline.

    Args:
        board: where they come.
        size: how many.
        deadline: in seconds of ``time.monotonic``.
        tell: given the ranks that are awaited, again and again.

    Returns:
        Everybody who has come, by number.
    """
    while True:
        arrived = board.arrivals()
        awaited = set(range(size)) - {report.rank for report in arrived.values()}
        if not awaited or time.monotonic() > deadline:
            time.sleep(0.0 if awaited else _SETTLE_SECONDS)
            return board.arrivals()
        tell(awaited)
        time.sleep(_PAUSE_SECONDS)
