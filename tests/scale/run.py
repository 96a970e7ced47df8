"""Run ``tests.scale.host`` on a number of hosts, and return its ranks' results."""

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.hosts import Hosts, free_port
from tests.scale.rank import Seen, faulty

_MBIT = 200.0
_LIMIT_S = 1500.0
_PAUSE_S = 0.1
_LOG_MAX = 3000  # per host; a fault often affects all of its ranks


class FailedError(Exception):
    """Some ranks did not complete their work."""


def run(folder: Path, hosts: int, ranks: int) -> dict[int, Seen]:
    """Return each rank's results, except those of the killed rank.

    Args:
        folder: a new, empty folder.
        hosts: number of hosts; if several, each has a network card with a limited rate.
        ranks: number of ranks per host.

    Raises:
        FailedError: a rank failed, or did not end.
    """
    size = hosts * ranks
    with contextlib.ExitStack() as running:
        started = list(_started(running, folder, hosts, ranks))
        until = time.monotonic() + _LIMIT_S
        while any(each.poll() is None for each in started):
            if time.monotonic() > until or any(each.poll() for each in started):
                break
            time.sleep(_PAUSE_S)
        for each in started:
            if each.poll() is None:
                os.killpg(each.pid, 9)
                each.wait()
    files = {int(each.suffix[1:]): each for each in folder.glob("seen.*")}
    seen = {rank: pickle.loads(files[rank].read_bytes()) for rank in sorted(files)}  # noqa: S301  # our own
    wanted = set(range(size)) - {faulty(size)["killed"]}
    if set(seen) != wanted:
        logs = "\n".join(each.read_text()[:_LOG_MAX] for each in sorted(folder.glob("log.*")))
        raise FailedError(f"ranks {sorted(wanted - set(seen))} have left nothing\n{logs}")
    return seen


def _started(
    running: contextlib.ExitStack, folder: Path, hosts: int, ranks: int
) -> Iterator[subprocess.Popen[bytes]]:
    network = running.enter_context(Hosts(hosts, mbit=_MBIT)) if hosts > 1 else None
    address = "127.0.0.1" if network is None else network[0].address
    place = [str(ranks), str(hosts * ranks), address, str(free_port())]
    environment = {"OMP_NUM_THREADS": "1"}
    for number in range(hosts):
        argv = [sys.executable, "-m", "tests.scale.host", str(folder), str(number * ranks), *place]
        log = running.enter_context((folder / f"log.{number}").open("wb"))
        if network is None:
            yield subprocess.Popen(
                argv,
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            yield network[number].popen(argv, environment, stdout=log, stderr=subprocess.STDOUT)
