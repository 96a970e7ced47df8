"""Estimates from matching calls how far the hosts' clocks differ.

No rank gets another's message before it was sent. So the time at which a rank left a call, and that
at which the rank whose message it needed had entered it, bound the difference of their clocks from
one side, and calls in the other direction from the other side.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from objcomm.inspector.dumps import Dump
from objcomm.inspector.rows import Row

_FROM_ROOT = frozenset({"broadcast", "broadcast_object_list", "scatter", "scatter_object_list"})
_TO_ROOT = frozenset({"gather", "gather_object", "gather_scalar", "reduce"})


@dataclass(frozen=True, slots=True)
class Clock:
    """One host's clock against that of the first rank's host.

    Attributes:
        ahead_seconds: by how much it is ahead; what is subtracted from its times.
        margin_seconds: how far that may be wrong; infinite if nothing is known.
        count: how many matching calls tell.
    """

    ahead_seconds: float = 0.0
    margin_seconds: float = math.inf
    count: int = 0


def estimate(rows: Sequence[Row], dumps: Sequence[Dump]) -> dict[str, Clock]:
    """Each host's clock. Ranks of one host share one.

    Args:
        rows: matched calls, by the ranks' own clocks.
        dumps: all of them, the first rank's first.
    """
    reference = dumps[0].host
    host_of = {dump.rank: dump.host for dump in dumps}
    most: dict[str, float] = defaultdict(lambda: math.inf)
    least: dict[str, float] = defaultdict(lambda: -math.inf)
    counts: Counter[str] = Counter()
    for row in rows:
        sent, taken = _bounds(row, host_of)
        for host in (sent.keys() | taken.keys()) - {reference}:
            counts[host] += 1
            if reference in sent and host in taken:
                most[host] = min(most[host], taken[host] - sent[reference])
            if host in sent and reference in taken:
                least[host] = max(least[host], sent[host] - taken[reference])
    clocks = {
        host: _between(least[host], most[host], counts[host]) for host in set(host_of.values())
    }
    return clocks | {reference: Clock(margin_seconds=0.0)}


def _between(least: float, most: float, count: int) -> Clock:
    if math.isinf(least) or math.isinf(most):
        return Clock(count=count)
    middle, margin = (least + most) / 2, abs(most - least) / 2
    # Clocks that may well agree are left alone.
    return Clock(0.0 if least <= 0.0 <= most else middle, margin, count)


def _bounds(row: Row, host_of: dict[int, str]) -> tuple[dict[str, float], dict[str, float]]:
    """By host, when its last sender entered a call, and when its first receiver left it."""
    sent: dict[str, float] = {}
    taken: dict[str, float] = {}
    if row.key.pair and (len(row.calls) == 1 or row.key.sequence < 0):
        return sent, taken
    for rank, call in row.calls.items():
        if call.ended is None or not call.has_returned:
            continue
        if call.is_message:
            host = host_of[rank]
            if call.is_send:
                sent[host] = call.began
            else:
                taken[host] = call.ended
            continue
        is_root = row.key.ranks.index(rank) == call.root if rank in row.key.ranks else False
        host = host_of[rank]
        if is_root or call.operation not in _FROM_ROOT:
            sent[host] = max(sent.get(host, call.began), call.began)
        if is_root or call.operation not in _TO_ROOT:
            taken[host] = min(taken.get(host, call.ended), call.ended)
    return sent, taken


def corrected(dumps: Sequence[Dump], clocks: dict[str, Clock]) -> list[Dump]:
    """The same dumps with all times by the first rank's clock."""
    return [_shifted(dump, clocks[dump.host].ahead_seconds) for dump in dumps]


def _shifted(dump: Dump, ahead: float) -> Dump:
    if not ahead:
        return dump
    groups = tuple(
        replace(group, calls=tuple(replace(call, began=call.began - ahead) for call in group.calls))
        for group in dump.groups
    )
    return replace(dump, at=dump.at - ahead, groups=groups)
