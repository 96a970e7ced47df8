"""Memory that one process fills and others of its host read, without a copy for each.

It lies in files of the system's that have no name and no disk (memfd). Their maker writes them once
and seals them, so that nobody can change or shorten them any more, and hands descriptors to each
receiver. A receiver maps a member *privately*: it may write there, nobody else sees that, and a
page costs memory of its own only once it is written to.

A file's memory goes with the last mapping of any part of it. So a share has several files, of which
each has a part of the members: who keeps one member keeps a 32nd of what came with it at most.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import torch

from objcomm._codecs.buffers import view, writable

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Files of one share.
FILES_MAX = 33
# Less is not worth a file of its own.
_FILE_MIN_NBYTES = 64 << 20

# Of <linux/fcntl.h>: Python has names for them only where it was built on a new system.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
# Against more seals, shrinking and growing: what can shrink ends a reader by SIGBUS.
_FIXED = 1 | 2 | 4
# And against writing: what can be written to can't be judged once for all.
_FINAL = _FIXED | 8
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

#: Where a member lies: the number of its file, and where it begins there.
Place = tuple[int, int]


def places(sizes: Sequence[int]) -> list[Place]:
    """Where members of so many bytes lie, each at the beginning of a page."""
    enough = max(_FILE_MIN_NBYTES, sum(sizes) // (FILES_MAX - 1))
    found: list[Place] = []
    file, start = 0, 0
    for nbytes in sizes:
        if start >= enough:
            file, start = file + 1, 0
        found.append((file, start))
        start += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return found


class Share:
    """Members in memory that is handed over; its descriptors close with it.

    Attributes:
        descriptors: the files', in order.
        flats: the members of one that is being filled, see ``with_room``.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Begin.

        Args:
            descriptors: they are this object's from now on.
        """
        self.descriptors = list(descriptors)
        self.flats: list[torch.Tensor] = []
        self._sizes = [0] * len(self.descriptors)
        self._written: list[mmap.mmap] = []

    def __del__(self) -> None:
        self.close()

    @classmethod
    def of(cls, flats: Sequence[torch.Tensor]) -> Share:
        """A new one with the content of some members.

        Args:
            flats: the members, ``uint8`` and contiguous, in CPU memory.

        Raises:
            OSError: the system has no such files, or no memory for them.
        """
        share = cls(())
        for flat, (file, start) in zip(flats, places([f.numel() for f in flats]), strict=True):
            if file == len(share.descriptors):
                share.descriptors.append(_new_file())
            content, at = writable(flat), 0
            while at < len(content):
                piece = content[at : at + _WRITTEN_AT_ONCE_NBYTES]
                at += os.pwrite(share.descriptors[file], piece, start + at)
        share.seal()
        return share

    @classmethod
    def with_room(cls, sizes: Sequence[int]) -> Share:
        """A new one for members of so many bytes, which are yet to come into its ``flats``.

        Raises:
            OSError: the system has no such files, or no memory for them.
        """
        share = cls(())
        where = places(sizes)
        # Of each file the last one counts.
        ends = {file: start + nbytes for (file, start), nbytes in zip(where, sizes, strict=True)}
        files = [share._opened(end) for end in ends.values()]
        share._sizes = list(ends.values())
        share.flats = [
            files[file][start : start + nbytes]
            for (file, start), nbytes in zip(where, sizes, strict=True)
        ]
        return share

    def _opened(self, nbytes: int) -> torch.Tensor:
        """One more file, to be written."""
        self.descriptors.append(_new_file())
        self._allocate(nbytes)
        memory = mmap.mmap(self.descriptors[-1], nbytes)
        # What a forked process could write to can't be sealed.
        memory.madvise(mmap.MADV_DONTFORK)
        self._written.append(memory)
        # A tensor, and each slice of it, keeps the object that it was made of.
        return torch.frombuffer(self._written[-1], dtype=torch.uint8)

    def _allocate(self, nbytes: int) -> None:
        """Have memory for the last file: who writes where there is no more is ended by SIGBUS."""
        for at in range(0, nbytes, _WRITTEN_AT_ONCE_NBYTES):
            os.posix_fallocate(self.descriptors[-1], at, min(nbytes - at, _WRITTEN_AT_ONCE_NBYTES))

    def seal(self) -> None:
        """Let nobody change it any more; the memory of ``flats`` is gone, whoever still has some.

        Raises:
            OSError: another process may write to it, as one does that was forked in between.
        """
        self.flats.clear()
        while self._written:
            self._written.pop().close()
        for each in self.descriptors:
            fcntl.fcntl(each, _F_ADD_SEALS, _FINAL)
        self.is_fixed()

    @classmethod
    def fixed(cls, nbytes: int) -> Share:
        """A new one of so many bytes, which nobody can shorten, and its maker goes on to change.

        Raises:
            OSError: as ``with_room``.
        """
        share = cls((_new_file(),))
        share._allocate(nbytes)
        fcntl.fcntl(share.descriptors[0], _F_ADD_SEALS, _FIXED)
        share.is_fixed()
        return share

    def is_fixed(self) -> bool:
        """Whether nobody can make it shorter; to be asked first of one that came."""
        if not self._are_sealed(_FIXED):
            return False
        # Huge pages are mapped in whole ones, past the end of what there is room for.
        if any(os.fstatvfs(each).f_bsize != mmap.PAGESIZE for each in self.descriptors):
            return False
        # Only now: before, they could have been made shorter.
        self._sizes = [os.fstat(each).st_size for each in self.descriptors]
        return True

    def is_final(self) -> bool:
        """Whether nobody can change it either."""
        return self._are_sealed(_FINAL)

    def _are_sealed(self, seals: int) -> bool:
        try:
            found = [fcntl.fcntl(each, _F_GET_SEALS) for each in self.descriptors]
        except OSError:  # it is another kind of file
            return False
        return all(each & seals == seals for each in found)

    def close(self) -> None:
        """Need it no more; what was mapped stays."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def mapped(self, place: Place, nbytes: int) -> mmap.mmap:
        """A member in writable memory that is this process's alone; it goes with its last user.

        Args:
            place: where the member lies.
            nbytes: how long it is, 1 at least.

        Raises:
            ValueError: there is no such part.
            OSError: there is no room for it in this process.
        """
        return _mapped(*self._checked(place, nbytes), nbytes, _PROTECTION, mmap.MAP_PRIVATE)

    def common(self, nbytes: int, *, is_own: bool) -> torch.Tensor:
        """The first file as all see it; only its maker may write there.

        Args:
            nbytes: how long it is.
            is_own: whether this process is its maker. Others are ended by SIGSEGV if they write.

        Raises:
            ValueError: it is shorter.
            OSError: as ``mapped``.
        """
        protection = _PROTECTION if is_own else mmap.PROT_READ
        memory = _mapped(*self._checked((0, 0), nbytes), nbytes, protection, mmap.MAP_SHARED)
        memory.madvise(mmap.MADV_DONTFORK)  # a forked process has no part in it
        return torch.frombuffer(memory, dtype=torch.uint8)

    def read_into(self, flat: torch.Tensor, place: Place) -> None:
        """Copy a member into memory that exists.

        Args:
            flat: ``uint8`` and contiguous, as long as the member.
            place: where the member lies.

        Raises:
            ValueError: there is no such part, or it can't be read.
        """
        content, at = writable(flat), 0
        file, start = self._checked(place, len(content))
        while at < len(content):
            try:
                at += os.preadv(file, [content[at:]], start + at)
            except OSError as error:  # it was opened for writing only
                raise ValueError(f"{error}") from error

    def _checked(self, place: Place, nbytes: int) -> Place:
        """The descriptor of a member's file, and where it begins there."""
        file, start = place
        if not 0 <= file < len(self.descriptors):
            raise ValueError(f"file {file} of {len(self.descriptors)}")
        if not 0 <= start <= start + nbytes <= self._sizes[file]:
            raise ValueError(f"bytes {start} to {start + nbytes} of {self._sizes[file]}")
        return self.descriptors[file], start


def _mapped(file: int, start: int, nbytes: int, protection: int, flags: int) -> mmap.mmap:
    """A part of a file in memory; Python's own way keeps a descriptor for each mapping."""
    # So this is memory without a file first, with the file's pages then put in its place.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = view(memory).data_ptr()
    if _map(address, nbytes, protection, flags | _MAP_FIXED, file, start) == _FAILED:
        number = ctypes.get_errno()
        # Where it was there may be nothing now, and then soon somebody else's memory.
        nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _map(address, nbytes, _PROTECTION, nothing, -1, 0)
        raise OSError(number, os.strerror(number))
    return memory


def _new_file() -> int:
    if not hasattr(os, "memfd_create"):  # a Python that was built on an old system
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return os.memfd_create("objcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
