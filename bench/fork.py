"""Ranks that are forked from one process, which has imported what they need.

On two cores 64 imports of torch take minutes. Like torchrun's agent that process hosts the store in
which the ranks meet. Knows nothing of plans or of what the ranks do.
"""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_HOST = "127.0.0.1"


def run_forked(size: int, body: Callable[[int, dist.Store], None], timeout: timedelta) -> None:
    """Run ``body`` on every rank; return when all have returned from it.

    To be called before this process has any threads.

    Args:
        size: number of ranks.
        body: gets the rank, and its connection to the store.
        timeout: of the store's.

    Raises:
        RuntimeError: a rank raised, or its process ended; the others were ended with it.
    """
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        listener.listen(size)
        port = listener.getsockname()[1]
        processes: dict[int, int] = {}
        for rank in range(size):
            process = os.fork()
            if process == 0:
                listener.close()
                _be_a_rank(rank, port, body, timeout)
            processes[process] = rank
        # Its thread begins when all ranks are forked.
        store = dist.TCPStore(
            _HOST,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    try:
        while processes:
            process, status = os.wait()
            rank = processes.pop(process)
            if status:
                code = os.waitstatus_to_exitcode(status)
                raise RuntimeError(f"rank {rank} failed; exit status {code}")
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
        for process in processes:
            os.waitpid(process, 0)
        del store


def _be_a_rank(
    rank: int, port: int, body: Callable[[int, dist.Store], None], timeout: timedelta
) -> None:
    """Never returns: what called ``run_forked`` goes on in the first process alone."""
    status = 1
    try:
        body(rank, dist.TCPStore(_HOST, port, timeout=timeout, wait_for_workers=False))
        status = 0
    except BaseException:  # noqa: BLE001  # this process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
