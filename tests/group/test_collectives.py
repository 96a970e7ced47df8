"""broadcast, gather, all_gather, scatter and barrier: which results arrive on which ranks."""

import datetime
import itertools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import objcomm
from objcomm import UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works
from tests.group.operations import OBJECT_OPERATIONS, OPERATIONS, ROOTED
from tests.ranks import ranks, solo
from tests.workers import here

CONFIG = {"lr": 1e-3, "layers": [64, 64], "name": "é", "seed": None, "dims": (3, 4)}


@ranks(1, 2, 3, 4)
def test_broadcast_gives_every_rank_the_sources_object() -> None:
    for src in range(objcomm.world_size()):
        mine = {**CONFIG, "from": objcomm.rank()}
        assert objcomm.broadcast(mine, src=src) == {**CONFIG, "from": src}
        assert objcomm.broadcast(mine, group_src=src) == {**CONFIG, "from": src}


@ranks(1, 2, 3, 4)
def test_broadcast_defaults_to_the_first_rank() -> None:
    assert objcomm.broadcast(objcomm.rank()) == 0


@ranks(2, 3)
def test_broadcast_ignores_what_other_ranks_pass() -> None:
    mine: Any = CONFIG if objcomm.rank() == 1 else object
    assert objcomm.broadcast(mine, src=1) == CONFIG
    stale = {"lr": 0.5}
    objcomm.broadcast(CONFIG if objcomm.rank() == 1 else stale, src=1)
    assert stale == {"lr": 0.5}


@ranks(1, 2, 3, 4)
def test_a_contribution_comes_back_as_the_identical_object() -> None:
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
def test_gather_lists_by_group_rank_on_the_destination_only() -> None:
    size, rank = objcomm.world_size(), objcomm.rank()
    for root in range(size):
        want = [f"from {i}" for i in range(size)] if rank == root else None
        assert objcomm.gather(f"from {rank}", dst=root) == want
        assert objcomm.gather(f"from {rank}", group_dst=root) == want
    assert (objcomm.gather(rank) is None) == (rank != 0)


@ranks(1, 2, 3, 4)
def test_all_gather_lists_by_group_rank_everywhere() -> None:
    want = [{"rank": i, "é": (i, None)} for i in range(objcomm.world_size())]
    assert objcomm.all_gather(want[objcomm.rank()]) == want


@ranks(1, 2, 3, 4)
def test_nothing_is_flattened() -> None:
    size = objcomm.world_size()
    objs: list[Any] = [{"a": 1}, [1, 2], (1, 2), "text", b"\0", None, {}, []]
    for obj in objs:
        assert objcomm.all_gather(obj) == [obj] * size
        assert objcomm.gather(obj) in (None, [obj] * size)


@ranks(2, 3, 4)
def test_each_rank_may_send_another_type() -> None:
    objs = [None, {"a": torch.arange(3)}, "é" * 70_000, 2**70]
    for got, want in zip(objcomm.all_gather(objs[objcomm.rank()]), objs, strict=False):
        assert repr(got) == repr(want)


def total(parts: list[int]) -> int:
    return sum(parts)


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
def test_scatter_gives_each_rank_its_element() -> None:
    size, rank = objcomm.world_size(), objcomm.rank()
    for root in range(size):
        chunks: Any = [{"for": i, "data": sized(i, 50_000 * i)} for i in range(size)]
        assert objcomm.scatter(chunks if rank == root else None, src=root) == chunks[rank]
        assert objcomm.scatter(tuple(chunks), group_src=root) == chunks[rank]


@ranks(1, 2, 3)
def test_scatter_takes_whatever_has_a_length_and_an_index() -> None:
    size, rank = objcomm.world_size(), objcomm.rank()
    kinds: list[Any] = [
        torch.arange(size * 2).view(size, 2),
        np.arange(size * 2).reshape(size, 2),
        [range(2 * i, 2 * i + 2) for i in range(size)],
    ]
    for rows in kinds:
        row: Any = objcomm.scatter(rows if rank == size - 1 else None, src=size - 1)
        assert list(row) == [2 * rank, 2 * rank + 1]
        assert_group_works()


@ranks(2, 3)
def test_scatter_ignores_what_other_ranks_pass() -> None:
    mine = list("abc"[: objcomm.world_size()]) if objcomm.rank() == 1 else ["too", "many"] * 9
    assert objcomm.scatter(mine, src=1) == "abc"[objcomm.rank()]


@ranks(1, 2, 3, 4)
def test_barrier_releases_nobody_before_all_have_come(tmp_path: Path) -> None:
    for turn in range(10):
        (tmp_path / f"{turn} {objcomm.rank()}").touch()
        objcomm.barrier("turn" if turn % 2 else "")
        assert len(list(tmp_path.glob(f"{turn} *"))) == objcomm.world_size()


@ranks(1, 2)
def test_a_barriers_name_is_text() -> None:
    names: list[Any] = [3, None, b"x"]
    for name in names:
        with pytest.raises(UsageError):
            objcomm.barrier(name)
        assert_group_works()


