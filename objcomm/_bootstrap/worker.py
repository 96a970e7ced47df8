"""One process of ``launch``: join the ranks, run the function, and report the outcome.

Only ``launch`` starts this, with the job's folder and the process id of its parent.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

from objcomm._bootstrap.init import init, shutdown
from objcomm._codecs.by_value import dumps
from objcomm._wire.failure_message import failure_of
from objcomm.errors import CollectiveError, TransportError, TransportTimeout

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run this rank's part; return its exit status."""
    folder, parent, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
    del sys.argv[1:]
    _end_with(parent)
    with (folder / f"stacks{rank}").open("wb") as stacks:
        # So that ``launch`` can get the stack of a rank that hangs.
        faulthandler.register(signal.SIGUSR1, stacks.fileno(), all_threads=True)
        try:
            _leave(folder / f"result{rank}", dumps(_run(folder)))
        except BaseException as error:  # noqa: BLE001  # all are reported
            failure = failure_of(error, rank)
            summary = (failure.type_name, failure.message, failure.traceback)
            _leave(
                folder / f"failure{rank}",
                json.dumps((is_caused_elsewhere(error), summary)).encode(),
            )
            # Only now that the failure is reported: ranks that wait for this one will fail, too.
            # Inside the handler, calls are not compared: this rank made fewer than the others.
            shutdown()
            return 1
        else:
            shutdown()
            return 0
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def is_caused_elsewhere(error: BaseException) -> bool:
    """Whether a failure was caused by another rank's, and so can't be the first.

    A timeout is this rank's own failure, because the other ranks may only be slow.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, TransportError):
            return not isinstance(at, TransportTimeout)
        if isinstance(at, CollectiveError):
            return at.__cause__ is None
        seen.add(id(at))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return False


def _run(folder: Path) -> Any:
    fn, args, joined, backend = pickle.loads((folder / "order").read_bytes())  # noqa: S301  # our parent's
    try:
        if joined:
            init(backend)
        return fn(*args)
    except SystemExit as ended:
        if ended.code:
            raise
        return None


def _leave(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    # Failures are sorted by modification time; the kernel's is only accurate to milliseconds.
    now = time.time_ns()
    os.utime(unfinished, ns=(now, now))
    unfinished.rename(path)


def _end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends for any reason."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has already ended
        os.kill(os.getpid(), signal.SIGKILL)
