"""The declared cases; importing this package declares them all."""

from bench.suites import (
    broadcast,
    checks,
    codecs,
    flight,
    gather,
    helpers,
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
    "flight",
    "gather",
    "helpers",
    "libraries",
    "messages",
    "reductions",
    "security",
    "startup",
]
