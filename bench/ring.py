"""A ring of chunks in shared memory: how inference engines hand a step to their workers.

Written from a description of vLLM's. One process writes and N read, all on one host. There is no
lock: each chunk has one flag that says whether it is written, and one for each reader that says
whether this reader has read it. A rank that has to wait spins.

The order of the stores is what makes this correct. x86 keeps it, as seen by other processors; a
processor that does not, such as Arm, would need a fence before each flag is set.
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
#: How long one spins, giving way to other processes, before one sleeps between two looks.
SPIN_SECONDS = 10.0
NAP_SECONDS = 0.1
_SIZE = struct.Struct("<Q")  # of the pickle, at the start of a chunk


def block_nbytes(readers: int, chunks: int = CHUNKS, chunk_nbytes: int = CHUNK_NBYTES) -> int:
    """How much memory a ring needs; what no object touches stays unused."""
    return chunks * (1 + readers + chunk_nbytes)


class Ring:
    """One process's place at a ring: it either writes all objects or reads all of them.

    Args:
        block: the memory, of ``block_nbytes``, zeroed before the first use; all the same one.
        readers: how many read.
        chunks: how many objects the writer may be ahead of the slowest reader.
        chunk_nbytes: room for one object and its size.
        spin_seconds: after so long a wait one sleeps between two looks.
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
        """Give an object to all readers, once each has read what the chunk held before.

        Raises:
            ValueError: the pickled object does not fit a chunk. An engine sends it through a
                socket instead; here nothing is written.
        """
        pickled = pickle.dumps(obj, protocol=5)
        room = self._chunk_nbytes - _SIZE.size
        if len(pickled) > room:
            raise ValueError(f"the pickled object has {len(pickled):,} bytes, a chunk {room:,}")
        memory, (written, start) = self._memory, self._next_chunk()
        read = slice(written + 1, written + 1 + len(self._all_read))
        self._wait(lambda: not memory[written] or memory[read] == self._all_read)
        memory[written] = 0  # first, or a reader would take the old object for a new one
        memory[read] = self._none_read
        _SIZE.pack_into(memory, start, len(pickled))
        start += _SIZE.size
        memory[start : start + len(pickled)] = pickled
        memory[written] = 1

    def read(self, reader: int) -> Any:
        """The next object; ``reader`` says which of the readers this is, from 0."""
        memory, (written, start) = self._memory, self._next_chunk()
        mine = written + 1 + reader
        self._wait(lambda: bool(memory[written]) and not memory[mine])
        (nbytes,) = _SIZE.unpack_from(memory, start)
        start += _SIZE.size
        obj = pickle.loads(memory[start : start + nbytes])  # noqa: S301  # a benchmark's own
        memory[mine] = 1
        return obj

    def _next_chunk(self) -> tuple[int, int]:
        """Where the chunk's flags begin, and where its contents do."""
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
