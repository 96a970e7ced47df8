"""Compare figures with the targets that the suites declare for them.

Does not know how the figures were measured or how they are shown.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.case import CASES, SECONDS, Case, Target
from bench.measure import Record

OURS = "objcomm"
#: The forms of objcomm to compare with peers; a case has one of them.
_FORMS = (OURS, "objcomm.compat")
#: Metrics in which a peer with a smaller figure is better than objcomm.
_CONTESTED = (SECONDS, "root peak_nbytes")


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result for one target."""

    record: Record
    target: Target
    value: float

    @property
    def is_met(self) -> bool:
        """Whether the measured multiple is small enough."""
        return self.value <= self.target.at_most


@dataclass(frozen=True, slots=True)
class Loss:
    """A figure in which a peer is better than objcomm."""

    ours: Record
    theirs: Record

    @property
    def ratio(self) -> float:
        """Our figure divided by the peer's."""
        return self.ours.median / self.theirs.median


class Results:
    """All figures of one machine and one set of versions."""

    def __init__(self, about: Mapping[str, str], records: Iterable[Record]) -> None:
        self.about = dict(about)
        self._records = {_key(record): record for record in records}

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> "Results":
        """Collect the rows of one or more runs; a later figure replaces an earlier one.

        Raises:
            ValueError: the rows are from different machines or versions, or do not name any.
        """
        abouts, records = [], []
        for row in rows:
            if "about" in row:
                abouts.append(row["about"])
            else:
                records.append(Record(**row))
        if not abouts or any(about != abouts[0] for about in abouts):
            raise ValueError("expected figures of one machine and one set of versions")
        return cls(abouts[0], records)

    @classmethod
    def load(cls, files: Iterable[Path]) -> "Results":
        """Read the output of ``--json``."""
        lines = [line for file in files for line in file.read_text().splitlines()]
        return cls.of(map(json.loads, lines))

    def __iter__(self) -> Iterator[Record]:
        """Iterate over all figures in the order in which they were measured."""
        return iter(self._records.values())

    @property
    def is_smoke(self) -> bool:
        """Whether some figures are from a smoke run, so that none may be judged."""
        return any(record.smoke for record in self)

    def find(self, record: Record, peer: str) -> Record | None:
        """Return the same figure of another peer, if there is one."""
        return self._records.get((*_key(record)[:-1], peer))

    def judgements(self) -> list[Judgement]:
        """Judge every declared target for which there are figures; none for a smoke run."""
        return [] if self.is_smoke else [found for case in CASES for found in self._judge(case)]

    def losses(self) -> list[Loss]:
        """Return figures in which a peer is better, the worst first; none for a smoke run."""
        losses = [
            Loss(ours, theirs)
            for theirs in (() if self.is_smoke else self)
            if theirs.metric in _CONTESTED and not theirs.peer.startswith(OURS)
            for form in _FORMS
            if (ours := self.find(theirs, form)) and ours.median > theirs.median
        ]
        return sorted(losses, key=lambda loss: -loss.ratio)

    def _judge(self, case: Case) -> Iterator[Judgement]:
        for target in case.targets:
            for payload in case.payloads:
                key = (case.operation, payload, target.world, target.metric, target.peer)
                ours = self._records.get(key)
                unit = self._unit(ours, target) if ours else None
                if ours and unit:
                    yield Judgement(ours, target, ours.median / unit)

    def _unit(self, ours: Record, target: Target) -> float | None:
        if not isinstance(target.against, str):
            return target.against
        theirs = self.find(ours, target.against)
        return theirs.median if theirs else None


def _key(record: Record) -> tuple[str, str, int, str, str]:
    return (record.operation, record.payload, record.world, record.metric, record.peer)
