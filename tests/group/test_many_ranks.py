"""More ranks than one hop serves: the routes along trees."""

import threading

import pytest
import torch

import objcomm
from objcomm import CollectiveError
from tests.group.helpers import assert_group_works
from tests.ranks import ranks


@ranks(9, disposable=True, deadline=90)
def test_every_operation_works_on_nine_ranks() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for nbytes in (10, 40_000, 1_000_000):
        for root in (0, 4, 8):
            mine = bytes([rank]) * nbytes
            assert objcomm.broadcast(mine, src=root) == bytes([root]) * nbytes
            gathered = objcomm.gather(mine, dst=root)
            assert gathered in (None, [bytes([i]) * nbytes for i in range(size)])
            chunks = [bytes([i]) * nbytes for i in range(size)]
            assert objcomm.scatter(chunks if rank == root else None, src=root) == mine
            joined = b"".join(bytes([i]) * nbytes for i in range(size))
            assert objcomm.reduce(mine, lambda a, b: a + b, dst=root) in (None, joined)
        assert objcomm.all_reduce(mine, lambda a, b: a + b) == joined
        assert objcomm.all_gather(mine) == chunks
        assert objcomm.all_to_all([bytes([rank, i]) for i in range(size)]) == [
            bytes([i, rank]) for i in range(size)
        ]
        assert objcomm.scan(mine, lambda a, b: a + b) == joined[: (rank + 1) * nbytes]
        before = objcomm.exscan(mine, lambda a, b: a + b)
        assert before == (joined[: rank * nbytes] if rank else None)
        assert objcomm.reduce_scatter(chunks, lambda a, b: a + b) == mine * size
        objcomm.barrier()
    total = objcomm.all_reduce(torch.full((300_000,), rank), "sum")
    assert torch.equal(total, torch.full((300_000,), 36))


@ranks(9, disposable=True, deadline=90)
def test_a_failure_reaches_the_leaves_of_a_tree() -> None:
    for failing in (0, 5, 8):
        mine = threading.Lock() if objcomm.rank() == failing else "fine"
        with pytest.raises(CollectiveError) as caught:
            objcomm.broadcast(mine, src=failing)
        assert list(caught.value.failures) == [failing]
        with pytest.raises(CollectiveError) as caught:
            objcomm.all_reduce(mine, lambda a, _: a)
        assert list(caught.value.failures) == [failing]
    assert_group_works()
