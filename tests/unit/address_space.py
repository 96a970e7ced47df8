"""How much address space a process takes, whether it has touched the memory there or not."""

import re
from pathlib import Path


def peak_address_space_nbytes() -> int:
    """The most that this process ever had, from Linux."""
    found = re.search(r"VmPeak:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024
