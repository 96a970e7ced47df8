"""The declared cases; importing this package declares them all."""

from bench.suites import broadcast, codecs, gather, helpers, reductions, security, startup

__all__ = ["broadcast", "codecs", "gather", "helpers", "reductions", "security", "startup"]
