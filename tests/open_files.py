"""The descriptors that a process has open."""

from pathlib import Path


def open_files() -> int:
    """Count this process's descriptors."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
