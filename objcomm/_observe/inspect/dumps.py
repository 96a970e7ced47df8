"""Reads dumps, which may come from untrusted sources: every field is checked before use."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from objcomm._observe.history import DUMP_VERSION, RETURNED, UNDER_WAY
from objcomm._observe.terminal import printable
from objcomm.errors import UsageError

# 256 calls of a group are 120 KB; a program may have hundreds of groups.
_MOST_NBYTES = 256 * 1024 * 1024
_MOST_RANKS = 1_000_000
# One part for each call and rank of its group: 256 calls in a group of 30,000 have 7,680,000.
_MOST_PARTS = 10_000_000

# Operations between two ranks.
_SENDS = frozenset({"send", "send_object_list", "ssend", "issend"})
_PROBES = frozenset({"probe", "mprobe"})
_MESSAGES = _SENDS | _PROBES | {"recv", "recv_object_list"}

_NUMBER = (int, float)
_DUMP = {
    "rank": int,
    "world_size": int,
    "host": str,
    "pid": int,
    "at": _NUMBER,
    "is_whole": bool,
    "error": (dict, type(None)),
    "groups": list,
}
_GROUP = {"name": str, "description": str, "ranks": list, "length": int, "entries": list}


@dataclass(frozen=True, slots=True)
class DumpedCall:
    """One rank's part in a call, with the fields of ``history.CallRecord.plain``."""

    operation: str
    sequence: int
    mesh: int
    lane: int
    lane_name: str
    root: int
    fingerprint: int
    codec: str
    call_site: str
    began: float
    ms: float | None
    sent_nbytes: int
    received_nbytes: int
    outcome: str
    awaits: int

    @property
    def is_meeting(self) -> bool:
        """Whether it is not a call but the group's first use, in which the ranks connect."""
        return self.sequence < 0

    @property
    def is_message(self) -> bool:
        """Whether it is a point-to-point operation; then ``root`` is the other rank."""
        return self.operation in _MESSAGES

    @property
    def is_send(self) -> bool:
        """Whether it is the sender's part of a message."""
        return self.operation in _SENDS

    @property
    def is_probe(self) -> bool:
        """Whether it looks for a message without receiving it."""
        return self.operation in _PROBES

    @property
    def ended(self) -> float | None:
        """When it ended, on the same clock as ``began``; ``None`` while it is in progress."""
        return None if self.ms is None else self.began + self.ms / 1e3

    @property
    def has_returned(self) -> bool:
        """Whether it ended without an error."""
        return self.outcome == RETURNED

    @property
    def is_under_way(self) -> bool:
        """Whether it was in progress when its rank's dump was taken."""
        return self.outcome == UNDER_WAY


# JSON does not distinguish 1.0 from 1.
_CALL = {
    name: int | kind if kind in {float, float | None} else kind
    for name, kind in get_type_hints(DumpedCall).items()
}


