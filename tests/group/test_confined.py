"""Where the system refuses resources for links, calls are slower or all ranks report the reason."""

import errno
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import objcomm
from objcomm import TransportError
from tests.confined import MEMFD_CREATE, no_descriptors, refuse
from tests.group.helpers import assert_group_works, error_in, over_tcp, subgroup, tell_all
from tests.group.large_objects import CALLS
from tests.ranks import OVER_GLOO, ranks
from tests.same import assert_same
from tests.workers import here

ROOT = Path(__file__).parents[2]


def carried(*names: str) -> list[tuple[Any, Any]]:
    """Return the results of some operations, each with the expected one."""
    return [CALLS[name](here().rank, here().world_size) for name in names]


@pytest.mark.parametrize("reason", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
@ranks(3, disposable=True)
def test_a_sandbox_may_refuse_memory_to_share(reason: int) -> None:
    """One rank is refused it, both as a sender and as a receiver."""
    if here().rank == 1:
        refuse(MEMFD_CREATE, reason)
        with pytest.raises(OSError, match=os.strerror(reason)):
            os.memfd_create("refused")
    for got, want in carried("broadcast", "all_gather", "scatter"):
        assert_same(got, want, sharing=False)
    assert_group_works()


@pytest.mark.parametrize("rank", [0, 1])
@ranks(2, disposable=True)
def test_a_rank_may_have_no_descriptor_left(rank: int) -> None:
    names = ("broadcast", "all_gather", "sendrecv")
    carried(*names)  # a first call opens descriptors
    with no_descriptors() if here().rank == rank else nullcontext():
        results = carried(*names)
    for got, want in results:
        assert_same(got, want, sharing=False)
    assert_group_works()


@pytest.mark.parametrize("left", [0, 4])
@ranks(2, joined=False)
def test_a_rank_that_can_open_too_few_descriptors_is_named_and_a_new_group_works(left: int) -> None:
    """Neither number is enough for a link; a few more would be. Torch's own files need some too."""
    with over_tcp():
        objcomm.barrier()
        with subgroup(0, 1) as group, no_descriptors(left) if here().rank else nullcontext():
            error = error_in(TransportError, lambda: objcomm.barrier(group=group))
        assert error.peers == (1,)
        assert "could not connect" in error.reason
        with subgroup(0, 1) as group:
            assert_group_works(group)


NO_INTERFACE, NO_DESCRIPTORS = "no such interface", "no descriptors"


@pytest.mark.parametrize("lacking", [NO_INTERFACE, NO_DESCRIPTORS])
@ranks(3, environment=OVER_GLOO)
def test_all_ranks_report_immediately_why_a_rank_cannot_connect(lacking: str) -> None:
    objcomm.barrier()
    group = dist.new_group([0, 1, 2])
    tell_all("the group is there", "")
    if here().rank == 1 and lacking == NO_INTERFACE:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere"
    has_none = here().rank == 1 and lacking == NO_DESCRIPTORS
    with no_descriptors(2) if has_none else nullcontext():  # the store, a file here, needs one
        error = error_in(TransportError, lambda: objcomm.gather("a", group=group))
    assert error.peers == (1,), error
    assert "it could not connect: " in error.reason
    assert {NO_INTERFACE: "nowhere", NO_DESCRIPTORS: "Too many open files"}[lacking] in error.reason
    tell_all("all have heard", "")
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    assert objcomm.all_gather("b", group=group) == ["b"] * 3


@ranks(3)
def test_a_rank_without_a_thread_to_spare_meets_the_others_by_itself() -> None:
    objcomm.barrier()
    group = dist.new_group([0, 1, 2])
    refused = RuntimeError("can't start new thread")
    lacks_a_thread = mock.patch.object(threading.Thread, "start", side_effect=refused)
    with lacks_a_thread if here().rank == 1 else nullcontext():
        assert objcomm.all_gather(here().rank, group=group) == [0, 1, 2]


_HIDDEN = """
import os, sys
from multiprocessing import get_context
import torch, torch.distributed as dist
import objcomm

def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    got = objcomm.broadcast(torch.full((500_000,), 7) if rank == 0 else None)
    told = objcomm.all_gather({"rank": rank, "sum": int(got.sum())})
    assert told == [{"rank": each, "sum": 3_500_000} for each in range(2)], told
    dist.destroy_process_group()

if __name__ == "__main__":
    assert not os.path.exists("/proc/self")
    processes = [get_context("fork").Process(target=work, args=(r, sys.argv[1])) for r in range(2)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    print([each.exitcode for each in processes])
"""


def test_a_sandbox_may_hide_proc(tmp_path: Path) -> None:
    """Without it there is nothing to read about processes, sockets and namespaces."""
    program = tmp_path / "hidden.py"
    program.write_text(_HIDDEN, encoding="utf-8")
    hide = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    run = 'mount -t tmpfs none /proc && exec "$@"'
    done = subprocess.run(
        [*hide, run, "sh", sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,  # only a hang takes this long
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stdout == "[0, 0]\n", done.stderr
