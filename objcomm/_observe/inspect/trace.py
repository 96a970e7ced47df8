"""The calls as Chrome trace events, for Perfetto and chrome://tracing.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
A process of the trace is a rank, and a thread is a lane of a group. Arrows lead from the last rank
that made a call to the ranks that waited for it.
"""

from collections.abc import Sequence
from typing import Any

from objcomm._observe.inspect.dumps import Dump, DumpedCall
from objcomm._observe.inspect.report import call_text, group_text
from objcomm._observe.inspect.rows import CallRow, Clock, Key

_CATEGORY = "objcomm"

Event = dict[str, Any]


def trace(
    rows: Sequence[CallRow], dumps: Sequence[Dump], clocks: dict[str, Clock]
) -> dict[str, Any]:
    """Return the content of the trace file as JSON types.

    Args:
        rows: all matched calls, with times on one clock.
        dumps: the dumps of all ranks, with times on the same clock.
        clocks: the corrections that were applied, by host.
    """
    began = min((row.began for row in rows), default=0.0)
    at_of = {dump.rank: dump.at for dump in dumps}
    threads: dict[tuple[Any, ...], int] = {}
    slices: dict[tuple[int, int], list[Event]] = {}
    found: dict[tuple[Key, int], Event] = {}
    names = [
        _name("process_name", dump.rank, 0, f"rank {dump.rank} ({dump.host}, pid {dump.pid})")
        for dump in dumps
    ]
    for row in rows:
        lane = (row.key.group, row.key.ranks, row.key.lane)
        is_new = lane not in threads
        thread = threads.setdefault(lane, len(threads) + 1)
        if is_new:
            names += [_name("thread_name", dump.rank, thread, group_text(row)) for dump in dumps]
        for rank, call in row.calls.items():
            event = _slice(row, rank, call, began, max(at_of[rank], call.began))
            event["tid"] = thread
            slices.setdefault((rank, thread), []).append(event)
            found[row.key, rank] = event
    for events in slices.values():
        _nest(events)
    arrows = [arrow for row in rows for arrow in _arrows(row, found)]
    for number, arrow in enumerate(arrows):
        arrow["id"] = number // 2
    timed = sorted(
        [event for events in slices.values() for event in events] + arrows,
        # An enclosing slice begins no later than the enclosed one, and must come first.
        key=lambda event: (event["ts"], -event.get("dur", 0.0)),
    )
    return {
        "traceEvents": names + timed,
        "displayTimeUnit": "ms",
        "otherData": {
            "began": began,
            **{
                f"clock of {host}": f"{clock.ahead_seconds:+.6f} s +- {clock.margin_seconds:.6f} s"
                for host, clock in sorted(clocks.items())
            },
        },
    }


def _name(kind: str, rank: int, thread: int, text: str) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": text}}


def _slice(row: CallRow, rank: int, call: DumpedCall, began: float, dumped: float) -> Event:
    is_meeting = row.key.sequence < 0
    seconds = dumped - call.began if call.ms is None else call.ms / 1e3
    return {
        "ph": "X",
        "name": f"first use ({call.operation})" if is_meeting else call.operation,
        "cat": _CATEGORY,
        "pid": rank,
        "ts": round((call.began - began) * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
        "args": {
            "call": call_text(row.key),
            "call_site": call.call_site,
            "outcome": call.outcome,
            "codec": call.codec,
            "sent_nbytes": call.sent_nbytes,
            "received_nbytes": call.received_nbytes,
            "root": row.key.root_of(call),
            "group": row.key.group,
            "mesh": call.mesh,
            "parts": row.parting.value if row.parting else None,
        },
    }


def _nest(events: list[Event]) -> None:
    """Shorten slices that partially overlap: starts and durations come from different clocks."""
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    open_until: list[Event] = []
    for event in events:
        while open_until and _end(open_until[-1]) <= event["ts"]:
            open_until.pop()
        if open_until and _end(event) > _end(open_until[-1]):
            outer = open_until.pop()
            outer["dur"] = round(event["ts"] - outer["ts"], 3)
        open_until.append(event)


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _arrows(row: CallRow, found: dict[tuple[Key, int], Event]) -> list[Event]:
    last = found[row.key, row.last_rank]
    arrows = []
    for rank in row.calls:
        waiting = found[row.key, rank]
        # A rank that had left the call before did not wait for the last one.
        if rank != row.last_rank and last["ts"] <= _end(waiting):
            ends = (("s", last, last["ts"]), ("f", waiting, _end(waiting)))
            for phase, event, ts in ends:
                arrow = {"ph": phase, "name": "waited for", "cat": _CATEGORY, "ts": ts}
                arrow |= {"pid": event["pid"], "tid": event["tid"]}
                arrows.append(arrow | ({"bp": "e"} if phase == "f" else {}))
    return arrows
