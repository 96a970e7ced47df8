"""What a process has open."""

from pathlib import Path


def open_files() -> int:
    """How many descriptors this process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
