"""Made-up dumps of three ranks, and what the inspector says about them."""

import json
from collections.abc import Sequence
from typing import Any

from objcomm._observe.inspect.command import inspect
from objcomm._observe.inspect.dumps import Dump, parse

Raw = dict[str, Any]
# Any time will do; a large one reveals a loss of precision.
T0 = 1_790_000_000.0


def entry(sequence: int, operation: str = "all_gather", **fields: Any) -> Raw:
    """One call that began `sequence` seconds after T0 and took 2 ms."""
    return {
        "operation": operation,
        "sequence": sequence,
        "mesh": 77,
        "lane": 0,
        "lane_name": "",
        "root": -1,
        "fingerprint": 0,
        "codec": "pickle",
        "call_site": "/job/src/train.py:10",
        "began": T0 + sequence,
        "ms": 2.0,
        "sent_nbytes": 300,
        "received_nbytes": 400,
        "outcome": "returned",
        "awaits": -1,
    } | fields


def group(
    *entries: Raw, ranks: Sequence[int] = (0, 1, 2), name: str = "0", **fields: object
) -> Raw:
    """One group of a dump."""
    usual = {"name": name, "description": "", "ranks": list(ranks), "length": 256}
    return usual | {"entries": list(entries)} | fields


def raw_dump(rank: int, *groups: Raw, **fields: object) -> Raw:
    """A dump from a job of three ranks, taken a hundred seconds after T0."""
    return {
        "objcomm_dump": 1,
        "rank": rank,
        "world_size": 3,
        "host": "node-a",
        "pid": 1000 + rank,
        "at": T0 + 100,
        "is_whole": True,
        "error": None,
        "groups": list(groups),
    } | fields


def dump(rank: int, *groups: Raw, **fields: object) -> Dump:
    """The same dump, parsed."""
    return parse(json.dumps(raw_dump(rank, *groups, **fields)), f"rank{rank}.json")


def by_rank(*calls: Sequence[Raw]) -> list[Dump]:
    """Dumps of ranks that made these calls, in one group."""
    return [dump(rank, group(*each)) for rank, each in enumerate(calls)]


def alike(*entries: Raw) -> list[Dump]:
    """Dumps of three ranks that made the same calls."""
    return by_rank(entries, entries, entries)


def said(dumps: Sequence[Dump], last: int = 20) -> str:
    """Return the last line of the report."""
    return inspect(dumps, last).splitlines()[-1]