@dataclass(frozen=True, slots=True)
class GroupDump:
    """One group on one rank.

    Attributes:
        name: torch's name for the group.
        description: torch's description; for a part of a group, the group that it is part of.
        ranks: the global ranks of its members.
        is_full: whether older calls may have been dropped.
        calls: the calls, oldest first.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    is_full: bool
    calls: tuple[DumpedCall, ...]

    @property
    def began(self) -> float:
        """When the oldest remembered call was made; infinity if there is none."""
        return min((call.began for call in self.calls), default=math.inf)


@dataclass(frozen=True, slots=True)
class Dump:
    """The dump of one process, read from one or several files.

    Attributes:
        source: the file.
        rank: the process's global rank.
        world_size: number of ranks in the job.
        host: the host's name.
        pid: the process ID.
        at: when the dump was taken, in seconds since 1970 by the host's clock.
        is_whole: whether it contains all groups of the process.
        error: the error that caused the dump, as text; empty if the program requested it.
        groups: the groups with their calls.
    """

    source: str
    rank: int
    world_size: int
    host: str
    pid: int
    at: float
    is_whole: bool
    error: str
    groups: tuple[GroupDump, ...]


def read(paths: Iterable[Path]) -> list[Dump]:
    """Read the dumps of one run; return one per rank, in rank order.

    Args:
        paths: files, or folders in which every ``objcomm-*.json`` is read.

    Raises:
        UsageError: a file cannot be read or is not a dump, or the dumps are from several runs.
    """
    found: dict[int, Dump] = {}
    for path in _files(paths):
        dump = parse(_text(path), str(path))
        known = found.setdefault(dump.rank, dump)
        if known is not dump:
            found[dump.rank] = _joined(known, dump)
    return [found[rank] for rank in sorted(found)]


def parse(text: str, source: str) -> Dump:
    """Parse the text of one dump.

    Args:
        text: JSON.
        source: its file, for errors.

    Raises:
        UsageError: the text is not a dump, or a dump of another version.
    """
    try:
        raw = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as failure:
        raise UsageError(f"{source}: no JSON: {failure}") from failure
    if not isinstance(raw, dict) or "objcomm_dump" not in raw:
        raise UsageError(f"{source}: JSON, but not a dump of objcomm.recorder")
    if raw["objcomm_dump"] != DUMP_VERSION:
        raise UsageError(
            f"{source}: a dump of version {raw['objcomm_dump']!r}, but this objcomm reads "
            f"version {DUMP_VERSION}; inspect it with the objcomm that wrote it"
        )
    fields = _checked(raw, _DUMP, source)
    if not 0 < fields["world_size"] <= _MOST_RANKS:
        raise UsageError(f"{source}: world_size={fields['world_size']!r} is out of range")
    error = fields["error"]
    if error is not None:
        found = _checked(error, {"type": str, "text": str}, f"{source}: error")
        fields["error"] = f"{found['type']}: {found['text']}"
    groups = [_group(each, f"{source}: groups[{at}]") for at, each in enumerate(fields["groups"])]
    parts = sum(len(each.ranks) * len(each.calls) for each in groups)
    if parts > _MOST_PARTS:
        raise UsageError(
            f"{source}: {parts} ranks in all its calls are too many to compare; "
            f"{_MOST_PARTS} are the most"
        )
    return Dump(
        **fields | {"source": source, "error": fields["error"] or "", "groups": tuple(groups)}
    )


def _files(paths: Iterable[Path]) -> list[Path]:
    files = []
    for path in paths:
        inside = sorted(path.glob("objcomm-*.json")) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"{path}: a folder without any objcomm-*.json")
        files += inside
    return files


def _text(path: Path) -> str:
    try:
        nbytes = path.stat().st_size
        if nbytes > _MOST_NBYTES:
            raise UsageError(f"{path}: {nbytes} bytes are too many for a dump")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"{path}: {reason}") from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _group(raw: object, where: str) -> GroupDump:
    fields = _checked(raw, _GROUP, where)
    length, ranks = fields.pop("length"), tuple(fields["ranks"])
    for rank in ranks:
        if type(rank) is not int or not 0 <= rank < _MOST_RANKS:
            raise UsageError(f"{where}: ranks: {rank!r} is not a rank")
    calls = []
    for at, each in enumerate(fields.pop("entries")):
        call = DumpedCall(**_checked(each, _CALL, f"{where}: entries[{at}]"))
        if (call.ms is None) != call.is_under_way or (call.ms or 0.0) < 0:
            raise UsageError(f"{where}: entries[{at}]: ms={call.ms!r}, but it {call.outcome}")
        calls.append(call)
    is_full = sum(not call.is_meeting for call in calls) >= length
    return GroupDump(**fields | {"ranks": ranks, "is_full": is_full, "calls": tuple(calls)})


def _checked(raw: object, wanted: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the wanted members of a JSON object after checking their types; ignore others."""
    if not isinstance(raw, dict):
        raise UsageError(f"{where}: not an object")
    fields = {}
    for name, kind in wanted.items():
        member = raw.get(name)
        # True is an int in Python, so JSON's true would pass as a number.
        if name not in raw or not isinstance(member, kind) or (kind is not bool and member is True):
            raise UsageError(f"{where}: {name} is {'wrong' if name in raw else 'missing'}")
        if isinstance(member, _NUMBER) and not abs(member) < 2**64:
            raise UsageError(f"{where}: {name}={member!r} is out of range")
        fields[name] = printable(member) if isinstance(member, str) else member
    return fields


def _joined(first: Dump, second: Dump) -> Dump:
    """Merge two dumps of one process: all calls of either, in the state of the later dump."""
    if (first.host, first.pid) != (second.host, second.pid):
        raise UsageError(
            f"{first.source} and {second.source}: two processes that were rank {first.rank}; "
            "give the files of one run at a time"
        )
    earlier, later = sorted((first, second), key=lambda dump: dump.at)
    groups = {(each.name, each.ranks): each for each in earlier.groups}
    for each in later.groups:
        known = groups.get((each.name, each.ranks))
        groups[each.name, each.ranks] = each if known is None else _joined_group(known, each)
    return replace(
        later,
        is_whole=earlier.is_whole or later.is_whole,
        error=later.error or earlier.error,
        groups=tuple(groups.values()),
    )


def _joined_group(earlier: GroupDump, later: GroupDump) -> GroupDump:
    calls = {_identity(call): call for call in (*earlier.calls, *later.calls)}
    ordered = sorted(calls.values(), key=lambda call: call.began)
    return replace(later, is_full=earlier.is_full and later.is_full, calls=tuple(ordered))


def _identity(call: DumpedCall) -> tuple[object, ...]:
    """Return what two records of one call share even if one was written before the call ended."""
    if call.is_meeting:
        return call.operation, call.lane, call.sequence, call.began
    if call.is_message:  # its sequence number is assigned only when a message is transferred
        return call.operation, call.began
    return call.mesh, call.lane, call.sequence, call.began
