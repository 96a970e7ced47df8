"""Programs that do not know about objcomm, for ``test_run_libraries``.

Each trains or measures with a library, on any number of ranks, and writes two lines on each rank:
the result, which must be the same with and without objcomm, and on standard error the milliseconds
that one round of its object collectives took.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    """Append the milliseconds that the block takes."""
    began = time.perf_counter()
    yield
    times.append((time.perf_counter() - began) * 1e3)


def write(result: object, times: list[float]) -> None:
    """Write the two lines of a rank."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stderr.write(f"milliseconds {statistics.median(times):.2f}\n")
