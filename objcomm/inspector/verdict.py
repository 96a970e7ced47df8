"""Says in one sentence where the ranks part."""

from collections import defaultdict
from collections.abc import Sequence

from objcomm.inspector.dumps import Call
from objcomm.inspector.rows import Absence, Parting, Row, first_parting, is_stuck
from objcomm.inspector.words import (
    Places,
    call_text,
    duration_text,
    group_text,
    operation_text,
    ranks_text,
)


def conclude(rows: Sequence[Row], places: Places) -> str:
    """The sentence.

    Args:
        rows: every matched call, oldest first.
        places: shortens call sites.
    """
    row = first_parting(rows)
    if row is None:
        return _agreement(rows, places)
    if row.parting is Parting.DIFFERS:
        told = _differing(row, rows, places)
    elif row.parting is Parting.MISSING:
        told = _missing(row, rows, places)
    elif row.key.pair:
        told = _stuck_message(row, rows, places)
    else:
        told = _stuck(row, places)
    return f"{group_text(row)}: {told}"


def _agreement(rows: Sequence[Row], places: Places) -> str:
    shared = [row for row in rows if len(row.calls) > 1 and row.key.sequence >= 0]
    if not shared:
        return "No call was made by more than one of these ranks, so there is nothing to compare."
    # Whether a rank waited for a message's other end does not follow from who came last.
    widest = max(shared, key=lambda row: (not row.key.pair, row.skew_seconds))
    last = widest.last_rank
    return (
        f"The ranks do not part: {len(shared)} calls match. They waited longest for each other in "
        f"{call_text(widest.key)} of {group_text(widest)}, "
        f"{_made(widest.calls[last], places)}: rank {last} came last, "
        f"{duration_text(widest.skew_seconds)} after the first."
    )


def _differing(row: Row, rows: Sequence[Row], places: Places) -> str:
    by_call: dict[str, list[int]] = defaultdict(list)
    for rank, call in row.calls.items():
        root = f" with root {row.key.ranks[call.root]}" if _has_root(row, call) else ""
        other = f" [{call.fingerprint:08x}]" if row.has_other_names else ""
        by_call[f"{call.operation}{root}{other}{_at(call, places)}"].append(rank)
    sides = "; ".join(f"{ranks_text(ranks)} made {text}" for text, ranks in by_call.items())
    hint = (
        " (names, operators or options differ: the number in brackets)"
        if row.has_other_names
        else ""
    )
    return f"the ranks part in {call_text(row.key)}: {sides}{hint}.{_before(row, rows, places)}"


def _missing(row: Row, rows: Sequence[Row], places: Places) -> str:
    lacking = [rank for rank, why in row.absent.items() if why is Absence.NEVER]
    made = _made(row.calls[min(row.calls)], places)
    never = "never came to the" if row.key.sequence < 0 else "never made"
    told = f"{ranks_text(lacking)} {never} {call_text(row.key)} ({made} on {ranks_text(row.calls)})"
    if len(lacking) > 1:
        return f"{told}.{_before(row, rows, places)}"
    last = _last_text(lacking[0], row, rows, places)
    if not last:
        return f"{told}; it made no call on this group, or had destroyed it before its dump."
    return f"{told}; its last was {last} the others came."


def _last_text(rank: int, row: Row, rows: Sequence[Row], places: Places) -> str:
    """What a rank did last, and how long before or after the others came to ``row``."""
    last = _last_of(rank, row, rows)
    if last is None:
        return ""
    call = last.calls[rank]
    ago = row.began - (call.began if call.ended is None else call.ended)
    when = f"{duration_text(abs(ago))} {'before' if ago >= 0 else 'after'}"
    what = operation_text(call, last.key) if call.is_message else call.operation
    where = f"{what} ({call_text(last.key)}){_at(call, places)}"
    return f"{where}, {'under way since' if call.is_under_way else 'over'} {when}"


def _stuck_message(row: Row, rows: Sequence[Row], places: Places) -> str:
    ends = "; ".join(
        f"{operation_text(call, row.key)}{_at(call, places)} on rank {rank}: {call.outcome}"
        for rank, call in row.calls.items()
        if is_stuck(call)
    )
    told = f"the {call_text(row.key)} did not end well: {ends}"
    (absent, why), *_ = [*row.absent.items(), (None, None)]
    if absent is None:
        return f"{told}."
    if why is Absence.NO_DUMP:
        return f"{told}; there is no dump of rank {absent}, so look there first."
    last = _last_text(absent, row, rows, places)
    did = f"its last was {last} this one began" if last else "it made no call on this group"
    return f"{told}; rank {absent} was waited for; {did}."


def _stuck(row: Row, places: Places) -> str:
    by_outcome: dict[str, list[int]] = defaultdict(list)
    for rank, call in row.calls.items():
        if is_stuck(call):
            by_outcome[call.outcome].append(rank)
    ends = "; ".join(f"{what} on {ranks_text(ranks)}" for what, ranks in by_outcome.items())
    made = _made(row.calls[min(row.calls)], places)
    told = (
        f"no rank made another call than the rest, but {call_text(row.key)} ({made}) did not end "
        f"well: {ends}"
    )
    unheard = [rank for rank, why in row.absent.items() if why is Absence.NO_DUMP]
    if unheard:
        return f"{told}; there is no dump of {ranks_text(unheard)}, so look there first."
    members = row.key.ranks
    numbers = {call.awaits for call in row.calls.values() if 0 <= call.awaits < len(members)}
    awaited = ranks_text(members[number] for number in numbers)
    waits = f"; {awaited} was waited for" if numbers else ""
    last = f"rank {row.last_rank} came last, {duration_text(row.skew_seconds)} after the first"
    return f"{told}{waits}; {last}."


def _before(row: Row, rows: Sequence[Row], places: Places) -> str:
    """The last call that all had made alike."""
    agreed = [
        each
        for each in rows
        if each.key.stretch == row.key.stretch and 0 <= each.key.sequence < row.key.sequence
    ]
    if not agreed:
        return ""
    last = max(agreed, key=lambda each: each.key.sequence)
    made = _made(last.calls[min(last.calls)], places)
    return f" The last that all made: {made} ({call_text(last.key)})."


def _last_of(rank: int, row: Row, rows: Sequence[Row]) -> Row | None:
    """The rank's last call on that row's lane or to another rank; else on its group."""
    own = [
        each
        for each in rows
        if rank in each.calls
        and each.key.sequence >= 0
        and (each.key.group, each.key.ranks) == (row.key.group, row.key.ranks)
    ]
    # Messages are on no lane.
    is_same = [each.key.stretch == row.key.stretch or bool(each.key.pair) for each in own]
    same = own if row.key.pair else [each for each, same in zip(own, is_same, strict=True) if same]
    same = same or own
    return max(same, key=lambda each: each.calls[rank].began, default=None)


def _has_root(row: Row, call: Call) -> bool:
    return 0 <= call.root < len(row.key.ranks)


def _made(call: Call, places: Places) -> str:
    return f"{call.operation}{_at(call, places)}"


def _at(call: Call, places: Places) -> str:
    return f" at {places.text(call)}" if call.call_site else ""
