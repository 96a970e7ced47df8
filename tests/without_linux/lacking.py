"""Check that this Python lacks what its ``sitecustomize`` removes."""

import ctypes
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

_PLACES = ("/proc/self/stat", "/sys/class/net", "/dev/shm")  # noqa: S108  # only checked for existence
_NAMES: dict[ModuleType, tuple[str, ...]] = {
    os: ("sched_getaffinity", "eventfd", "memfd_create", "pidfd_open"),
    select: ("epoll", "POLLRDHUP"),
    signal: ("pidfd_send_signal", "sigtimedwait"),
    socket: ("SO_PEERCRED", "MSG_CMSG_CLOEXEC"),
}


def main() -> None:
    """Fail if any of it is there."""
    assert sys.platform == "darwin"
    for path in _PLACES:
        assert not Path(path).exists()
        with pytest.raises(FileNotFoundError):
            os.open(path, os.O_RDONLY)
        with pytest.raises(FileNotFoundError):
            Path(path).read_bytes()
    assert not [name for each, names in _NAMES.items() for name in names if hasattr(each, name)]
    with pytest.raises(OSError, match="image not found"):
        ctypes.CDLL("libc.so.6")
    assert not hasattr(ctypes.CDLL(None), "prctl")
    with socket.socket(socket.AF_UNIX) as end, pytest.raises(FileNotFoundError):
        end.bind("\0name")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, resource.RLIM_INFINITY)
    with pytest.raises(RuntimeError, match="gloo device"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    main()
