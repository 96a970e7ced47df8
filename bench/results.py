"""Figures beside the targets that the suites declare for them.

Knows nothing of how the figures were taken or of how they are shown.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.case import CASES, SECONDS, Case, Target
from bench.measure import Record

OURS = "objcomm"
#: What is contested: objcomm, and where a case does not have it, objcomm by torch's names.
_FORMS = (OURS, "objcomm.compat")
#: Metrics of which less is better, so that a peer with less beats us.
_CONTESTED = (SECONDS, "root peak_nbytes")


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of one target."""

    record: Record
    target: Target
    value: float

    @property
    def is_met(self) -> bool:
        """Whether the measured multiple is small enough."""
        return self.value <= self.target.at_most


@dataclass(frozen=True, slots=True)
class Loss:
    """A figure of ours that a peer's betters."""

    ours: Record
    theirs: Record

    @property
    def ratio(self) -> float:
        """How many times the peer's figure ours is."""
        return self.ours.median / self.theirs.median


class Results:
    """All figures of one machine and one set of versions."""

    def __init__(self, about: Mapping[str, str], records: Iterable[Record]) -> None:
        self.about = dict(about)
        self._records = {_key(record): record for record in records}

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> "Results":
        """Sort the rows of one or more runs; of two figures of one thing the later counts.

        Raises:
            ValueError: the rows come from different machines or versions, or from none.
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
        """Read what ``--json`` wrote."""
        lines = [line for file in files for line in file.read_text().splitlines()]
        return cls.of(map(json.loads, lines))

    def __iter__(self) -> Iterator[Record]:
        """All figures, in the order in which they were taken."""
        return iter(self._records.values())

    @property
    def is_smoke(self) -> bool:
        """Whether some figures come from shrunken payloads, so that none may be judged."""
        return any(record.smoke for record in self)

    def find(self, record: Record, peer: str) -> Record | None:
        """The same figure of another peer."""
        return self._records.get((*_key(record)[:-1], peer))

    def judgements(self) -> list[Judgement]:
        """Every declared target that these figures can answer; none for a smoke run."""
        return [] if self.is_smoke else [found for case in CASES for found in self._judge(case)]

    def losses(self) -> list[Loss]:
        """Every contested figure of ours that a peer betters, the worst first; none for smoke."""
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
