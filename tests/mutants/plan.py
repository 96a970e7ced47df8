"""All mutants; their names are unique."""

from tests.mutants import (
    codecs,
    deaths,
    devices,
    failures,
    lifetimes,
    results,
    streams,
    surroundings,
    traffic,
    waits,
    wire,
)
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *wire.MUTANTS,
    *codecs.MUTANTS,
    *traffic.MUTANTS,
    *results.MUTANTS,
    *failures.MUTANTS,
    *deaths.MUTANTS,
    *waits.MUTANTS,
    *lifetimes.MUTANTS,
    *devices.MUTANTS,
    *streams.MUTANTS,
    *surroundings.MUTANTS,
)
