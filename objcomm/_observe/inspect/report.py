"""The report: a table of calls, and one sentence on where the ranks diverge.

Ranks that did the same share one line.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath

from objcomm._observe.inspect.dumps import Dump, DumpedCall
from objcomm._observe.inspect.rows import (
    Absence,
    CallRow,
    Clock,
    Key,
    Parting,
    first_parting,
    is_stuck,
)
from objcomm._observe.terminal import aligned
from objcomm.errors import grouped, ranks_text


def duration_text(seconds: float) -> str:
    """Format a duration in seconds or milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def call_text(key: Key) -> str:
    """Return the number of a call as text, or ``first use`` for a rendezvous."""
    if key.sequence < 0:
        return "first use"
    if key.alone >= 0:
        return "message"
    return f"{'message' if key.pair else 'call'} {key.sequence}"


def operation_text(call: DumpedCall, key: Key) -> str:
    """Return an operation with its root as a global rank."""
    root = key.root_of(call)
    if call.is_message:
        side = "to" if call.is_send else "from"
        return f"{call.operation} {side} {'any' if root is None else root}"
    return call.operation if root is None else f"{call.operation} (root {root})"


def group_text(row: CallRow) -> str:
    """Return a row's group and lane as text."""
    key = row.key
    known_as = row.description if row.description not in {"", "undefined"} else key.group
    name = f"group {known_as!r}" if known_as else "no process group"
    return f"{name} ({ranks_text(key.ranks)})" + f", lane {row.lane_name!r}" * bool(row.lane_name)


def common_folder(rows: Sequence[CallRow]) -> str:
    """Return the beginning that the paths of all call sites share; they are shown without it."""
    sites = {call.call_site for row in rows for call in row.calls.values()}
    paths = [PurePosixPath(site) for site in sites]
    folders = {str(path.parent) for path in paths if path.is_absolute()}
    shared = os.path.commonpath(folders) if folders else ""
    return shared.rstrip("/") + "/"


def conclude(rows: Sequence[CallRow], folder: str) -> str:
    """Return the sentence on where the ranks diverge.

    Args:
        rows: all matched calls, oldest first.
        folder: the beginning of call sites, which is left out.
    """
    row = first_parting(rows)
    if row is None:
        return _agreement(rows, folder)
    if row.parting is Parting.DIFFERS:
        text = _differing(row, rows, folder)
    elif row.parting is Parting.MISSING:
        text = _missing(row, rows, folder)
    elif row.key.pair:
        text = _stuck_message(row, rows, folder)
    else:
        text = _stuck(row, folder)
    return f"{group_text(row)}: {text}"


def _agreement(rows: Sequence[CallRow], folder: str) -> str:
    shared = [row for row in rows if len(row.calls) > 1 and row.key.sequence >= 0]
    if not shared:
        return "No call was made by more than one of these ranks, so there is nothing to compare."
    # Prefer collectives: in a message, the rank that came first did not necessarily wait.
    widest = max(shared, key=lambda row: (not row.key.pair, row.skew_seconds))
    last = widest.last_rank
    return (
        f"The ranks do not diverge: {len(shared)} calls match. They waited longest for each other "
        f"in {call_text(widest.key)} of {group_text(widest)}, "
        f"{_made(widest.calls[last], folder)}: rank {last} came last, "
        f"{duration_text(widest.skew_seconds)} after the first."
    )


def _differing(row: CallRow, rows: Sequence[CallRow], folder: str) -> str:
    by_call: dict[str, list[int]] = defaultdict(list)
    for rank, call in row.calls.items():
        root = row.key.root_of(call)
        whose = "" if root is None else f" with root {root}"
        other = f" [{call.fingerprint:08x}]" if row.has_other_names else ""
        by_call[f"{call.operation}{whose}{other}{_at(call, folder)}"].append(rank)
    sides = "; ".join(f"{ranks_text(ranks)} made {text}" for text, ranks in by_call.items())
    hint = (
        " (names, operators or options differ: the number in brackets)"
        if row.has_other_names
        else ""
    )
    return f"the ranks diverge in {call_text(row.key)}: {sides}{hint}.{_before(row, rows, folder)}"


