"""A ring of chunks in shared memory, with which inference engines send steps to their workers.

Written from a description of vLLM's. One process writes and N processes read, all on one host.
There is no lock: each chunk has one flag that says whether it is written, and one flag for each
reader that says whether that reader has read it. A rank that must wait spins.

Correctness depends on the order of the stores. On x86 other processors see them in order; on a
processor with weaker ordering, such as Arm, a fence would be needed before each flag is set.
"""

import os
import pickle
import struct
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

CHUNKS = 10
CHUNK_NBYTES = 10 << 20
#: How long a waiting process spins, yielding to others, before it sleeps between two checks.
SPIN_SECONDS = 10.0
NAP_SECONDS = 0.1
_SIZE = struct.Struct("<Q")  # the size of the pickle, at the start of a chunk


def block_nbytes(readers: int, chunks: int = CHUNKS, chunk_nbytes: int = CHUNK_NBYTES) -> int:
    """Return the size of a ring; parts that no object touches use no memory."""
    return chunks * (1 + readers + chunk_nbytes)


class Ring:
    """One process's access to a ring: it either writes all objects or reads all of them.

    Args:
        block: the shared memory of ``block_nbytes``, zeroed before the first use.
        readers: number of readers.
        chunks: how many objects the writer may be ahead of the slowest reader.
        chunk_nbytes: the space for one object and its size.
        spin_seconds: how long to spin before sleeping between two checks.
    """

    def __init__(
        self,
        block: SharedMemory,
        readers: int,
        *,
        chunks: int = CHUNKS,
        chunk_nbytes: int = CHUNK_NBYTES,
        spin_seconds: float = SPIN_SECONDS,
    ) -> None:
        if block.buf is None:
            raise ValueError("the block of shared memory is closed")
        self._block, self._memory = block, block.buf
        self._none_read, self._all_read = bytes(readers), b"\x01" * readers
        self._chunks, self._chunk_nbytes = chunks, chunk_nbytes
        self._spin_seconds = spin_seconds
        self._at = 0  # the next chunk to write or to read

    def write(self, obj: Any) -> None:
        """Write an object for all readers, after all have read the chunk's previous object.

        Raises:
            ValueError: the pickled object does not fit into a chunk. An engine would send it
                through a socket; here nothing is written.
        """
        pickled = pickle.dumps(obj, protocol=5)
        room = self._chunk_nbytes - _SIZE.size
        if len(pickled) > room:
            raise ValueError(f"the pickled object has {len(pickled):,} bytes, a chunk {room:,}")
        memory, (written, start) = self._memory, self._next_chunk()
        read = slice(written + 1, written + 1 + len(self._all_read))
        self._wait(lambda: not memory[written] or memory[read] == self._all_read)
        memory[written] = 0  # first, or a reader would read the old object again
        memory[read] = self._none_read
        _SIZE.pack_into(memory, start, len(pickled))
        start += _SIZE.size
        memory[start : start + len(pickled)] = pickled
        memory[written] = 1

    def read(self, reader: int) -> Any:
        """Return the next object; ``reader`` is the index of this reader, from 0."""
        memory, (written, start) = self._memory, self._next_chunk()
        mine = written + 1 + reader
        self._wait(lambda: bool(memory[written]) and not memory[mine])
        (nbytes,) = _SIZE.unpack_from(memory, start)
        start += _SIZE.size
        obj = pickle.loads(memory[start : start + nbytes])  # noqa: S301  # the benchmark's own
        memory[mine] = 1
        return obj

    def _next_chunk(self) -> tuple[int, int]:
        """Return the offsets of the next chunk's flags and contents."""
        at, self._at = self._at, (self._at + 1) % self._chunks
        flags = 1 + len(self._all_read)
        return at * flags, self._chunks * flags + at * self._chunk_nbytes

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        spins_until = time.monotonic() + self._spin_seconds
        while not is_ready():
            if time.monotonic() < spins_until:
                os.sched_yield()
            else:
                time.sleep(NAP_SECONDS)
