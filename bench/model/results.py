"""What was counted on real ranks and what the model says, as rows of a file."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.model.fit import Fit
from bench.model.link import Costs
from bench.model.real import Counted, Met
from bench.model.world import Machine, Outcome


@dataclass(frozen=True, slots=True)
class Modelled:
    """One operation in the model.

    Attributes:
        peer: ``"objcomm"`` or ``"torch"``.
        operation: its name.
        size: number of ranks.
        per_host: ranks of a host.
        cores: processors of a host; 0 if each rank has its own.
        seconds: see ``Outcome``, as for all that follow.
        messages: of the busiest rank.
        nbytes: likewise.
        card_nbytes: of the busiest card.
        connections: of the rank that has most.
    """

    peer: str
    operation: str
    size: int
    per_host: int
    cores: int
    seconds: float
    messages: int
    nbytes: int
    card_nbytes: int
    connections: int

    @classmethod
    def of(  # noqa: PLR0917  # each is of another kind
        cls, outcome: Outcome, peer: str, operation: str, size: int, per_host: int, cores: int
    ) -> "Modelled":
        """What an outcome has of it."""
        names = [each.name for each in dataclasses.fields(cls)][5:]
        figures = {name: getattr(outcome, name) for name in names}
        return cls(peer, operation, size, per_host, cores, **figures)


@dataclass(slots=True)
class Results:
    """All rows of one run.

    Attributes:
        about: the machine, and the versions.
        object_nbytes: of each rank's object.
        network: what the model was told of hosts, where each rank has a processor of its own.
        fits: by peer, what messages cost.
        counted: real runs.
        modelled: the model's.
        met: how ranks meet, real ones and the model's.
        store_seconds: what a request is assumed to take the store's host.
    """

    about: dict[str, str] = field(default_factory=dict)
    object_nbytes: int = 0
    network: Machine | None = None
    fits: dict[str, Fit] = field(default_factory=dict)
    counted: list[Counted] = field(default_factory=list)
    modelled: list[Modelled] = field(default_factory=list)
    met: list[Met] = field(default_factory=list)
    store_seconds: float = 0.0

    @classmethod
    def load(cls, file: Path) -> "Results":
        """Read what ``write`` wrote."""
        found = cls()
        for line in file.read_text(encoding="utf-8").splitlines():
            found._take(json.loads(line))
        return found

    def write(self, file: Path) -> None:
        """A row a line."""
        text = "".join(json.dumps(row) + "\n" for row in self._rows())
        file.write_text(text, encoding="utf-8")

    def of(self, peer: str, operation: str, cores: int) -> dict[int, Modelled]:
        """The model's, by size; with so many processors of a host."""
        return {
            each.size: each
            for each in self.modelled
            if (each.peer, each.operation, each.cores) == (peer, operation, cores)
        }

    def real(self, peer: str, size: int, per_host: int) -> dict[str, Counted]:
        """The real runs of one layout, by operation."""
        return {
            each.operation: each
            for each in self.counted
            if (each.peer, each.size, each.per_host) == (peer, size, per_host)
        }

    def _rows(self) -> Iterator[dict[str, Any]]:
        yield {"about": self.about, "object_nbytes": self.object_nbytes}
        if self.network is not None:
            yield {
                "network": dataclasses.asdict(self.network),
                "store_seconds": self.store_seconds,
            }
        yield from ({"fit": dataclasses.asdict(each), "of": of} for of, each in self.fits.items())
        yield from _rows_of("counted", self.counted)
        yield from _rows_of("modelled", self.modelled)
        yield from _rows_of("met", self.met)

    def _take(self, row: dict[str, Any]) -> None:
        if "about" in row:
            self.about, self.object_nbytes = row["about"], row["object_nbytes"]
        elif "network" in row:
            self.network = Machine(**row["network"])
            self.store_seconds = row["store_seconds"]
        elif "fit" in row:
            costs = Costs(**row["fit"].pop("costs"))
            self.fits[row["of"]] = Fit(costs, **row["fit"])
        elif "counted" in row:
            self.counted.append(Counted(**row["counted"]))
        elif "met" in row:
            self.met.append(Met(**row["met"]))
        else:
            self.modelled.append(Modelled(**row["modelled"]))


def _rows_of(kind: str, rows: Iterable[Any]) -> Iterator[dict[str, Any]]:
    return ({kind: dataclasses.asdict(row)} for row in rows)