def _missing(row: CallRow, rows: Sequence[CallRow], folder: str) -> str:
    lacking = [rank for rank, why in row.absent.items() if why is Absence.NEVER]
    made = _made(row.calls[min(row.calls)], folder)
    never = "never came to the" if row.key.sequence < 0 else "never made"
    text = f"{ranks_text(lacking)} {never} {call_text(row.key)} ({made} on {ranks_text(row.calls)})"
    if len(lacking) > 1:
        return f"{text}.{_before(row, rows, folder)}"
    last = _last_text(lacking[0], row, rows, folder)
    if not last:
        return f"{text}; it made no call on this group, or had destroyed it before its dump."
    return f"{text}; its last was {last} the others came."


def _last_text(rank: int, row: CallRow, rows: Sequence[CallRow], folder: str) -> str:
    """Describe a rank's last call, and how long before or after the start of ``row`` it was."""
    last = _last_of(rank, row, rows)
    if last is None:
        return ""
    call = last.calls[rank]
    ago = row.began - (call.began if call.ended is None else call.ended)
    when = f"{duration_text(abs(ago))} {'before' if ago >= 0 else 'after'}"
    what = operation_text(call, last.key) if call.is_message else call.operation
    where = f"{what} ({call_text(last.key)}){_at(call, folder)}"
    return f"{where}, {'under way since' if call.is_under_way else 'over'} {when}"


def _stuck_message(row: CallRow, rows: Sequence[CallRow], folder: str) -> str:
    ends = "; ".join(
        f"{operation_text(call, row.key)}{_at(call, folder)} on rank {rank}: {call.outcome}"
        for rank, call in row.calls.items()
        if is_stuck(call)
    )
    text = f"the {call_text(row.key)} did not end well: {ends}"
    (absent, why), *_ = [*row.absent.items(), (None, None)]
    if absent is None:
        return f"{text}."
    if why is Absence.NO_DUMP:
        return f"{text}; there is no dump of rank {absent}, so look there first."
    last = _last_text(absent, row, rows, folder)
    did = f"its last was {last} this one began" if last else "it made no call on this group"
    return f"{text}; rank {absent} was waited for; {did}."


def _stuck(row: CallRow, folder: str) -> str:
    by_outcome = grouped((each.outcome, rank) for rank, each in row.calls.items() if is_stuck(each))
    ends = "; ".join(f"{what} on {ranks_text(ranks)}" for what, ranks in by_outcome.items())
    made = _made(row.calls[min(row.calls)], folder)
    text = (
        f"no rank made another call than the rest, but {call_text(row.key)} ({made}) did not end "
        f"well: {ends}"
    )
    unheard = [rank for rank, why in row.absent.items() if why is Absence.NO_DUMP]
    if unheard:
        return f"{text}; there is no dump of {ranks_text(unheard)}, so look there first."
    members = row.key.ranks
    numbers = {call.awaits for call in row.calls.values() if 0 <= call.awaits < len(members)}
    awaited = ranks_text(members[number] for number in numbers)
    waits = f"; {awaited} was waited for" if numbers else ""
    last = f"rank {row.last_rank} came last, {duration_text(row.skew_seconds)} after the first"
    return f"{text}{waits}; {last}."


def _before(row: CallRow, rows: Sequence[CallRow], folder: str) -> str:
    """Describe the last call that all ranks made alike, if any."""
    agreed = [
        each
        for each in rows
        if each.key.stretch == row.key.stretch and 0 <= each.key.sequence < row.key.sequence
    ]
    if not agreed:
        return ""
    last = max(agreed, key=lambda each: each.key.sequence)
    made = _made(last.calls[min(last.calls)], folder)
    return f" The last that all made: {made} ({call_text(last.key)})."


