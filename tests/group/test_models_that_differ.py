"""Models whose tensors differ between ranks or cannot be changed: one error on all ranks."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import objcomm
from objcomm import CollectiveError, TransportError, UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works, exit_at_once
from tests.ranks import ranks

LARGE = 200_000  # elements that travel separately, in several pieces


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "none": (
        lambda: nn.Linear(3, 2).named_parameters(),
        list,
        "number of tensors differs between rank 0 and rank 1: 2; and 0. Rank 1 lacks 'weight'",
    ),
    "fewer": (
        lambda: nn.Linear(3, 2, bias=False).parameters(),
        lambda: nn.Linear(3, 2).parameters(),
        "differs between rank 0 and rank 1: 1; and 2. Rank 0 lacks tensor 1 (float32",
    ),
    "shape": (
        lambda: nn.Linear(3, 2).named_parameters(),
        lambda: nn.Linear(4, 2).named_parameters(),
        "'weight' differs between rank 0 and rank 1: float32 of shape (2, 3)",
    ),
    "dtype": (
        lambda: nn.Linear(3, 2).parameters(),
        lambda: nn.Linear(3, 2).double().parameters(),
        "tensor 0 differs between rank 0 and rank 1: float32 of shape (2, 3), averaged as gradi",
    ),
    "order": (
        lambda: list(nn.Linear(2, 2).named_parameters()),
        lambda: list(nn.Linear(2, 2).named_parameters())[::-1],
        "tensor 0 differs between rank 0 and rank 1: 'weight' (float32 of shape (2, 2), averag",
    ),
    "tied": (
        lambda: [torch.ones(LARGE).view(-1)] * 2,
        lambda: [torch.ones(LARGE), torch.ones(LARGE)],
        "averaged as gradients, the same memory as tensor 0; and float32 of shape",
    ),
}


@ranks(2, 3)
def test_other_tensors_are_one_error_on_all_ranks_that_names_the_first_difference() -> None:
    rank = objcomm.rank()
    for name, (first, second, text) in CASES.items():
        objcomm.reset_stats()
        params: list[Any] = list((second if rank == 1 else first)())
        if name == "tied":
            for each in params:
                each.grad = each.detach()
        with case(name):
            with pytest.raises(CollectiveError) as caught:
                objcomm.models.sync_gradients(params)
            assert text in str(caught.value)
            assert list(caught.value.failures) == [1]
            assert objcomm.stats()["sync_gradients"].sent_nbytes < 60_000
            assert_group_works()


@ranks(2)
def test_models_that_differ_are_refused_by_every_function_of_models() -> None:
    mine = nn.Linear(3, 2 + objcomm.rank())
    calls: list[Callable[[], object]] = [
        lambda: objcomm.models.sync_model(mine),
        lambda: objcomm.models.broadcast_model(mine),
        lambda: objcomm.models.wrap(mine),
        lambda: objcomm.models.average_tensors(mine.parameters()),
        lambda: objcomm.models.broadcast_tensors(mine.parameters()),
        lambda: objcomm.models.sync_buffers(mine.parameters()),
        lambda: objcomm.models.eager_sync_model(mine).__enter__(),
    ]
    for call in calls[:-1]:
        with pytest.raises(CollectiveError, match=r"differs between rank 0 and rank 1: float32"):
            call()
    with (
        pytest.raises(CollectiveError, match=r"differs between rank 0 and rank 1"),
        objcomm.models.eager_sync_model(mine),
    ):
        pass
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("name", ["sync_model", "broadcast_model", "wrap"])
def test_what_is_not_a_model_on_one_rank_is_raised_on_all(name: str) -> None:
    model: Any = None if objcomm.rank() == 1 else nn.Linear(3, 2)
    call: Callable[[Any], object] = getattr(objcomm.models, name)
    with pytest.raises(CollectiveError, match="'NoneType' object has no attribute 'named_"):
        call(model)
    assert_group_works()


def unusable() -> Iterator[tuple[str, Any, str]]:
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    yield "sparse", sparse.weight, "the gradient of tensor 0 is a Tensor of torch.sparse_coo"
    yield "expanded", torch.ones(1).expand(3), "expanded: several of its elements share memory"
    yield "meta", torch.ones(3, device="meta"), "is a meta tensor"
    yield "no tensor", 3, "tensor 0 is a int of no layout"
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    yield "freed", freed, "tensor 0 has no memory"
    wide = nn.Parameter(torch.ones(3))
    (wide.grad,) = torch.autograd.grad(wide.sum(), wide)
    yield "expanded gradient", wide, "the gradient of tensor 0 is expanded"


@ranks(2)
def test_what_can_not_be_changed_in_place_is_that_ranks_failure() -> None:
    for name, tensor, text in unusable():
        tensors: list[Any] = [tensor] if objcomm.rank() == 1 else [torch.ones(3)]
        is_gradient = "sparse" in name or "gradient" in name
        call: Any = objcomm.models.sync_gradients if is_gradient else objcomm.models.average_tensors
        with case(name):
            with pytest.raises(CollectiveError, match=text) as caught:
                call(tensors)
            assert list(caught.value.failures) == [1]
            assert (caught.value.__cause__ is not None) == (objcomm.rank() == 1)
            assert_group_works()


@ranks(2)
def test_what_is_no_list_of_tensors_or_of_pairs_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    mixed: list[Any] = [("weight", parameter), parameter]
    for call in (objcomm.models.average_tensors, objcomm.models.sync_gradients):
        with pytest.raises(CollectiveError, match="but not both"):
            call(mixed)
    with pytest.raises(CollectiveError, match="a list of parameters"):
        objcomm.models.sync_gradients(parameter)
    with (
        pytest.raises(CollectiveError, match="a list of parameters"),
        objcomm.models.eager_sync_gradients(parameter),
    ):
        pass
    assert_group_works()


@ranks(2)
def test_wrap_compares_what_is_not_trained_and_what_is() -> None:
    rank = objcomm.rank()
    frozen = nn.Sequential(nn.Linear(2, 3 + rank), nn.Linear(2, 2))
    frozen[0].requires_grad_(requires_grad=False)
    with pytest.raises(CollectiveError, match=r"'0\.weight' differs between rank 0 and rank 1"):
        objcomm.models.wrap(frozen)
    model = nn.Linear(2, 2)
    model.weight.requires_grad = rank == 1
    with pytest.raises(CollectiveError, match=r"'weight \(to be trained\)'"):
        objcomm.models.wrap(model)
    with pytest.raises(UsageError, match="device_ids="):
        objcomm.models.wrap(model, device_ids=None)
    model.weight.requires_grad = False
    assert isinstance(objcomm.models.wrap(model), nn.parallel.DistributedDataParallel)
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("where", ["before", "after", "collective"])
def test_a_failure_in_an_eager_block_is_raised_on_all_ranks(where: str) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    model = nn.Linear(3, 2)

    def body() -> None:
        if where == "after":
            model(torch.ones(1, 3)).sum().backward()
        if rank == size - 1:
            raise ValueError("the batch is broken")
        if where == "collective":
            objcomm.barrier()
        else:
            model(torch.ones(1, 3)).sum().backward()

    with (
        pytest.raises(CollectiveError, match="the batch is broken") as caught,
        objcomm.models.eager_sync_gradients(model.parameters()),
    ):
        body()
    assert list(caught.value.failures) == [size - 1]
    assert caught.value.operation == "eager_sync_gradients"
    assert isinstance(caught.value.__cause__, ValueError) == (rank == size - 1)
    objcomm.models.sync_gradients(model.parameters())
    assert_group_works()


@ranks(2)
def test_an_eager_block_is_where_the_users_line_is() -> None:
    model = nn.Linear(3, 2)
    where = r"eager_sync_gradients \(call \d+\) at \S*test_models_that_differ\.py"

    def call() -> None:
        if objcomm.rank() == 1:
            return objcomm.models.sync_gradients(model.parameters())
        with objcomm.models.eager_sync_gradients(model.parameters()):
            return None

    with pytest.raises(objcomm.DesyncError, match=where):
        call()
    assert_group_works()


@ranks(2)
def test_parameters_that_can_not_be_listed_are_a_failure_like_any_other() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        if objcomm.rank() == 1:
            raise ValueError("half a model")

    for call in (objcomm.models.sync_gradients, objcomm.models.average_tensors):
        with pytest.raises(CollectiveError, match="half a model"):
            call(broken())
    with (
        pytest.raises(CollectiveError, match="half a model"),
        objcomm.models.eager_sync_gradients(broken()),
    ):
        pass
    assert_group_works()


# torch's out-of-memory errors, for a device and for the CPU.
NO_ROOM: list[BaseException] = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
]


@ranks(2, 3)
def test_who_has_no_room_for_a_gradient_says_so_before_others_wait() -> None:
    is_failing = objcomm.rank() == 1
    for error, numel in itertools.product(NO_ROOM, (3, LARGE)):
        parameter = nn.Parameter(torch.ones(numel))
        if not is_failing:
            parameter.grad = torch.ones(numel)
        with case(error, numel), pytest.MonkeyPatch.context() as patch:
            if is_failing:
                patch.setattr(torch, "zeros_like", lambda _: _raise(error))  # noqa: B023  # called immediately
            kind = type(error) if is_failing else CollectiveError
            with pytest.raises(kind, match="memory") as caught:
                objcomm.models.sync_gradients([parameter])
        if isinstance(caught.value, CollectiveError):
            assert list(caught.value.failures) == [1]
        assert (parameter.grad is None) == is_failing
        assert_group_works()


def _raise(error: BaseException) -> NoReturn:
    raise error


@ranks(3, expect_dead={2})
def test_a_rank_that_dies_is_named_by_the_others() -> None:
    tensors = [torch.ones(5_000_000)]
    objcomm.models.average_tensors(tensors)
    if objcomm.rank() == 2:
        exit_at_once()
    with pytest.raises(TransportError, match=r"rank 2"):
        objcomm.models.average_tensors(tensors)
