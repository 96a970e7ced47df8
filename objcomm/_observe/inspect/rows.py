"""Matching of calls across ranks, where the ranks diverge, and how their clocks differ.

A message cannot arrive before it was sent. So the time at which a rank left a call, and the time at
which the rank whose message it needed entered the call, bound the difference of their clocks from
one side. Calls in the other direction bound it from the other side.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from objcomm._observe.inspect.dumps import Dump, DumpedCall, GroupDump


class Absence(Enum):
    """Why a rank is absent from a call that others made."""

    NEVER = "never made it"
    EARLIER = "had not reached it when its dump was taken"
    FORGOTTEN = "no longer remembers it"
    NO_DUMP = "left no dump"
    UNTAKEN = "has not taken it"
    UNSENT = "sent nothing that it takes"


class Parting(Enum):
    """How ranks diverge in a call."""

    DIFFERS = "different operations"
    MISSING = "a rank never made it"
    STUCK = "it did not end well"


@dataclass(frozen=True, slots=True)
class Key:
    """The key by which two ranks' parts of one call are matched.

    Attributes:
        group: the group's name.
        ranks: the group's members, as global ranks.
        mesh: the number of the mesh; 0 if there was none.
        lane: the number of the lane.
        sequence: the call's number on that lane; negative for a rendezvous.
        occurrence: how many calls with this key the rank made before, such as failed rendezvous.
        pair: sender and receiver of a message, as global ranks, -1 for any; for a rendezvous, both
            in ascending order; empty for a collective.
        alone: the rank that made the call, if no message was matched; else -1.
    """

    group: str
    ranks: tuple[int, ...]
    mesh: int
    lane: int
    sequence: int
    occurrence: int = 0
    pair: tuple[int, ...] = ()
    alone: int = -1

    @property
    def stretch(self) -> tuple[str, tuple[int, ...], int, int, tuple[int, ...]]:
        """The sequence that the call belongs to, without gaps: a lane of one mesh."""
        return self.group, self.ranks, self.mesh, self.lane, self.pair

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part in the call, as global ranks."""
        return tuple(rank for rank in self.pair if rank >= 0) or self.ranks

    def root_of(self, call: DumpedCall) -> int | None:
        """Return the root or the other rank of a call as a global rank; None if it has none."""
        return self.ranks[call.root] if 0 <= call.root < len(self.ranks) else None


@dataclass(slots=True)
class CallRow:
    """One call with the parts of all ranks.

    Attributes:
        key: the key of the call.
        lane_name: the name of its lane.
        description: the description of its group.
        calls: the ranks' parts, by global rank.
        absent: the absent members, and why they are absent.
    """

    key: Key
    lane_name: str
    description: str
    calls: dict[int, DumpedCall] = field(default_factory=dict)
    absent: dict[int, Absence] = field(default_factory=dict)

    @property
    def began(self) -> float:
        """When the first rank made it."""
        return min(call.began for call in self.calls.values())

    @property
    def last_rank(self) -> int:
        """The rank that made it last."""
        return max(self.calls, key=lambda rank: self.calls[rank].began)

    @property
    def skew_seconds(self) -> float:
        """How long after the first rank the last one made it."""
        return max(call.began for call in self.calls.values()) - self.began

    @property
    def has_other_names(self) -> bool:
        """Whether all ranks agree on operation and root, but not on name, operator or options."""
        calls = self.calls.values()
        alike = len({(call.operation, call.root) for call in calls}) == 1
        return alike and len({call.fingerprint for call in calls}) > 1

    @property
    def parting(self) -> Parting | None:
        """How the ranks diverge in it, if they do. A message can only be stuck."""
        if self.key.pair:
            return Parting.STUCK if any(is_stuck(call) for call in self.calls.values()) else None
        agreed = {(call.operation, call.root, call.fingerprint) for call in self.calls.values()}
        if len(agreed) > 1 and self.key.sequence >= 0:
            return Parting.DIFFERS
        if Absence.NEVER in self.absent.values():
            return Parting.MISSING
        return Parting.STUCK if any(is_stuck(call) for call in self.calls.values()) else None


def is_stuck(call: DumpedCall) -> bool:
    """Whether the rank was still waiting in the call, or lost other ranks in it."""
    lost = ("Transport", "Desync", "BrokenGroup", "WireError")
    return call.is_under_way or call.outcome.startswith(lost)


def match(dumps: Sequence[Dump]) -> list[CallRow]:
    """Match the calls of all ranks; return them in the order in which they were made."""
    rows: dict[Key, CallRow] = {}
    for dump in dumps:
        for group in dump.groups:
            for key, call in _keyed(group, dump.rank):
                lane_name = "" if call.is_meeting else call.lane_name
                row = rows.setdefault(key, CallRow(key, lane_name, group.description))
                row.calls[dump.rank] = call
    _explain_absences(rows, dumps)
    return sorted(rows.values(), key=lambda row: (row.began, row.key.sequence))


def _keyed(group: GroupDump, rank: int) -> list[tuple[Key, DumpedCall]]:
    made: Counter[Key] = Counter()
    keyed = []
    for call in group.calls:
        # A rendezvous may be started by a different lane on each rank.
        numbers = (call.mesh, 0 if call.is_meeting else call.lane, call.sequence)
        key = Key(group.name, group.ranks, *numbers)
        if call.is_message:
            key = _key_of_message(key, call, rank)
        keyed.append((replace(key, occurrence=made[key]), call))
        made[key] += 1
    return keyed


