"""broadcast, gather, all_gather, scatter, all_to_all and barrier: what arrives on which ranks."""

import datetime
import itertools
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import objcomm
from objcomm import CollectiveError, UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works, error_in
from tests.group.operations import OPERATIONS
from tests.ranks import ranks, solo
from tests.workers import here

CONFIG = {"lr": 1e-3, "layers": [64, 64], "name": "é", "seed": None, "dims": (3, 4)}


@ranks(1, 2, 3, 4)
def test_broadcast_gives_every_rank_the_sources_object() -> None:
    for src in range(objcomm.world_size()):
        mine = {**CONFIG, "from": objcomm.rank()}
        assert objcomm.broadcast(mine, src=src) == {**CONFIG, "from": src}
        assert objcomm.broadcast(mine, group_src=src) == {**CONFIG, "from": src}
    assert objcomm.broadcast(objcomm.rank()) == 0
    place = here()
    assert (objcomm.rank(), objcomm.world_size()) == (place.rank, place.world_size)
    assert (objcomm.is_main(), objcomm.is_initialized()) == (place.rank == 0, True)


@ranks(2, 3)
def test_what_other_ranks_pass_than_the_source_is_ignored() -> None:
    mine: Any = CONFIG if objcomm.rank() == 1 else object
    assert objcomm.broadcast(mine, src=1) == CONFIG
    stale = {"lr": 0.5}
    objcomm.broadcast(CONFIG if objcomm.rank() == 1 else stale, src=1)
    assert stale == {"lr": 0.5}
    chunks = list("abc"[: objcomm.world_size()]) if objcomm.rank() == 1 else ["too", "many"] * 9
    assert objcomm.scatter(chunks, src=1) == "abc"[objcomm.rank()]


@ranks(1, 2, 3, 4)
def test_a_rank_gets_its_own_contribution_as_the_identical_object() -> None:
    size, rank = objcomm.world_size(), objcomm.rank()
    mine = [CONFIG, torch.arange(30_000)]
    for root in range(size):
        assert (objcomm.broadcast(mine, src=root) is mine) == (rank == root)
        gathered = objcomm.gather(mine, dst=root)
        assert gathered is None or gathered[rank] is mine
        chunks = [[root, i] for i in range(size)]
        scattered = objcomm.scatter(chunks, src=root)
        assert (scattered is chunks[rank]) == (rank == root)
        assert scattered == [root, rank]
    assert objcomm.all_gather(mine)[rank] is mine


@ranks(1, 2, 3, 4)
def test_all_gather_lists_by_group_rank_and_flattens_nothing() -> None:
    size, rank = objcomm.world_size(), objcomm.rank()
    want = [{"rank": i, "é": (i, None)} for i in range(size)]
    assert objcomm.all_gather(want[rank]) == want
    objs: list[Any] = [{"a": 1}, [1, 2], (1, 2), "text", b"\0", None, {}, []]
    for obj in objs:
        assert objcomm.all_gather(obj) == [obj] * size
        assert objcomm.gather(obj) in (None, [obj] * size)


def sized(rank: int, nbytes: int) -> bytes:
    """Return bytes that differ by rank and between the two ends."""
    return bytes([rank + 1]) * (nbytes // 2) + bytes([rank + 101]) * (nbytes - nbytes // 2)


@ranks(2, 3, 4)
def test_sizes_may_differ_between_ranks() -> None:
    size, rank = objcomm.world_size(), objcomm.rank()
    for large, nbytes in itertools.product({0, 1, size - 1}, (32_000, 33_000, 65_536, 3_000_001)):
        want = [sized(i, nbytes if i == large else 7 * i) for i in range(size)]
        with case(large, nbytes):
            assert objcomm.all_gather(want[rank]) == want
            for root in range(size):
                assert objcomm.gather(want[rank], dst=root) == (want if rank == root else None)
                assert objcomm.scatter(want if rank == root else None, src=root) == want[rank]


@ranks(2, 4)
@pytest.mark.parametrize("codec", ["pickle", "msgpack"])
def test_every_size_around_the_inline_window_arrives(codec: str) -> None:
    for exponent in (8, 10, 12, 15, 16, 17):
        for nbytes in range(2**exponent - 320, 2**exponent + 64, 64 if exponent > 8 else 16):
            # Codecs add some tens of bytes, so these sizes fall on both sides of every edge.
            mine = sized(objcomm.rank(), max(0, nbytes))
            assert objcomm.broadcast(mine, src=1, codec=codec) == sized(1, max(0, nbytes))


@ranks(1, 2, 3, 4)
def test_a_barrier_releases_no_rank_before_all_have_come(tmp_path: Path) -> None:
    for turn in range(10):
        (tmp_path / f"{turn} {objcomm.rank()}").touch()
        objcomm.barrier("turn" if turn % 2 else "")
        assert len(list(tmp_path.glob(f"{turn} *"))) == objcomm.world_size()
    names: list[Any] = [3, None, b"x"]
    for name in names:
        with case(name), pytest.raises(UsageError):
            objcomm.barrier(name)
    assert_group_works()


@ranks(1, 2)
def test_every_operation_takes_a_timeout_in_seconds_or_as_a_timedelta() -> None:
    for name, operation in OPERATIONS.items():
        with case(name):
            for timeout in (60, 0.5 + 60, datetime.timedelta(seconds=60)):
                operation(1, timeout=timeout)


@ranks(2)
def test_operations_work_whatever_torchs_defaults_are() -> None:
    dtype = torch.get_default_dtype()
    for name, operation in OPERATIONS.items():
        with case(name):
            want = operation(1)
            for context in (torch.inference_mode(), torch.no_grad(), torch.device("meta")):
                with context:
                    assert operation(1) == want
            torch.set_default_dtype(torch.float64)
            try:
                assert operation(1) == want
            finally:
                torch.set_default_dtype(dtype)


@solo()
def test_without_torch_distributed_each_operation_is_that_of_one_rank() -> None:
    mine = [CONFIG]
    assert objcomm.broadcast(mine) is mine
    gathered: Any = objcomm.gather(mine)
    assert gathered == [mine]
    assert gathered[0] is objcomm.all_gather(mine)[0] is mine
    assert objcomm.scatter([mine])[0] is CONFIG
    assert objcomm.all_to_all([mine])[0] is mine
    assert objcomm.reduce(3) == objcomm.all_reduce(3) == 3
    assert objcomm.reduce_and_broadcast(lambda: 2, sum) == 2
    assert objcomm.gather_scalar(2.5) == objcomm.metrics.all_gather_scalar(2.5) == [2.5]
    assert objcomm.ddp_broadcast(mine) is mine
    objcomm.barrier("alone")
    assert (objcomm.rank(), objcomm.world_size(), objcomm.is_main()) == (0, 1, True)
    assert not objcomm.is_initialized()
    assert all(stats.exchanges == 0 for stats in objcomm.stats().values())


#: Variables of launchers of two ranks, and the rank that they name.
LAUNCHED = {
    "torchrun": ({"WORLD_SIZE": "2", "RANK": "1"}, 1),
    "SLURM": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, 0),
    "Open MPI": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, 0),
    "PMI": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 0),
}

