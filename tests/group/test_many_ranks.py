"""More ranks than one hop serves, so routes follow trees."""

import threading
from functools import partial
from typing import Any
from unittest import mock

import torch

import objcomm
from objcomm import CollectiveError, TransportTimeout
from objcomm._failures import inquiry
from tests.group.helpers import assert_group_works, error_in, hear, say, tell_all
from tests.group.watched import patiently
from tests.ranks import ranks
from tests.same import assert_same


def join(left: Any, right: Any) -> Any:
    return left + right


@ranks(9, disposable=True)
def test_every_operation_works_on_nine_ranks_and_its_failures_reach_the_leaves() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for nbytes in (10, 40_000, 1_000_000):
        chunks = [bytes([i]) * nbytes for i in range(size)]
        mine, joined = chunks[rank], b"".join(chunks)
        for root in (0, 4, 8):
            assert objcomm.broadcast(mine, src=root) == bytes([root]) * nbytes
            assert objcomm.gather(mine, dst=root) in (None, chunks)
            assert objcomm.scatter(chunks if rank == root else None, src=root) == mine
            assert objcomm.reduce(mine, join, dst=root) in (None, joined)
        assert objcomm.all_reduce(mine, join) == joined
        assert objcomm.all_gather(mine) == chunks
        arrived = objcomm.all_to_all([bytes([rank, i]) for i in range(size)])
        assert arrived == [bytes([i, rank]) for i in range(size)]
        assert objcomm.scan(mine, join) == joined[: (rank + 1) * nbytes]
        before = objcomm.exscan(mine, join)
        assert before == (joined[: rank * nbytes] if rank else None)
        assert objcomm.reduce_scatter(chunks, join) == mine * size
        objcomm.barrier()
    total = objcomm.all_reduce(torch.full((300_000,), rank), "sum")
    assert torch.equal(total, torch.full((300_000,), 36))
    leaves = objcomm.all_reduce({"w": torch.full((50_000,), float(rank)), "n": 2**70 + rank})
    assert_same(leaves, {"w": torch.full((50_000,), 36.0), "n": 9 * 2**70 + 36})
    check_that_failures_reach_the_leaves()
    check_that_a_limit_names_who_is_missing()  # last: the group carries no more then


def check_that_failures_reach_the_leaves() -> None:
    for failing in (0, 5, 8):
        mine = threading.Lock() if objcomm.rank() == failing else "fine"
        error = error_in(CollectiveError, partial(objcomm.broadcast, mine, src=failing))
        assert list(error.failures) == [failing]
        error = error_in(CollectiveError, partial(objcomm.all_reduce, mine, join))
        assert list(error.failures) == [failing]
    error = error_in(CollectiveError, lambda: objcomm.all_gather(threading.Lock()))
    assert list(error.failures) == list(range(9))
    assert str(error).startswith("all_gather failed on ranks 0-8: objcomm.EncodeError: ")
    assert_group_works()


def check_that_a_limit_names_who_is_missing() -> None:
    """The timeout passes on all ranks at the same time, and one asks where the others are."""
    ask = inquiry.expire

    def ask_when_all_wait(*given: Any) -> None:
        """A rank that arrived after another's timeout would be missing as well."""
        say(f"rank {objcomm.rank()} waits")
        for rank in {*range(9)} - {7}:
            hear(f"rank {rank} waits")
        ask(*given)

    if objcomm.rank() != 7:
        with patiently(), mock.patch.object(inquiry, "expire", ask_when_all_wait):
            error = error_in(TransportTimeout, lambda: objcomm.barrier("the last", timeout=1))
        assert (error.missing, error.silent) == ((7,), ())
        assert sorted(error.positions) == list(range(9))
        assert "; ranks 0-6, 8 are in barrier 'the last' (call " in str(error)
        assert "; rank 7 is in no call, now at " in str(error)
        assert "helpers.py:" in error.positions[7].line
    tell_all("over", "")
