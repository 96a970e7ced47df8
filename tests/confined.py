"""Deny this process what a system may refuse: system calls and file descriptors."""

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from struct import pack

# Of <linux/prctl.h>, <linux/seccomp.h> and <linux/filter.h>.
_NO_NEW_PRIVILEGES, _SECCOMP, _BY_FILTER = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_MACHINE = os.uname().machine

#: System call numbers.
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}[_MACHINE]


def refuse(number: int, errno: int) -> None:
    """Make the kernel refuse a system call in this thread for good, as a sandbox does.

    Args:
        number: the number of the system call.
        errno: the error that it fails with.
    """
    steps = [
        (_LOAD_WORD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 0, 1, number),
        (_RETURN, 0, 0, _FAIL | errno),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(pack("HBBI", *step) for step in steps))
    program = pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for words in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _BY_FILTER, program, 0, 0)):
        if prctl(*words):
            raise OSError(ctypes.get_errno(), "prctl")


@contextmanager
def no_descriptors(left: int = 0) -> Iterator[None]:
    """Let this process open only ``left`` more files in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
    try:
        while True:
            try:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for _ in range(left):
            os.close(fillers.pop())
        yield
    finally:
        for each in fillers:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