#: Variables of a world of one.
LAUNCHED_ALONE = {
    "torchrun": {"WORLD_SIZE": "1", "RANK": "0"},
    "a shell of SLURM": {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
}


@solo()
def test_a_launched_rank_that_has_not_joined_does_not_work_alone() -> None:
    refusal = r"_(NTASKS|SIZE)=2 says that there are other ranks.*init_process_group"
    for launcher, (variables, rank) in LAUNCHED.items():
        with mock.patch.dict(os.environ, variables):
            for name, operation in OPERATIONS.items():
                with case(launcher, name), pytest.raises(UsageError, match=refusal):
                    operation(1)
            assert (objcomm.rank(), objcomm.world_size()) == (rank, 2)
            assert objcomm.is_main() == (rank == 0)
        assert objcomm.world_size() == 1
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "2"}):
        assert (objcomm.rank(), objcomm.world_size()) == (-1, 2)
        with pytest.raises(UsageError, match="is_main: WORLD_SIZE=2 says that there are other"):
            objcomm.is_main()


@solo()
def test_a_launched_world_of_one_works_alone() -> None:
    for launcher, variables in LAUNCHED_ALONE.items():
        with case(launcher), mock.patch.dict(os.environ, variables):
            assert objcomm.all_gather("x") == ["x"]
            assert objcomm.is_main()


MIB = 1 << 20


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("payload", [None, "x", 3 * MIB], ids=str)
def test_all_to_all_gives_each_rank_one_object_of_every_rank(payload: Any) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()

    def given(source: int, destination: int) -> Any:
        if not isinstance(payload, int):
            return (source, destination, payload)
        return bytes([source, destination]) * (payload // 2)

    mine = [given(rank, peer) for peer in range(size)]
    got = objcomm.all_to_all(mine)
    assert got == [given(peer, rank) for peer in range(size)]
    assert got[rank] is mine[rank]
    assert objcomm.all_to_all(tuple(mine)) == got
    assert objcomm.all_to_all([None] * size) == [None] * size


@ranks(2, 3, 4)
def test_sizes_in_all_to_all_may_differ_from_pair_to_pair() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()

    def numel(source: int, destination: int) -> int:
        return 300_000 if (source, destination) == (0, size - 1) else source * 5000 + destination

    got = objcomm.all_to_all([torch.full((numel(rank, peer),), rank) for peer in range(size)])
    for peer, tensor in enumerate(got):
        assert torch.equal(tensor, torch.full((numel(peer, rank),), peer))


@ranks(2)
def test_all_to_all_sends_each_object_at_its_own_size_and_only_to_its_rank() -> None:
    rank = objcomm.rank()
    small, large = b"x", bytes(64 * MIB)
    before = objcomm.stats().get("all_to_all")
    got = objcomm.all_to_all([large, large] if rank == 0 else [small, small])
    after = objcomm.stats()["all_to_all"]
    assert len(got[0]) == 64 * MIB
    sent = after.sent_nbytes - (before.sent_nbytes if before else 0)
    assert 0 < sent - (64 * MIB if rank == 0 else 0) < 10_000


@ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [1, 3 * MIB])
def test_an_object_that_all_to_all_cannot_encode_fails_every_rank(nbytes: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for culprit, place in itertools.product(range(size), repeat=2):
        objs: list[Any] = [bytes(nbytes)] * size
        if rank == culprit:
            objs[place] = threading.Lock()
        if place == culprit:  # an object for its own rank is not encoded
            got = objcomm.all_to_all(objs)
            assert got.pop(rank) is objs[rank]
            assert got == [bytes(nbytes)] * (size - 1)
            continue
        error = error_in(CollectiveError, partial(objcomm.all_to_all, objs))
        assert list(error.failures) == [culprit]
    assert_group_works()


@ranks(2, 3, 4)
def test_several_all_to_alls_may_be_waited_for_in_any_order() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    objs = [[(turn, rank, peer) for peer in range(size)] for turn in range(6)]
    works = [objcomm.all_to_all(each, async_op=True) for each in objs]
    for each in objs:
        each.clear()  # the objects were encoded at the call
    for turn in sorted(range(6), key=lambda turn: (turn * (rank + 1)) % 7):
        assert works[turn].wait() == [(turn, peer, rank) for peer in range(size)]