def _last_of(rank: int, row: CallRow, rows: Sequence[CallRow]) -> CallRow | None:
    """Return the rank's last call on that row's lane or its last message; else on its group."""
    own = [
        each
        for each in rows
        if rank in each.calls
        and each.key.sequence >= 0
        and (each.key.group, each.key.ranks) == (row.key.group, row.key.ranks)
    ]
    if not row.key.pair:  # messages do not belong to a lane
        same = [each for each in own if each.key.pair or each.key.stretch == row.key.stretch]
        own = same or own
    return max(own, key=lambda each: each.calls[rank].began, default=None)


def _made(call: DumpedCall, folder: str) -> str:
    return f"{call.operation}{_at(call, folder)}"


def _at(call: DumpedCall, folder: str) -> str:
    return f" at {call.call_site.removeprefix(folder)}" if call.call_site else ""


# Smaller differences between the times at which ranks made a call are not shown.
_SKEW_SECONDS = 1e-3

_PARTED = ">"


def heading(dumps: Sequence[Dump], clocks: dict[str, Clock]) -> list[str]:
    """Return lines that say which dumps exist, why they were written, and how well clocks agree."""
    size = max(dump.world_size for dump in dumps)
    known = {dump.rank for dump in dumps}
    lines = [f"dumps of {ranks_text(known)}, of {size} in all"]
    if lacking := set(range(size)) - known:
        lines.append(f"no dump of {ranks_text(lacking)}")
    # Without the ranks' positions after the semicolon, which the table shows.
    reasons = grouped((dump.error.partition("; ")[0], dump.rank) for dump in dumps if dump.error)
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


def sections(rows: Sequence[CallRow], folder: str, last: int) -> list[str]:
    """Return one table for each lane of each group.

    Args:
        rows: all matched calls, oldest first.
        folder: the beginning of call sites, which is left out.
        last: how many calls of a lane to show; marked calls are always shown.
    """
    by_lane = grouped(((row.key.group, row.key.ranks, row.key.lane), row) for row in rows)
    lines = []
    for of_lane in by_lane.values():
        shown = [row for at, row in enumerate(of_lane) if at >= len(of_lane) - last or row.parting]
        lines += ["", group_text(of_lane[-1])]
        if left_out := len(of_lane) - len(shown):
            lines.append(f"  ({left_out} earlier; --last {len(of_lane)} shows them)")
        lines += aligned([cells for row in shown for cells in _cells(row, folder)])
    return lines


def _cells(row: CallRow, folder: str) -> list[list[str]]:
    """Return the lines of a row, each as a list of columns."""
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, call in row.calls.items():
        name = f" [{call.fingerprint:08x}]" if row.has_other_names else ""
        did = (
            operation_text(call, row.key) + name,
            call.call_site.removeprefix(folder),
            call.outcome,
        )
        alike[did].append(rank)
    lines = [[ranks_text(ranks), *did, _spent(row, ranks)] for did, ranks in alike.items()]
    missed = grouped((why, rank) for rank, why in row.absent.items())
    lines += [
        [ranks_text(ranks), why.value]
        for why, ranks in missed.items()
        if row.key.sequence >= 0 or why is Absence.NEVER
    ]
    if row.skew_seconds > _SKEW_SECONDS:
        skew = duration_text(row.skew_seconds)
        lines[0].append(f"rank {row.last_rank} came last, by {skew}")
    mark = _PARTED if row.parting else ""
    first = [mark, call_text(row.key)]
    return [[*(first if at == 0 else [mark, ""]), *line] for at, line in enumerate(lines)]


def _spent(row: CallRow, ranks: Sequence[int]) -> str:
    times = [ms / 1e3 for rank in ranks if (ms := row.calls[rank].ms) is not None]
    if not times:
        return ""
    least, most = duration_text(min(times)), duration_text(max(times))
    return least if least == most else f"{least} to {most}"
