"""all_to_all: which objects arrive where, their sizes, and how a failure affects all ranks."""

import itertools
import threading
from typing import Any

import pytest
import torch

import objcomm
from objcomm import CollectiveError, UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks, solo
from tests.workers import here

MIB = 1 << 20


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("payload", [None, "x", 3 * MIB], ids=str)
def test_each_rank_gets_one_object_of_every_rank(payload: Any) -> None:
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


@ranks(2, 3, 4)
def test_none_travels_as_a_value() -> None:
    size = objcomm.world_size()
    assert objcomm.all_to_all([None] * size) == [None] * size


@ranks(2, 3, 4)
def test_sizes_may_differ_from_pair_to_pair() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()

    def numel(source: int, destination: int) -> int:
        return 300_000 if (source, destination) == (0, size - 1) else source * 5000 + destination

    got = objcomm.all_to_all([torch.full((numel(rank, peer),), rank) for peer in range(size)])
    for peer, tensor in enumerate(got):
        assert torch.equal(tensor, torch.full((numel(peer, rank),), peer))


@ranks(2)
def test_each_object_travels_at_its_own_size_and_to_its_own_rank_only() -> None:
    rank = objcomm.rank()
    small, large = b"x", bytes(64 * MIB)
    before = objcomm.stats().get("all_to_all")
    got = objcomm.all_to_all([large, large] if rank == 0 else [small, small])
    after = objcomm.stats()["all_to_all"]
    assert len(got[0]) == 64 * MIB
    sent = after.sent_nbytes - (before.sent_nbytes if before else 0)
    extra = sent - (64 * MIB if rank == 0 else 0)
    assert 0 < extra < 10_000


@ranks(2, 3, 4)
def test_received_objects_are_independent_of_the_originals() -> None:
    size = objcomm.world_size()
    shared = torch.ones(50_000)
    got = objcomm.all_to_all([shared] * size)
    rank = objcomm.rank()
    for peer, tensor in enumerate(got):
        assert (tensor is shared) == (peer == rank)
        if peer != rank:
            tensor.zero_()
    objcomm.barrier()
    assert shared.sum() == 50_000


@ranks(2, 3, 4)
def test_a_rank_with_another_number_of_objects_fails_every_rank() -> None:
    size = objcomm.world_size()
    for culprit, length in itertools.product(range(size), (-1, 1)):
        is_wrong = objcomm.rank() == culprit
        objs = [bytes(100_000)] * (size + length if is_wrong else size)
        with pytest.raises(CollectiveError, match="one object for each of") as caught:
            objcomm.all_to_all(objs)
        assert caught.value.operation == "all_to_all"
        assert list(caught.value.failures) == [culprit]
    assert_group_works()


@ranks(2, 3)
def test_an_argument_that_is_not_a_list_fails_every_rank() -> None:
    size = objcomm.world_size()
    wrong: list[Any] = [None, "abcd", 3]
    for objs in wrong:
        with case(objs):
            with pytest.raises(CollectiveError) as caught:
                objcomm.all_to_all(objs if objcomm.rank() == size - 1 else [1] * size)
            assert list(caught.value.failures) == [size - 1]
    assert_group_works()


@ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [1, 3 * MIB])
def test_an_object_that_cannot_be_encoded_fails_every_rank(nbytes: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for culprit in range(size):
        for place in range(size):
            objs: list[Any] = [bytes(nbytes)] * size
            if rank == culprit:
                objs[place] = threading.Lock()
            if place == culprit:
                continue  # an object for its own rank is not sent
            with pytest.raises(CollectiveError) as caught:
                objcomm.all_to_all(objs)
            assert list(caught.value.failures) == [culprit]
    assert_group_works()


@ranks(2, 3)
def test_an_object_for_its_own_rank_is_not_encoded() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    lock = threading.Lock()
    objs: list[Any] = [rank] * size
    objs[rank] = lock
    got = objcomm.all_to_all(objs)
    assert got[rank] is lock
    assert [each for each in got if each is not lock] == [
        peer for peer in range(size) if peer != rank
    ]


@ranks(4)
def test_a_subgroup_exchanges_among_itself() -> None:
    with subgroup(1, 3) as group:
        rank = here().rank
        if rank in {1, 3}:
            got = objcomm.all_to_all([(rank, "to 1"), (rank, "to 3")], group=group)
            assert got == [(1, f"to {rank}"), (3, f"to {rank}")]
    assert_group_works()


@ranks(2, 3, 4)
def test_outstanding_exchanges_may_be_waited_for_in_any_order() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    objs = [[(turn, rank, peer) for peer in range(size)] for turn in range(6)]
    works = [objcomm.all_to_all(each, async_op=True) for each in objs]
    for each in objs:
        each.clear()  # the objects were encoded at the call
    for turn in sorted(range(6), key=lambda turn: (turn * (rank + 1)) % 7):
        assert works[turn].wait() == [(turn, peer, rank) for peer in range(size)]


@ranks(2, 3, 4)
def test_messages_are_signed_for_their_rank() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for nbytes in (1, 200_000):
        with objcomm.configure(key="a secret of this test alone"):
            got = objcomm.all_to_all([bytes([rank, peer]) * nbytes for peer in range(size)])
        assert got == [bytes([peer, rank]) * nbytes for peer in range(size)]


@solo()
def test_a_world_of_one_returns_the_object_itself() -> None:
    mine = object()
    assert objcomm.all_to_all([mine])[0] is mine
    with pytest.raises(UsageError, match="not a list of 0"):
        objcomm.all_to_all([])
    with pytest.raises(UsageError):
        objcomm.all_to_all([1], codec="morse")
