"""The ranks of one host: ``python -m tests.scale.host FOLDER FIRST COUNT SIZE HOST PORT``.

One process imports torch and forks them, because 64 imports take minutes here.
"""

import os
import sys
import traceback
from pathlib import Path

import objcomm
from tests.scale.rank import run


def main(arguments: list[str]) -> None:
    """Fork the ranks, and return once they have ended."""
    folder = Path(arguments[0])
    first, count, size = map(int, arguments[1:4])
    host, port = arguments[4:]
    objcomm.barrier()  # imports everything, and does not wait in a world of one
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, WORLD_SIZE=str(size))
    children = []
    for local, rank in enumerate(range(first, first + count)):
        child = os.fork()
        if not child:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(count))
            try:
                run(folder, rank, size)
            except BaseException:  # noqa: BLE001  # the parent reports it
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(os.WIFEXITED(each) and os.WEXITSTATUS(each) for each in statuses))


if __name__ == "__main__":
    main(sys.argv[1:])