def _key_of_message(key: Key, call: DumpedCall, rank: int) -> Key:
    """Return a message's key. Messages get numbers per pair and direction when they are sent."""
    found = key.root_of(call)
    peer = -1 if found is None else found
    if call.is_meeting:
        alone = rank if found is None else -1
        return replace(key, pair=tuple(sorted((rank, peer))), alone=alone)
    pair = (rank, peer) if call.is_send else (peer, rank)
    return replace(key, pair=pair, alone=-1 if call.mesh else rank)


def _explain_absences(rows: dict[Key, CallRow], dumps: Sequence[Dump]) -> None:
    by_rank = {dump.rank: dump for dump in dumps}
    made: dict[tuple[object, int], list[int]] = defaultdict(list)
    for key, row in rows.items():
        for rank in row.calls:
            made[key.stretch, rank].append(key.sequence)
    for key, row in rows.items():
        for rank in [each for each in key.members if each not in row.calls]:
            dump = by_rank.get(rank)
            groups = () if dump is None else dump.groups
            same = (each for each in groups if (each.name, each.ranks) == (key.group, key.ranks))
            group = next(same, None)
            if dump is None or (group is None and not dump.is_whole):
                row.absent[rank] = Absence.NO_DUMP
            elif not key.pair:
                row.absent[rank] = _absence(row, dump, group, made[key.stretch, rank])
            elif absence := _absence_of_message(row, rank, dump, group):
                row.absent[rank] = absence


def _absence(
    row: CallRow, dump: Dump, group: GroupDump | None, sequences: Sequence[int]
) -> Absence:
    """Return why a rank is absent from a row, given its calls in the same stretch."""
    key = row.key
    # The latest calls are remembered, so a call before a remembered one was made and forgotten.
    is_forgotten = any(number > key.sequence for number in sequences)
    is_met = key.sequence < 0 and (key.mesh != 0 or bool(sequences))
    if is_forgotten or is_met or (group is not None and group.is_full and not sequences):
        return Absence.FORGOTTEN
    return Absence.EARLIER if dump.at < row.began else Absence.NEVER


def _absence_of_message(
    row: CallRow, rank: int, dump: Dump, group: GroupDump | None
) -> Absence | None:
    """Return why the other rank is absent from a message; ``None`` if its absence is normal."""
    key, (call,) = row.key, row.calls.values()
    if call.is_meeting or (call.is_probe and call.has_returned):
        return None
    if group is not None and group.is_full and row.began < group.began:
        return Absence.FORGOTTEN
    if dump.at < row.began:
        return Absence.EARLIER
    unsent = Absence.UNSENT if key.alone >= 0 else Absence.FORGOTTEN
    return Absence.UNTAKEN if rank == key.pair[-1] else unsent


def first_parting(rows: Sequence[CallRow]) -> CallRow | None:
    """Return the call in which ranks first diverge; if they do not, the first one that failed."""
    parted = [row for row in rows if row.parting is not None]
    left = [row for row in parted if row.parting is not Parting.STUCK]
    return next(iter(left or parted), None)


_FROM_ROOT = frozenset({"broadcast", "broadcast_object_list", "scatter", "scatter_object_list"})
_TO_ROOT = frozenset({"gather", "gather_object", "gather_scalar", "reduce"})


@dataclass(frozen=True, slots=True)
class Clock:
    """One host's clock relative to that of the first rank's host.

    Attributes:
        ahead_seconds: how far it is ahead; subtracted from its times.
        margin_seconds: the error of that estimate; infinite if nothing is known.
        count: number of matching calls that the estimate is based on.
    """

    ahead_seconds: float = 0.0
    margin_seconds: float = math.inf
    count: int = 0


def estimate(rows: Sequence[CallRow], dumps: Sequence[Dump]) -> dict[str, Clock]:
    """Estimate each host's clock. Ranks of one host share a clock.

    Args:
        rows: matched calls, with times of the ranks' own clocks.
        dumps: all dumps; the host of the first one is the reference.
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
    # Not corrected if the clocks may agree.
    return Clock(0.0 if least <= 0.0 <= most else middle, margin, count)


def _bounds(row: CallRow, host_of: dict[int, str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return, by host, when its last sender entered a call, and when its first receiver left."""
    sent: dict[str, float] = {}
    taken: dict[str, float] = {}
    if row.key.pair and (len(row.calls) == 1 or row.key.sequence < 0):
        return sent, taken
    for rank, call in row.calls.items():
        if call.ended is None or not call.has_returned:
            continue
        host = host_of[rank]
        if call.is_message:
            does_send, does_take = call.is_send, not call.is_send
        else:
            is_root = rank == row.key.root_of(call)
            does_send = is_root or call.operation not in _FROM_ROOT
            does_take = is_root or call.operation not in _TO_ROOT
        if does_send:
            sent[host] = max(sent.get(host, call.began), call.began)
        if does_take:
            taken[host] = min(taken.get(host, call.ended), call.ended)
    return sent, taken


def corrected(dumps: Sequence[Dump], clocks: dict[str, Clock]) -> list[Dump]:
    """Return the dumps with all times converted to the clock of the first rank's host."""
    return [_shifted(dump, clocks[dump.host].ahead_seconds) for dump in dumps]


def _shifted(dump: Dump, ahead: float) -> Dump:
    if not ahead:
        return dump
    groups = tuple(
        replace(group, calls=tuple(replace(call, began=call.began - ahead) for call in group.calls))
        for group in dump.groups
    )
    return replace(dump, at=dump.at - ahead, groups=groups)
