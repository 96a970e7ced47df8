"""Leaf-by-leaf reductions where ranks differ, fail, die or lie: one error, and no hang."""

import collections
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm import CollectiveError, DesyncError, TransportError, UsageError
from objcomm._collectives.gather import answered
from objcomm._collectives.reduction import leafwise, operators, structures
from tests.cases import case
from tests.group.containers import LARGE, Loss, Stats
from tests.group.helpers import assert_group_works, exit_at_once
from tests.ranks import ranks
from tests.same import assert_same
from tests.workers import here


@ranks(1, 2)
def test_options_that_make_no_sense_are_refused() -> None:
    senseless: list[dict[str, Any]] = [
        {"op": "sum", "dtype": torch.int64},
        {"op": "sum", "dtype": "float32"},
        {"op": "max", "dtype": torch.float64},
        {"op": "sum", "missing": "ignore"},
        {"op": operator.add, "missing": "skip"},
        {"op": "concat", "missing": "skip"},
        {"op": operator.add, "dtype": torch.float64},
    ]
    for options in senseless:
        for call in (objcomm.all_reduce, objcomm.reduce):
            with case(options), pytest.raises(UsageError):
                call([1], **options)
    assert_group_works()


@ranks(2)
def test_ranks_with_other_options_are_out_of_step() -> None:
    missing: Any = "skip" if objcomm.rank() else "error"
    with pytest.raises(DesyncError):
        objcomm.all_reduce([1], missing=missing)
    assert_group_works()


# The last rank's object, the other ranks' object, and the path that the error names.
DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "a key lacks": ({"a": 1}, {"a": 1, "b": 2}, "obj['b']"),
    "a key more": ({"m": {"a": 1, 3: 2}}, {"m": {"a": 1}}, "obj['m'][3]"),
    "a deep member": (
        {"val": [1, 2, Loss(torch.ones(2), [])]},
        {"val": [1, 2, Loss(torch.ones(3), [])]},
        "obj['val'][2].total",
    ),
    "a type of container": ({"a": [1]}, {"a": (1,)}, "obj['a']"),
    "a dict's type": ({"a": {}}, {"a": collections.OrderedDict()}, "obj['a']"),
    "a length": ([1, 2], [1, 2, 3], "obj"),
    "a field of a dataclass": (
        {"s": Stats(1, Loss(1, []))},
        {"s": Stats(1, Loss(torch.ones(1), []))},
        "obj['s'].loss.total",
    ),
    "a dtype": ([torch.ones(2)], [torch.ones(2).double()], "obj[0]"),
    "a large dtype": ([torch.ones(LARGE)], [torch.ones(LARGE).double()], "obj[0]"),
    "a large shape": ([torch.ones(LARGE)], [torch.ones(LARGE - 1)], "obj[0]"),
    "large and small": ([torch.ones(LARGE)], [torch.ones(1)], "obj[0]"),
    "an array's dtype": ([np.ones(2)], [np.ones(2, np.float32)], "obj[0]"),
    "array and tensor": ([torch.ones(2)], [np.ones(2, np.float32)], "obj[0]"),
    "number and tensor": ([torch.tensor(1.0)], [1.0], "obj[0]"),
    "a leaf and a container": ({"a": 1}, {"a": {"b": 1}}, "obj['a']"),
    "a text": ({"name": "x", "n": 1}, {"name": "y", "n": 1}, "obj['name']"),
    "nothing": ({"loss": None}, {"loss": "a"}, "obj['loss']"),
    "the whole": (3, [3], "obj"),
}


@ranks(2, 3)
def test_structures_that_differ_are_one_error_on_all_ranks() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for name, (last, others, path) in DIFFERENCES.items():
        mine = last if rank == size - 1 else others
        objcomm.reset_stats()
        for call in (objcomm.all_reduce, objcomm.reduce):
            with case(name, call.__name__):
                with pytest.raises(CollectiveError) as caught:
                    call(mine, "sum")
                (failure,) = caught.value.failures.values()
                said = f"{path} differs between rank 0 and rank {size - 1}: "
                assert failure.message.startswith(said)
                assert set(objcomm.all_gather(str(caught.value))) == {str(caught.value)}
                received = objcomm.stats()[call.__name__].received_nbytes
                assert received < 200_000, "something large moved"
        assert_group_works()


@ranks(1, 2, 3)
def test_a_leaf_that_cannot_be_combined_is_named() -> None:
    members: list[Any] = [{1}, frozenset(), bytearray(b"a")]
    says = r"obj\['a'\]\[1\]: this named op combines numbers"
    for member in members:
        with case(member), pytest.raises(CollectiveError, match=says):
            objcomm.all_reduce({"a": [1, member]}, "sum")
    assert_group_works()


@ranks(2, 3)
def test_a_leaf_whose_type_has_no_such_operation_is_named() -> None:
    with pytest.raises(CollectiveError, match=r"obj\.name\[0\]: .*unsupported operand"):
        objcomm.all_reduce(Stats(1, Loss(1, []), [slice(3)]), "sum")  # type: ignore[arg-type, call-overload]
    assert_group_works()


