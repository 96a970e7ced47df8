"""Ranks, times and places as a reader wants to see them."""

import os
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from objcomm.inspector.dumps import Call
from objcomm.inspector.rows import Key, Row


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in order, runs of them shortened: ``ranks 0-2, 5``."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(texts)}"


def duration_text(seconds: float) -> str:
    """A time in the unit that shows it best."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def call_text(key: Key) -> str:
    """Which call: its number, or that the ranks meet."""
    if key.sequence < 0:
        return "first use"
    if key.alone >= 0:
        return "message"
    return f"{'message' if key.pair else 'call'} {key.sequence}"


def operation_text(call: Call, key: Key) -> str:
    """An operation with its root, as a global rank."""
    has_root = 0 <= call.root < len(key.ranks)
    if call.is_message:
        side = "to" if call.is_send else "from"
        return f"{call.operation} {side} {key.ranks[call.root] if has_root else 'any'}"
    return f"{call.operation} (root {key.ranks[call.root]})" if has_root else call.operation


def group_text(row: Row) -> str:
    """A row's group and lane."""
    key = row.key
    known_as = row.description if row.description not in {"", "undefined"} else key.group
    name = f"group {known_as!r}" if known_as else "no process group"
    return f"{name} ({ranks_text(key.ranks)})" + f", lane {row.lane_name!r}" * bool(row.lane_name)


class Places:
    """Call sites without the folder that all of them share."""

    def __init__(self, rows: Sequence[Row]) -> None:
        sites = {call.call_site for row in rows for call in row.calls.values()}
        paths = [PurePosixPath(site) for site in sites]
        folders = {str(path.parent) for path in paths if path.is_absolute()}
        shared = os.path.commonpath(folders) if folders else ""
        self._shared = shared.rstrip("/") + "/"

    def text(self, call: Call) -> str:
        """Where a call was made."""
        return call.call_site.removeprefix(self._shared)
