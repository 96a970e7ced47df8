"""Memory that one process fills and others of its host read, without a copy for each.

It is a file of the system's that has no name and no disk, a memfd. Its maker writes it once and
seals it, so that nobody can change or shorten it any more, and hands a descriptor to each receiver.
A receiver maps it *privately*: it may write to what it has mapped, nobody else sees that, and a
page costs memory of its own only once it is written to.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

from objcomm.codecs.buffers import view, writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

# What can be written to cannot be trusted, and what can shrink ends a reader by SIGBUS.
# Only Linux has them; elsewhere nobody makes a share, but this module is imported.
_SEALS = sum(getattr(fcntl, f"F_SEAL_{name}", 0) for name in ("SHRINK", "GROW", "WRITE", "SEAL"))
# Ctrl-C is heard between two writes.
_WRITTEN_AT_ONCE_NBYTES = 64 << 20

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10  # of Linux on every processor that torch runs on; Python has no name for it
_FAILED = ctypes.c_void_p(-1).value
_map = ctypes.CDLL(None, use_errno=True).mmap
_map.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_map.restype = ctypes.c_void_p


class Share:
    """Members in one memory, each at the beginning of a page; its descriptor closes with it.

    Attributes:
        descriptor: the file's.
        nbytes: how long it is.
    """

    def __init__(self, descriptor: int) -> None:
        """Begin.

        Args:
            descriptor: it is this object's from now on.
        """
        self.descriptor = descriptor
        self.nbytes = os.fstat(descriptor).st_size

    def __del__(self) -> None:
        self.close()

    @classmethod
    def of(cls, flats: Sequence[torch.Tensor]) -> Share:
        """A new one with the content of some members.

        Args:
            flats: the members, ``uint8`` and contiguous, in CPU memory.

        Raises:
            OSError: the system has no such files, or no memory for it.
        """
        share = cls(os.memfd_create("objcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        for flat, start in zip(flats, starts([flat.numel() for flat in flats]), strict=True):
            content, at = writable(flat), 0
            while at < len(content):
                piece = content[at : at + _WRITTEN_AT_ONCE_NBYTES]
                at += os.pwrite(share.descriptor, piece, start + at)
        fcntl.fcntl(share.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        share.nbytes = os.fstat(share.descriptor).st_size
        return share

    def is_sealed(self) -> bool:
        """Whether nobody can change it, or shorten it."""
        try:
            return fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:  # it is another kind of file
            return False

    def close(self) -> None:
        """Need it no more; what was mapped stays."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def mapped(self, start: int, nbytes: int) -> mmap.mmap:
        """A member in writable memory that is this process's alone; it goes with its last user.

        Args:
            start: where the member begins, as ``starts`` gives it.
            nbytes: how long it is, 1 at least.

        Raises:
            ValueError: the memory has no such part.
            OSError: there is no room for it in this process.
        """
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} of {self.nbytes}")
        # Python's own way to map a file keeps a descriptor for each mapping. So this is memory
        # without a file first, with the file's pages then put in its place.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = view(memory).data_ptr()
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        if _map(address, nbytes, _PROTECTION, flags, self.descriptor, start) == _FAILED:
            number = ctypes.get_errno()
            # Where it was there may be nothing now, and then soon somebody else's memory.
            flags |= mmap.MAP_ANONYMOUS
            _map(address, nbytes, _PROTECTION, flags, -1, 0)
            raise OSError(number, os.strerror(number))
        return memory

    def read_into(self, flat: torch.Tensor, start: int) -> None:
        """Copy a member into memory that exists.

        Args:
            flat: ``uint8`` and contiguous, as long as the member.
            start: where the member begins.

        Raises:
            ValueError: the memory has no such part.
        """
        content, at = writable(flat), 0
        while at < len(content):
            count = os.preadv(self.descriptor, [content[at:]], start + at)
            if not count:
                raise ValueError(f"nothing at byte {start + at} of {self.nbytes}")
            at += count


def starts(sizes: Sequence[int]) -> list[int]:
    """Where members of so many bytes begin: each at a page of its own."""
    at, found = 0, []
    for nbytes in sizes:
        found.append(at)
        at += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return found
