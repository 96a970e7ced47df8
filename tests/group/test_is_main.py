"""Which rank is main: without a world, before joining it, and within a host."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import objcomm
from objcomm import UsageError
from objcomm._training import once
from tests.group.control import ORDERED, SHARES, fail, raised_together
from tests.ranks import ranks, solo
from tests.workers import here


@solo()
def test_without_torch_distributed_all_is_the_same() -> None:
    for name, share in SHARES.items():
        assert share(lambda: 2.0) == 2.0
        raised_together(partial(share, partial(fail, ValueError())), 0, operation=name)
    for name, ordered in ORDERED.items():

        def block(ordered: Callable[..., Any] = ordered) -> None:
            with ordered():
                fail(ValueError())

        raised_together(block, 0, operation=name)
    assert objcomm.rank_prefixed_message("text") == "text"
    assert objcomm.is_main(scope="node")
    with pytest.raises(UsageError, match="pass scope='node'"):
        objcomm.is_main("node")  # type: ignore[arg-type]  # tested on purpose
    with pytest.raises(UsageError, match="neither 'world' nor 'node'"):
        objcomm.is_main(scope="host")  # type: ignore[arg-type]  # tested on purpose


@solo(environment={"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"})
def test_a_job_that_has_not_begun_is_no_world_of_one() -> None:
    for share in SHARES.values():
        with pytest.raises(UsageError, match="says that there are other ranks"):
            share(lambda: 1)
    for block in (
        objcomm.main_first,
        objcomm.node_first,
        once.zero_only,
        once.MainProcessContext,
    ):
        with pytest.raises(UsageError, match="says that there are other ranks"), block():
            pass
    assert not objcomm.is_main(scope="node")


@ranks(2, environment={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
def test_variables_that_are_the_same_on_all_ranks_make_no_second_main() -> None:
    """A launcher started the shell from which the ranks were started by hand."""
    rank = here().rank
    ran: list[int] = []

    def runs() -> int:
        ran.append(rank)
        return rank

    for share in SHARES.values():
        assert share(runs) == 0
    assert ran == [0] * (len(SHARES) if rank == 0 else 0)
    assert objcomm.is_main() == objcomm.is_main(scope="node") == (rank == 0)


@ranks(2, disposable=True)
def test_a_rank_is_first_of_its_host_by_whoever_knows() -> None:
    with pytest.raises(UsageError, match="node_group"):
        objcomm.is_main(scope="node")
    for variable in ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        os.environ[variable] = str(here().rank)
        assert objcomm.is_main(scope="node") == (here().rank == 0)
        del os.environ[variable]
    os.environ["LOCAL_RANK"] = "first"
    with pytest.raises(UsageError, match="LOCAL_RANK='first'"):
        objcomm.is_main(scope="node")
    os.environ["LOCAL_RANK"] = ""
    objcomm.node_group()
    assert objcomm.is_main(scope="node") == (here().rank == 0)
    assert objcomm.rank_prefixed_message("text") == f"[rank: {here().rank}] text"
