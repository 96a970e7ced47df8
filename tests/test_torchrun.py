"""Beyond starting ranks, torchrun restarts them when one has died."""

import sys
from pathlib import Path

import pytest

from tests.doctor.job import LIMIT_S, by_command
from tests.hosts import free_port

_PROGRAM = """
import os
import signal
import sys
import objcomm

objcomm.init(timeout=float(sys.argv[1]))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank = objcomm.rank()
group = objcomm.split(0)
assert objcomm.all_gather(rank, group=group) == [0, 1, 2]
assert objcomm.sendrecv(rank, (rank + 1) % 3, (rank - 1) % 3) == (rank - 1) % 3
if attempt == 0 and rank == 1:
    os._exit(3)
if attempt == 0:
    try:
        objcomm.barrier()
    except objcomm.TransportError:
        if rank == 0:
            objcomm.survivors()  # waits for rank 2
    signal.pause()  # torchrun ends this rank
assert objcomm.world_size(objcomm.survivors()) == 3
attempts = objcomm.all_gather((attempt, rank))
objcomm.barrier(group=group)
sys.stdout.write(f"{attempts}\\n")  # in one piece: three ranks write
sys.stdout.flush()
objcomm.shutdown()
"""


@pytest.mark.long
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_ranks_that_torchrun_starts_again_begin_anew(rendezvous: str, tmp_path: Path) -> None:
    """The store outlives the ranks, and keeps what the first ones left in it."""
    program = tmp_path / "train.py"
    program.write_text(_PROGRAM)
    meeting = f"--master-port={free_port()}" if rendezvous == "static" else "--standalone"
    command = [sys.executable, "-m", "torch.distributed.run", meeting, "--nproc-per-node=3"]
    done = by_command([*command, "--max-restarts=1", str(program), str(LIMIT_S)])
    assert done.status == 0, done.err
    assert "forcefully" not in done.err  # SIGTERM has ended each of them, also in survivors
    # The results are the second attempt's. torch reports one rank of the first attempt, not always
    # the one that ended first.
    assert done.out.splitlines() == ["[(1, 0), (1, 1), (1, 2)]"] * 3
