"""Memory that one process fills and others on its host read, without a copy for each.

It consists of anonymous files in memory (memfd). Their creator writes them once and seals them, so
that no process can change or shorten them any more, and sends descriptors to each receiver. A
receiver maps a member *privately*: it may write there, unseen by others, and a page occupies
additional memory only once it is written to.

A file's memory is released with the last mapping of any part of it. So a share has several files,
each with some of the members: a process that keeps one member keeps at most a 32nd of what came
with it.
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

#: The most files of a share.
FILES_MAX = 33
# Less is not worth a separate file.
_FILE_MIN_NBYTES = 64 << 20

# From <linux/fcntl.h>; Python has names for them only if it was built on a recent system.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
# Forbid more seals, shrinking and growing. A file that can shrink may end a reader by SIGBUS.
_FIXED = 1 | 2 | 4
# Forbid writing, too. Content that can still change can't be checked once and for all.
_FINAL = _FIXED | 8
# Ctrl-C is handled between two writes.
_WRITTEN_AT_ONCE_NBYTES = 64 << 20

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10  # Linux's, on every processor that torch supports; Python has no name for it
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

#: Position of a member: the number of its file, and its offset there.
Place = tuple[int, int]


def places(sizes: Sequence[int]) -> list[Place]:
    """Return the positions of members of these sizes; each begins on a page boundary."""
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
    """Members in memory that is handed over; closes its descriptors when it is deleted.

    Attributes:
        descriptors: of the files, in order.
        flats: the members of a share that is being filled, see ``with_room``.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Take ownership of some descriptors.

        Args:
            descriptors: of the files; this object closes them.
        """
        self.descriptors = list(descriptors)
        self.flats: list[torch.Tensor] = []
        self._sizes = [0] * len(self.descriptors)
        self._written: list[mmap.mmap] = []

    def __del__(self) -> None:
        self.close()

    @classmethod
    def of(cls, flats: Sequence[torch.Tensor]) -> Share:
        """Create a share with the content of some members.

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
        """Create a share for members of these sizes, to be written into its ``flats``.

        Raises:
            OSError: the system has no such files, or no memory for them.
        """
        share = cls(())
        where = places(sizes)
        # The last member of a file determines its size.
        ends = {file: start + nbytes for (file, start), nbytes in zip(where, sizes, strict=True)}
        files = [share._opened(end) for end in ends.values()]
        share._sizes = list(ends.values())
        share.flats = [
            files[file][start : start + nbytes]
            for (file, start), nbytes in zip(where, sizes, strict=True)
        ]
        return share

    def _opened(self, nbytes: int) -> torch.Tensor:
        """Return the memory of a new file, for writing."""
        self.descriptors.append(_new_file())
        self._allocate(nbytes)
        memory = mmap.mmap(self.descriptors[-1], nbytes)
        # A file that a forked process could write to can't be sealed.
        memory.madvise(mmap.MADV_DONTFORK)
        self._written.append(memory)
        # A tensor and its slices keep alive the object from which it was created.
        return torch.frombuffer(self._written[-1], dtype=torch.uint8)

    def _allocate(self, nbytes: int) -> None:
        """Reserve memory for the last file: a write to a page without memory ends in SIGBUS."""
        for at in range(0, nbytes, _WRITTEN_AT_ONCE_NBYTES):
            os.posix_fallocate(self.descriptors[-1], at, min(nbytes - at, _WRITTEN_AT_ONCE_NBYTES))

    def seal(self) -> None:
        """Make the files immutable, which removes the memory of ``flats`` even if it is referenced.

        Raises:
            OSError: another process may write to them, such as one forked in the meantime.
        """
        self.flats.clear()
        while self._written:
            self._written.pop().close()
        for each in self.descriptors:
            fcntl.fcntl(each, _F_ADD_SEALS, _FINAL)
        self.is_fixed()

    @classmethod
    def fixed(cls, nbytes: int) -> Share:
        """Create a share of this size that can't be shortened, but can still be written.

        Raises:
            OSError: see ``with_room``.
        """
        share = cls((_new_file(),))
        share._allocate(nbytes)
        fcntl.fcntl(share.descriptors[0], _F_ADD_SEALS, _FIXED)
        share.is_fixed()
        return share

    def is_fixed(self) -> bool:
        """Return whether it can't be shortened; must be called first on a received share."""
        if not self._are_sealed(_FIXED):
            return False
        # Huge pages can only be mapped whole, beyond the end of the caller's memory.
        if any(os.fstatvfs(each).f_bsize != mmap.PAGESIZE for each in self.descriptors):
            return False
        # Not before: until sealed, the files could still be shortened.
        self._sizes = [os.fstat(each).st_size for each in self.descriptors]
        return True

    def is_final(self) -> bool:
        """Return whether it can't be changed either."""
        return self._are_sealed(_FINAL)

    def _are_sealed(self, seals: int) -> bool:
        try:
            found = [fcntl.fcntl(each, _F_GET_SEALS) for each in self.descriptors]
        except OSError:  # another kind of file
            return False
        return all(each & seals == seals for each in found)

    def close(self) -> None:
        """Close the descriptors; mapped memory remains."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def mapped(self, place: Place, nbytes: int) -> mmap.mmap:
        """Map a member into writable memory private to this process, for as long as it is used.

        Args:
            place: the member's position.
            nbytes: its length, at least 1.

        Raises:
            ValueError: there is no such part.
            OSError: this process can't map it.
        """
        return _mapped(*self._checked(place, nbytes), nbytes, _PROTECTION, mmap.MAP_PRIVATE)

    def common(self, nbytes: int, *, is_own: bool) -> torch.Tensor:
        """Map the first file as shared memory, to which only its creator may write.

        Args:
            nbytes: its length.
            is_own: whether this process created it. Writes by others end in SIGSEGV.

        Raises:
            ValueError: it is shorter.
            OSError: see ``mapped``.
        """
        protection = _PROTECTION if is_own else mmap.PROT_READ
        memory = _mapped(*self._checked((0, 0), nbytes), nbytes, protection, mmap.MAP_SHARED)
        memory.madvise(mmap.MADV_DONTFORK)  # a forked process must not share it
        return torch.frombuffer(memory, dtype=torch.uint8)

    def read_into(self, flat: torch.Tensor, place: Place) -> None:
        """Copy a member into existing memory.

        Args:
            flat: ``uint8`` and contiguous, as long as the member.
            place: the member's position.

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
        """Return the descriptor of a member's file, and its offset there."""
        file, start = place
        if not 0 <= file < len(self.descriptors):
            raise ValueError(f"file {file} of {len(self.descriptors)}")
        if not 0 <= start <= start + nbytes <= self._sizes[file]:
            raise ValueError(f"bytes {start} to {start + nbytes} of {self._sizes[file]}")
        return self.descriptors[file], start


def _mapped(file: int, start: int, nbytes: int, protection: int, flags: int) -> mmap.mmap:
    """Map part of a file; Python's own mmap keeps a descriptor for each mapping."""
    # So map memory without a file first, and then replace it with the file's pages.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = view(memory).data_ptr()
    if _map(address, nbytes, protection, flags | _MAP_FIXED, file, start) == _FAILED:
        number = ctypes.get_errno()
        # The range may be unmapped now, and another allocation could take it.
        nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _map(address, nbytes, _PROTECTION, nothing, -1, 0)
        raise OSError(number, os.strerror(number))
    return memory


def _new_file() -> int:
    if not hasattr(os, "memfd_create"):  # a Python built on an old system
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return os.memfd_create("objcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
