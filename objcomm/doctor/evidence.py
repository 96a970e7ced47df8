"""All that is known when conclusions are drawn, in one place."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from objcomm.doctor.facts import Contact, Link, Lookup, Report


@dataclass(frozen=True, slots=True)
class Evidence:
    """What rank 0 has collected; or what one rank knows that met nobody.

    Attributes:
        world_size: number of ranks, as the one says that draws the conclusions.
        reports: by rank, of those that take part.
        others: of processes that came, too, with a rank that another one has, or that none has.
        waited_seconds: how long the others were waited for.
        is_alone: whether this is what one rank knows by itself.
        seen: ranks that a rank without rank 0 could see in the store; None if there was no store.
        contacts: whom each rank tried to reach, by rank.
        lookups: how long names took to be looked up, by the rank on the store's host that tried.
        silent: ranks that came, and then did not answer any more.
        links: what was measured.
        failures: what ended the measurement, by rank.
        left_out: how many pairs of ranks were not measured.
    """

    world_size: int
    reports: Mapping[int, Report]
    others: tuple[Report, ...] = ()
    waited_seconds: float = 0.0
    is_alone: bool = False
    seen: tuple[int, ...] | None = None
    contacts: Mapping[int, tuple[Contact, ...]] = field(default_factory=dict)
    lookups: Mapping[int, tuple[Lookup, ...]] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    failures: Mapping[int, str] = field(default_factory=dict)
    left_out: int = 0

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that did not come, as far as that is known here."""
        if self.is_alone and self.seen is None:
            return ()
        came = self.reports.keys() | set(self.seen or ())
        return tuple(rank for rank in range(self.world_size) if rank not in came)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are here and reach one another, so that a group can be made."""
        are_reached = all(not each.problem for made in self.contacts.values() for each in made)
        can_listen = all(not report.gloo.problem for report in self.reports.values())
        return are_reached and can_listen and not (self.missing or self.others or self.silent)

    @property
    def machines(self) -> set[str]:
        """The hosts that ranks run on."""
        return {report.machine for report in self.reports.values()}
