"""Takes something from this process that a system may refuse: calls of the kernel, descriptors."""

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

#: The kernel's numbers.
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}[_MACHINE]


def refuse(number: int, errno: int) -> None:
    """Have the kernel refuse a call to this thread, as a sandbox does, for good.

    Args:
        number: the call's.
        errno: why.
    """
    steps = [
        (_LOAD_WORD, 0, 0, 0),  # the call's number
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
    """A block in which this process can open so many files more, and then none."""
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
