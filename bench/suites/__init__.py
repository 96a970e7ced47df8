"""The declared cases; importing this package declares them all."""

from bench.suites import (
    broadcast,
    checks,
    codecs,
    engine,
    flight,
    gather,
    helpers,
    in_a_row,
    libraries,
    messages,
    reductions,
    security,
    startup,
)

__all__ = [
    "broadcast",
    "checks",
    "codecs",
    "engine",
    "flight",
    "gather",
    "helpers",
    "in_a_row",
    "libraries",
    "messages",
    "reductions",
    "security",
    "startup",
]