@ranks(2, 3)
def test_complex_numbers_have_no_least_one() -> None:
    with pytest.raises(CollectiveError, match=r"obj\['w'\]: complex"):
        objcomm.all_reduce({"w": torch.ones(LARGE, dtype=torch.complex64)}, "min")
    assert_group_works()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("numel", [2, 400_000])
def test_members_that_some_ranks_lack_are_skipped(numel: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    mine: dict[str, Any] = {"all": rank, f"only {rank}": {"w": torch.full((numel,), rank + 1.0)}}
    if rank % 2 == 0:
        mine["even"] = [rank, torch.full((numel,), float(rank)), np.full(numel, float(rank))]
    even = list(range(0, size, 2))
    mean = sum(even) / len(even)
    want = {
        "all": (size - 1) / 2,
        "even": [mean, torch.full((numel,), mean), np.full(numel, mean)],
        **{f"only {i}": {"w": torch.full((numel,), i + 1.0)} for i in range(size)},
    }
    got = objcomm.all_reduce(mine, "mean", missing="skip")
    assert set(got) == set(want)
    assert_same({key: got[key] for key in want}, want, sharing=False)
    assert next(iter(got)) == "all"
    total = objcomm.reduce(mine, "sum", dst=size - 1, missing="skip")
    if rank == size - 1:
        assert total is not None
        assert total["even"][0] == sum(even)
        assert_same(total[f"only {size - 1}"], want[f"only {size - 1}"], sharing=False)
        total[f"only {size - 1}"]["w"].zero_()
    assert bool((mine[f"only {rank}"]["w"] == rank + 1).all())


@ranks(2)
def test_a_class_of_the_users_cannot_be_filled_in() -> None:
    mine = {"a": 1} if objcomm.rank() else {"a": 1, "s": Stats(1, Loss(1, []))}
    with pytest.raises(CollectiveError, match=r"obj\['s'\] differs between rank 0 and rank 1"):
        objcomm.all_reduce(mine, missing="skip")
    assert_group_works()


@ranks(2)
def test_skipping_does_not_excuse_other_shapes() -> None:
    with pytest.raises(CollectiveError, match=r"obj\['a'\]"):
        objcomm.all_reduce({"a": torch.ones(1 + objcomm.rank())}, missing="skip")
    assert_group_works()


class _Dies:
    """Counts the pieces that a rank combines, and ends its process at a given one."""

    def __init__(self, at: int, original: Callable[..., None]) -> None:
        self.left = at
        self.original = original

    def __call__(self, *arguments: Any) -> None:
        if not self.left:
            exit_at_once()
        self.left -= 1
        self.original(*arguments)


@ranks(2, 3, 4, expect_dead=[1])
def test_a_rank_that_dies_in_the_middle_is_named() -> None:
    objcomm.barrier()
    at = {2: 1, 3: 0, 4: 3}[objcomm.world_size()]
    tensor = torch.ones(24 << 20, dtype=torch.uint8).view(torch.float32)
    if here().rank == 1:
        dies = _Dies(at, operators.combine_tensors)
        operators.combine_tensors = dies  # type: ignore[assignment]  # simulates a crash
        objcomm.all_reduce({"w": tensor})
    with pytest.raises(TransportError) as caught:
        objcomm.all_reduce({"w": tensor})
    assert caught.value.peers == (1,)


@ranks(2, 3)
@pytest.mark.parametrize("missing", ["error", "skip"])
def test_a_wrong_answer_harms_no_rank(missing: Any) -> None:
    """Rank 0 sends a wrong answer: nothing is built from it, and the group still works."""

    def lie(call: Any, exchange: Any, mine: Any, decide: Any, hub: int) -> Any:
        def wrong(messages: Any) -> Any:
            decide(messages)
            return None, (1, 2, 3, 4), ((17, (0, 1)),)

        return answered(call, exchange, mine, wrong, hub)

    with pytest.MonkeyPatch.context() as patch:
        if here().rank == 0:
            patch.setattr(leafwise, "answered", lie)  # changes only what is sent
        with pytest.raises(objcomm.ObjcommError):
            objcomm.all_reduce({"a": torch.ones(9000), "b": 1}, "sum", missing=missing)
    assert_group_works()


@ranks(2)
def test_a_leaf_that_a_rank_lacks_is_held_to_its_limit() -> None:
    mine = {"a": torch.ones(9000)} if here().rank == 0 else {}
    with objcomm.configure(max_nbytes=20_000), pytest.raises(objcomm.ObjcommError, match="limit"):
        objcomm.all_reduce(mine, "sum", missing="skip")
    assert_group_works()


@ranks(2, 3)
def test_a_rank_without_memory_for_the_result_fails_every_rank() -> None:
    rank, last = here().rank, objcomm.world_size() - 1
    tensor = torch.ones(LARGE)
    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            patch.setattr(structures, "room_for", lambda *_: torch.empty(2**60))
        kind = RuntimeError if rank == last else CollectiveError
        with pytest.raises(kind, match=r"memory|size") as caught:
            objcomm.all_reduce(tensor)
    if isinstance(caught.value, CollectiveError):
        assert list(caught.value.failures) == [last]
    assert not isinstance(caught.value, TransportError)
    assert bool((objcomm.all_reduce(tensor) == last + 1).all())