@ranks(1, 3)
def test_rank_and_size_are_the_groups() -> None:
    place = here()
    assert (objcomm.rank(), objcomm.world_size()) == (place.rank, place.world_size)
    assert objcomm.is_initialized()
    assert objcomm.is_main() == (place.rank == 0)


@ranks(1, 2)
def test_a_root_that_cannot_be_is_refused_before_any_traffic() -> None:
    for name, argument in ROOTED.items():
        wrong: list[dict[str, Any]] = [
            {argument: objcomm.world_size()},
            {argument: -1},
            {argument: 0, f"group_{argument}": 0},
            {argument: "0"},
        ]
        for root in wrong:
            with case(name, root):
                objcomm.reset_stats()
                with pytest.raises(UsageError):
                    OPERATIONS[name](1, **root)
                assert all(stats.exchanges == 0 for stats in objcomm.stats().values())
        assert_group_works()


@ranks(1, 2)
def test_an_unknown_codec_is_refused_before_any_traffic() -> None:
    for name in OBJECT_OPERATIONS:
        with case(name), pytest.raises(UsageError, match="morse"):
            OPERATIONS[name](1, codec="morse")
        assert_group_works()


@ranks(1, 2)
def test_every_operation_takes_a_timeout_in_both_spellings() -> None:
    for name, operation in OPERATIONS.items():
        with case(name):
            for timeout in (60, 0.5 + 60, datetime.timedelta(seconds=60)):
                operation(1, timeout=timeout)
            with pytest.raises(UsageError):
                operation(1, timeout=-1)
            assert_group_works()


@ranks(2)
def test_operations_work_whatever_torchs_defaults_are() -> None:
    for name, operation in OPERATIONS.items():
        with case(name):
            for context in (torch.inference_mode(), torch.no_grad(), torch.device("meta")):
                with context:
                    want = operation(1)
                assert operation(1) == want
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                assert operation(1) == want
            finally:
                torch.set_default_dtype(before)


@ranks(2, 4)
def test_many_operations_in_a_row_stay_in_step() -> None:
    size, rank = objcomm.world_size(), objcomm.rank()
    for turn in range(50):
        root = turn % size
        assert objcomm.broadcast((turn, rank), src=root) == (turn, root)
        assert objcomm.gather(turn, dst=root) == ([turn] * size if rank == root else None)
        assert objcomm.scatter([turn + i for i in range(size)], src=root) == turn + rank
        objcomm.barrier()
        assert objcomm.all_reduce(rank) == sum(range(size))


@solo()
def test_without_torch_distributed_every_operation_is_that_of_one_rank() -> None:
    mine = [CONFIG]
    assert objcomm.broadcast(mine) is mine
    gathered = objcomm.gather(mine)
    assert gathered == [mine]
    assert gathered is not None
    assert gathered[0] is mine
    assert objcomm.all_gather(mine)[0] is mine
    assert objcomm.scatter([mine])[0] is CONFIG
    assert objcomm.reduce(3) == objcomm.all_reduce(3) == 3
    assert objcomm.reduce_and_broadcast(lambda: 2, total) == 2
    assert objcomm.gather_scalar(2.5) == objcomm.metrics.all_gather_scalar(2.5) == [2.5]
    assert objcomm.ddp_broadcast(mine) is mine
    objcomm.barrier("alone")
    assert (objcomm.rank(), objcomm.world_size(), objcomm.is_main()) == (0, 1, True)
    assert not objcomm.is_initialized()
    assert all(stats.exchanges == 0 for stats in objcomm.stats().values())


@solo(environment={"WORLD_SIZE": "2", "RANK": "1"})
def test_a_launched_but_uninitialized_rank_is_not_quietly_alone() -> None:
    for name, operation in OPERATIONS.items():
        assert (objcomm.rank(), objcomm.world_size(), objcomm.is_main()) == (1, 2, False)
        with case(name), pytest.raises(UsageError, match="init_process_group"):
            operation(1)


LAUNCHED = {
    "SLURM": {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    "PMI": {"PMI_RANK": "0", "PMI_SIZE": "2"},
}


@solo()
def test_every_launchers_ranks_are_not_quietly_alone() -> None:
    for launcher, variables in LAUNCHED.items():
        with case(launcher), mock.patch.dict(os.environ, variables):
            with pytest.raises(
                UsageError, match=r"_(NTASKS|SIZE)=2 says that there are other ranks"
            ):
                objcomm.all_gather(1)
            assert (objcomm.rank(), objcomm.world_size(), objcomm.is_main()) == (0, 2, True)
        assert objcomm.world_size() == 1


@solo(environment={"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"})
def test_a_shell_in_an_allocation_is_a_world_of_one() -> None:
    assert objcomm.all_gather(1) == [1]
    assert objcomm.is_main()


@solo(environment={"WORLD_SIZE": "2"})
def test_nobody_is_main_before_a_rank_is_known() -> None:
    assert (objcomm.rank(), objcomm.world_size()) == (-1, 2)
    with pytest.raises(UsageError, match="is_main: WORLD_SIZE=2 says that there are other ranks"):
        objcomm.is_main()


@solo(environment={"WORLD_SIZE": "1", "RANK": "0"})
def test_a_launched_world_of_one_needs_no_initialisation() -> None:
    assert objcomm.all_gather("x") == ["x"]
