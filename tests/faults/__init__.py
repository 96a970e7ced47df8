"""Ranks that die, stop, lose their connections or never arrive, in each phase of each operation."""
