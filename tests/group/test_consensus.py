"""agree, any_rank, all_ranks and shared_seed."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm import CollectiveError, UsageError
from tests.cases import case
from tests.group.helpers import RefusesToPickle, assert_group_works, error_in, subgroup
from tests.ranks import ranks

VALUES: dict[str, Any] = {
    "a config": {"lr": 0.1, "layers": (64, 10), "nan": math.nan},
    "tensors": {"w": torch.tensor([1, math.nan]), "n": [torch.arange(50_000)]},
    "arrays": [np.array([1.0, np.nan]), np.float32(0.1)],
    "None": None,
}


@ranks(1, 2, 4)
def test_a_value_that_all_ranks_have_is_returned() -> None:
    for name, value in VALUES.items():
        assert objcomm.agree(value) is value, name
    assert objcomm.stats()["agree"].calls >= len(VALUES)


@ranks(2, 3)
def test_large_values_are_sent_only_where_their_bytes_differ() -> None:
    rank = objcomm.rank()
    large: dict[str, Any] = {
        "w": torch.arange(300_000),
        "n": np.arange(300_000),
        "text": "x" * 1_000_000,
    }
    objcomm.reset_stats()
    assert objcomm.agree(large) is large
    assert objcomm.stats()["agree"].sent_nbytes < 10_000
    turned = dict(reversed(large.items())) if rank == 1 else large
    assert objcomm.agree(turned) is turned  # equal despite its order
    assert rank == 0 or objcomm.stats()["agree"].sent_nbytes > 1_000_000
    large["w"][-1] += rank == 1
    with pytest.raises(CollectiveError, match=r"value\['w'\]"):
        objcomm.agree(large)
    assert_group_works()


@ranks(2, 4)
def test_a_rank_that_has_a_different_value_is_named_on_all_ranks() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for name, mine, yours, text in (
        ("number", {"lr": 0.1}, {"lr": 0.2}, "value['lr']: 0.2"),
        ("type", 1, True, "True (bool)"),
        ("tensor", torch.ones(2), torch.zeros(2), "a tensor of torch.float32 (2,)"),
        ("nan", torch.ones(1), torch.tensor([math.nan]), "tensor([nan])"),
        ("array", np.ones(2), np.zeros(2), "array([0., 0.])"),
        ("keys", {"a": 1}, {"b": 1}, "also 'b'"),
    ):
        with case(name):
            call = partial(objcomm.agree, yours if rank == 1 else mine)
            error = error_in(CollectiveError, call)
            assert list(error.failures) == [1]
            assert text in error.failures[1].message
            assert "on rank 1" in error.failures[1].message
            assert ("rank 0" if size == 2 else "ranks 0, 2-3") in error.failures[1].message
            assert error.failures[1].type_name.endswith("UsageError")
            assert str(error).startswith("agree failed on rank 1: ")
            assert "Traceback" not in str(error)
            assert "\n\nCall of rank " in str(error)
    assert_group_works()


@ranks(4)
def test_the_value_of_most_ranks_is_the_one_that_counts() -> None:
    error = error_in(CollectiveError, lambda: objcomm.agree([1, 2, 2, 3][objcomm.rank()]))
    assert list(error.failures) == [0, 3]
    assert error.failures[3].message == "value: 3 on rank 3, 2 on ranks 1-2"
    with subgroup(1, 3) as group:
        if objcomm.rank() in (1, 3):
            assert objcomm.agree("same", group=group) == "same"
            error = error_in(CollectiveError, lambda: objcomm.agree(objcomm.rank(), group=group))
            assert error.failures[1].message == "value: 3 on rank 1, 1 on rank 0"
            assert objcomm.any_rank(objcomm.rank() == 3, group=group)
            assert not objcomm.all_ranks(objcomm.rank() == 3, group=group)
            assert_group_works(group)
        else:
            with pytest.raises(objcomm.NotInGroupError):
                objcomm.agree(1, group=group)


@ranks(1, 2)
def test_a_value_that_cannot_be_sent_or_has_no_truth_value_fails_on_all() -> None:
    last = objcomm.world_size() - 1
    is_last = objcomm.rank() == last
    unsound = torch.ones(2)
    calls: list[Any] = [
        lambda: objcomm.any_rank(unsound if is_last else False),
        lambda: objcomm.all_ranks(unsound if is_last else True),
    ]
    if last:
        calls.append(lambda: objcomm.agree(RefusesToPickle(LookupError("no")) if is_last else 1))
    for call in calls:
        error = error_in(CollectiveError, call)
        assert list(error.failures) == [last]
        assert (error.__cause__ is not None) == is_last
    assert_group_works()


@ranks(1, 2, 4)
def test_flags_of_all_ranks_become_one_answer() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for one in range(size):
        assert objcomm.any_rank(rank == one) is True
        assert objcomm.all_ranks(rank == one) is (size == 1)
        assert objcomm.all_ranks(rank != one) is False
    assert objcomm.any_rank(flag=np.bool_(0)) is False
    assert objcomm.all_ranks(torch.tensor(1)) is True
    seed = objcomm.shared_seed()
    assert objcomm.all_gather(seed) == [seed] * size
    assert 0 <= seed < 2**32
    state = torch.random.get_rng_state()
    assert objcomm.shared_seed() != seed
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(UsageError):
        objcomm.shared_seed(timeout=-1)
    assert_group_works()
