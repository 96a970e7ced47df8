"""Ranks that die, stop, close their connections or never come, in every phase of every operation."""
