"""Fork ranks from one process that has already imported the modules they need.

On two cores, 64 imports of torch take minutes. Like torchrun's agent, the process hosts the store
in which the ranks meet. Does not know about plans or what the ranks do.
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
    """Run ``body`` on every rank, and return when it has returned on all.

    Call this before this process has any threads.

    Args:
        size: number of ranks.
        body: called with the rank and its connection to the store.
        timeout: the store's timeout.

    Raises:
        RuntimeError: a rank raised, or its process ended; the other ranks have then been ended.
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
        # Created after all forks, because it starts a thread.
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
    """Run one rank and exit: only the first process may return to the caller of ``run_forked``."""
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
