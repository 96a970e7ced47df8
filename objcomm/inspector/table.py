"""The rows as a table for a terminal: one line for all ranks that did the same."""

from collections import defaultdict
from collections.abc import Sequence

from objcomm.inspector.clocks import Clock
from objcomm.inspector.dumps import Dump
from objcomm.inspector.rows import Absence, Row
from objcomm.inspector.words import (
    Places,
    call_text,
    duration_text,
    group_text,
    operation_text,
    ranks_text,
)

# Ranks that come this close together are not worth a word.
_SKEW_SECONDS = 1e-3

_PARTED = ">"


def heading(dumps: Sequence[Dump], clocks: dict[str, Clock]) -> list[str]:
    """Whose dumps these are, why they were written, and how far their times can be compared."""
    size = max(dump.world_size for dump in dumps)
    known = {dump.rank for dump in dumps}
    lines = [f"dumps of {ranks_text(known)}, of {size} in all"]
    if lacking := set(range(size)) - known:
        lines.append(f"no dump of {ranks_text(lacking)}")
    reasons: dict[str, list[int]] = defaultdict(list)
    for dump in dumps:
        if dump.error:
            # Where each rank is, which follows in such texts, the table shows.
            reasons[dump.error.partition("; ")[0]].append(dump.rank)
    lines += [f"{ranks_text(ranks)} wrote on {error}" for error, ranks in reasons.items()]
    reference = dumps[0].host
    return lines + [
        _clock_line(host, clock, reference)
        for host, clock in sorted(clocks.items())
        if host != reference
    ]


def _clock_line(host: str, clock: Clock, reference: str) -> str:
    if clock.margin_seconds == float("inf"):
        return f"host {host!r}: no calls compare its clock with {reference!r}'s; taken as it is"
    margin = f"estimated within {duration_text(clock.margin_seconds)} from {clock.count} calls"
    if not clock.ahead_seconds:
        return f"host {host!r}: its clock agrees with {reference!r}'s, {margin}"
    side = "ahead of" if clock.ahead_seconds > 0 else "behind"
    off = duration_text(abs(clock.ahead_seconds))
    return f"host {host!r}: its clock is {off} {side} {reference!r}'s, {margin}; corrected"


def sections(rows: Sequence[Row], places: Places, last: int) -> list[str]:
    """A table for each lane of each group.

    Args:
        rows: every matched call, oldest first.
        places: shortens call sites.
        last: how many of a lane's calls to show; what is marked is always shown.
    """
    by_lane: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        key = row.key
        by_lane[key.group, key.ranks, key.lane].append(row)
    lines = []
    for of_lane in by_lane.values():
        shown = [row for at, row in enumerate(of_lane) if at >= len(of_lane) - last or row.parting]
        lines += ["", group_text(of_lane[-1])]
        if left_out := len(of_lane) - len(shown):
            lines.append(f"  ({left_out} earlier; --last {len(of_lane)} shows them)")
        lines += _aligned([cells for row in shown for cells in _cells(row, places)])
    return lines


def _cells(row: Row, places: Places) -> list[list[str]]:
    """A row's lines, each as its columns."""
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, call in row.calls.items():
        name = f" [{call.fingerprint:08x}]" if row.has_other_names else ""
        did = (operation_text(call, row.key) + name, places.text(call), call.outcome)
        alike[did].append(rank)
    lines = [[ranks_text(ranks), *did, _spent(row, ranks)] for did, ranks in alike.items()]
    missed: dict[Absence, list[int]] = defaultdict(list)
    for rank, why in row.absent.items():
        if row.key.sequence >= 0 or why is Absence.NEVER:
            missed[why].append(rank)
    lines += [[ranks_text(ranks), why.value] for why, ranks in missed.items()]
    if row.skew_seconds > _SKEW_SECONDS:
        skew = duration_text(row.skew_seconds)
        lines[0].append(f"rank {row.last_rank} came last, by {skew}")
    mark = _PARTED if row.parting else ""
    first = [mark, call_text(row.key)]
    return [[*(first if at == 0 else [mark, ""]), *line] for at, line in enumerate(lines)]


def _spent(row: Row, ranks: Sequence[int]) -> str:
    times = [ms / 1e3 for rank in ranks if (ms := row.calls[rank].ms) is not None]
    if not times:
        return ""
    least, most = duration_text(min(times)), duration_text(max(times))
    return least if least == most else f"{least} to {most}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    # A line's last cell may be long and must not widen its column.
    widths: dict[int, int] = defaultdict(int)
    for line in lines:
        for at, cell in enumerate(line[:-1]):
            widths[at] = max(widths[at], len(cell))
    return [
        "  ".join(cell.ljust(widths[at]) for at, cell in enumerate(line)).rstrip() for line in lines
    ]
