"""Ranks that die, stop, lose their connections or never come, in every operation's phases."""
