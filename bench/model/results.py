"""The counts of real ranks and the figures of the model, as rows of a file."""

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
        per_host: number of ranks per host.
        cores: processors of a host; 0 if each rank has its own.
        seconds: see ``Outcome``, as for all that follow.
        messages: of the busiest rank.
        nbytes: likewise.
        card_nbytes: of the busiest card.
        connections: of the rank with the most connections.
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
    def of(  # noqa: PLR0917  # each has a different type
        cls, outcome: Outcome, peer: str, operation: str, size: int, per_host: int, cores: int
    ) -> "Modelled":
        """Take the figures from an outcome."""
        names = [each.name for each in dataclasses.fields(cls)][5:]
        figures = {name: getattr(outcome, name) for name in names}
        return cls(peer, operation, size, per_host, cores, **figures)


@dataclass(slots=True)
class Results:
    """All rows of one run.

    Attributes:
        about: the machine and the versions.
        object_nbytes: the encoded size of each rank's object.
        network: the hosts and network given to the model, in which each rank has its own processor.
        fits: the costs of messages, by peer.
        counted: the real runs.
        modelled: the runs of the model.
        met: the meetings, of real ranks and in the model.
        store_seconds: the time that a request is assumed to take on the store's host.
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
        """Read a file that ``write`` wrote."""
        found = cls()
        for line in file.read_text(encoding="utf-8").splitlines():
            found._take(json.loads(line))
        return found

    def write(self, file: Path) -> None:
        """Write one row per line."""
        text = "".join(json.dumps(row) + "\n" for row in self._rows())
        file.write_text(text, encoding="utf-8")

    def of(self, peer: str, operation: str, cores: int) -> dict[int, Modelled]:
        """Return the model's runs with a number of cores per host, by number of ranks."""
        return {
            each.size: each
            for each in self.modelled
            if (each.peer, each.operation, each.cores) == (peer, operation, cores)
        }

    def real(self, peer: str, size: int, per_host: int) -> dict[str, Counted]:
        """Return the real runs of one layout, by operation."""
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
