"""The declared cases; importing this package declares them all."""

from bench.suites import broadcast, checks, codecs, gather, helpers, reductions, security, startup

__all__ = [
    "broadcast",
    "checks",
    "codecs",
    "gather",
    "helpers",
    "reductions",
    "security",
    "startup",
]
