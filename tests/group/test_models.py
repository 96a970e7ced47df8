"""A model's tensors on all ranks: shared, averaged, given their batches; refused if they differ."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import objcomm
from objcomm import CollectiveError, UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works, error_in, subgroup
from tests.ranks import ranks, solo
from tests.same import assert_same

LARGE = 200_000  # elements that travel separately, in several pieces


def assorted(rank: int) -> dict[str, torch.Tensor]:
    """Tensors of every kind that can be changed in place, with different values on each rank."""
    return {
        "small": torch.full((2, 3), float(rank)),
        "leaf": torch.full((3,), float(rank), requires_grad=True),
        "parameter": nn.Parameter(torch.full((LARGE,), float(rank))),
        "half": torch.full((4,), 60000.0 - rank * 32, dtype=torch.float16),
        "bf16": torch.full((LARGE,), 3e38, dtype=torch.bfloat16),
        "double": torch.full((), 0.1 * rank, dtype=torch.float64),
        "complex": torch.full((2,), complex(rank, -rank)),
        "conjugate": torch.full((2,), complex(rank, -rank)).conj(),
        "column": torch.full((5, 4), float(rank))[:, 1],
        "transposed": torch.full((500, 400), float(rank)).t(),
        "empty": torch.empty(0, 3),
        "counter": torch.tensor(100 + rank),
        "mask": torch.tensor([rank == 0, True]),
        "indices": torch.full((LARGE,), rank, dtype=torch.int32),
        "eighths": torch.full((4,), rank + 1).to(torch.float8_e4m3fn),
    }


def expected(size: int, root: int | None) -> dict[str, torch.Tensor]:
    """The values on all ranks afterwards: the root's, or the means if there are any."""
    wanted = assorted(root or 0)
    everyone = [assorted(rank) for rank in range(size)]
    for name, each in wanted.items():
        is_averaged = (each.is_floating_point() or each.is_complex()) and name != "eighths"
        if root is None and is_averaged and size > 1:  # alone, even -0.0 stays
            wide = torch.complex128 if each.is_complex() else torch.float64
            with torch.no_grad():
                each.copy_(torch.stack([mine[name].to(wide) for mine in everyone]).sum(0) / size)
    return wanted


def share(tensors: dict[str, torch.Tensor], root: int | None) -> None:
    """Broadcast from the root, or average if there is none."""
    if root is None:
        objcomm.models.average_tensors(tensors.items())
    else:
        objcomm.models.broadcast_tensors(tensors.values(), root)


@ranks(1, 2, 3, 4)
def test_tensors_of_every_kind_are_shared_and_averaged_in_place() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for root in (*range(size), None):
        mine = assorted(rank)
        kept = {name: (each.data_ptr(), each.stride()) for name, each in mine.items()}
        versions = {name: each._version for name, each in mine.items()}  # noqa: SLF001  # autograd's
        share(mine, root)
        assert_same(mine, expected(size, root))
        for name, each in mine.items():
            assert (each.data_ptr(), each.stride()) == kept[name]
            version = each._version  # noqa: SLF001  # likewise
            assert size == 1 or name == "empty" or version > versions[name], name
            assert each.is_leaf


@ranks(2, 3)
@pytest.mark.parametrize("numel", [3, LARGE])
def test_a_tensor_or_gradient_that_is_given_twice_is_changed_once(numel: int) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    twice = torch.full((numel,), float(rank))
    objcomm.models.average_tensors([twice, torch.ones(2), twice])
    assert bool((twice == (size - 1) / 2).all())
    tied = nn.Parameter(torch.ones(numel))
    if rank == 1:  # the others have no gradient
        tied.grad = torch.full_like(tied, 6.0)
    objcomm.models.sync_gradients([tied, nn.Parameter(torch.ones(numel)), tied])
    assert tied.grad is not None
    assert bool((tied.grad == 6 / size).all())


@ranks(2)
def test_a_name_may_be_any_text() -> None:
    for name in ("a\0b", "a\nb", "", "\ud800"):
        tensor = torch.full((LARGE,), float(objcomm.rank()))
        objcomm.models.average_tensors([(name, tensor)])
        assert bool((tensor == 0.5).all())


@ranks(4)
def test_a_subgroup_has_a_root_and_means_of_its_own() -> None:
    rank, models = objcomm.rank(), objcomm.models
    with subgroup(1, 3) as group:
        if rank in {1, 3}:
            mean, last, first = (torch.tensor([number]) for number in (float(rank), rank, rank))
            models.average_tensors([mean], group=group)
            models.broadcast_tensors([last], 3, group=group)
            models.sync_buffers([first], group=group)
            assert (mean.item(), last.item(), first.item()) == (2, 3, 1)
            assert_group_works(group)
        else:
            with pytest.raises(objcomm.NotInGroupError):
                models.average_tensors([], group=group)


class Network(nn.Module):
    """A small real one, with a buffer of counts and a layer that is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.spare = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)
        self.wide = nn.Linear(10, 40_000, bias=False)

    def forward(self, images: torch.Tensor, *, spare: bool = False) -> Any:
        hidden = self.features(images).mean(dim=(2, 3))
        return self.wide(self.head(self.spare(hidden) if spare else hidden))


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network()


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(17 * step + rank))


def backward(model: nn.Module, rank: int, *, spare: bool = False, step: int = 0) -> None:
    model(batch(rank, step), spare=spare).square().mean().backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name.removeprefix("module."): each.grad for name, each in model.named_parameters()}


def assert_gradients(got: nn.Module, want: nn.Module, *, exactly: bool) -> None:
    wanted, limit = gradients(want), 0.0 if exactly else 1e-6
    for name, gradient in gradients(got).items():
        other = wanted[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, other, rtol=limit, atol=limit / 10)


@ranks(2, 4)
def test_gradients_are_those_of_distributed_data_parallel() -> None:
    rank, size, models = objcomm.rank(), objcomm.world_size(), objcomm.models
    theirs = models.wrap(network(), find_unused_parameters=True)
    assert isinstance(theirs, nn.parallel.DistributedDataParallel)
    backward(theirs, rank)
    # For each way, the block around the backward pass and the call after it.
    ways: dict[str, tuple[Any, Any]] = {
        "gradients": (nullcontext, lambda model: models.sync_gradients(model.named_parameters())),
        "model": (nullcontext, models.sync_model),
        "eager gradients": (lambda model: models.eager_sync_gradients(model.parameters()), None),
        "eager model": (lambda model: models.eager_sync_model(model, average_buffers=False), None),
    }
    for name, (block, after) in ways.items():
        ours = network()
        with case(name):
            with block(ours):
                backward(ours, rank)
            if after:
                after(ours)
            # Gloo adds up in the order of its ring, which is the ranks' for two.
            assert_gradients(ours, theirs, exactly=size == 2)
            mine = gradients(ours)
            for everyone in objcomm.all_gather(mine):
                assert_same(everyone, mine)
            assert mine["spare.weight"] is None  # unused on all ranks


@ranks(2)
def test_gradients_that_only_some_ranks_have_count_as_zeros_elsewhere() -> None:
    rank = objcomm.rank()
    ours, theirs = network(), objcomm.models.wrap(network(), find_unused_parameters=True)
    backward(theirs, rank, spare=rank == 1)
    backward(ours, rank, spare=rank == 1)
    assert (ours.spare.weight.grad is None) == (rank == 0)
    objcomm.models.sync_model(ours, sync_buffers=False)
    assert ours.spare.weight.grad is not None
    assert not ours.spare.weight.grad.is_inference()
    assert_gradients(ours, theirs, exactly=True)
    nn.utils.clip_grad_norm_(ours.parameters(), 1.0)


@ranks(1, 2)
def test_gradients_accumulate_over_several_backward_passes() -> None:
    rank = objcomm.rank()
    ours, theirs = network(), objcomm.models.wrap(network(), find_unused_parameters=True)
    steps = 3
    quiet: Any = getattr(theirs, "no_sync", nullcontext)
    for step in range(steps):
        with quiet() if step < steps - 1 else nullcontext():
            backward(theirs, rank, step=step)
    backward(ours, rank, step=0)
    with objcomm.models.eager_sync_gradients(ours.parameters()):
        backward(ours, rank, step=1)
        backward(ours, rank, step=2)
    assert_gradients(ours, theirs, exactly=True)


@ranks(2)
def test_buffers_are_averaged_or_shared_and_counters_always_shared() -> None:
    rank = objcomm.rank()
    model = network()
    for step in range(rank + 1):
        model(batch(rank, step))
    norm = model.features[1]
    assert isinstance(norm, nn.BatchNorm2d)
    before = objcomm.all_gather(copy.deepcopy(dict(model.named_buffers())))
    objcomm.models.sync_buffers(model.named_buffers())
    for name, each in model.named_buffers():
        first, second = (tensors[name] for tensors in before)
        mean = (first.double() + second.double()) / 2
        assert torch.equal(each, first if "batches" in name else mean.float())
    model(batch(rank))
    objcomm.models.sync_buffers(model.buffers(), average=False)
    last = objcomm.all_gather(dict(model.named_buffers()))
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    other = network(seed=rank)
    objcomm.models.broadcast_model(other, 1)
    for name, each in other.state_dict().items():
        assert torch.equal(each, network(seed=1).state_dict()[name])


@ranks(2)
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.5]),
        ({"average_buffers": False}, [0.0, 0.0]),
        ({"sync_buffers": False}, [0.0, 1.0]),
        ({"sync_buffers": False, "average_buffers": False}, [0.0, 1.0]),
    ],
    ids=["averaged", "the first rank's", "left alone", "left alone twice"],
)
def test_sync_model_averages_or_shares_buffers_or_leaves_them_alone(
    options: dict[str, Any], expected: list[float], *, is_eager: bool
) -> None:
    norm = nn.BatchNorm1d(1)
    means = norm.get_buffer("running_mean").fill_(objcomm.rank())
    if is_eager:
        with objcomm.models.eager_sync_model(norm, **options):
            pass
    else:
        objcomm.models.sync_model(norm, **options)
    assert means.tolist() == [expected[objcomm.rank()]]


@ranks(2)
def test_models_work_with_a_key() -> None:
    with objcomm.configure(key="a secret of this test's"):
        for root in (1, None):
            mine = assorted(objcomm.rank())
            share(mine, root)
            assert_same(mine, expected(2, root))


@ranks(2)
def test_everything_works_in_inference_mode_and_on_its_tensors() -> None:
    with torch.inference_mode():
        inside, outside = (torch.full((n,), float(objcomm.rank())) for n in (LARGE, 2))
        objcomm.models.average_tensors([inside])
        objcomm.models.broadcast_model(nn.Linear(2, 2))
    objcomm.models.average_tensors([outside])
    assert bool((inside == 0.5).all())
    assert outside.tolist() == [0.5, 0.5]


@solo()
def test_without_other_ranks_nothing_changes() -> None:
    assert not dist.is_initialized()
    model = network()
    with objcomm.models.eager_sync_model(model):
        backward(model, 0)
    kept = copy.deepcopy(gradients(model))
    objcomm.models.sync_model(model)
    objcomm.models.sync_gradients(iter(model.parameters()))
    assert_same(gradients(model), kept)
    assert objcomm.models.wrap(model) is model
    with pytest.raises(CollectiveError), objcomm.models.eager_sync_gradients(model.parameters()):
        raise ValueError("as in a group")
    with pytest.raises(CollectiveError):
        objcomm.models.average_tensors([torch.ones(1).expand(3)])


@ranks(1, 2, 3)
def test_loaders_give_out_each_member_once_or_equally_many_to_every_rank() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    dealt = objcomm.all_gather(list(objcomm.loader(range(10), batch_size=None)))
    assert sorted(int(each) for part in dealt for each in part) == list(range(10))
    assert [int(each) for each in dealt[rank]] == list(range(rank, 10, size))
    trained = objcomm.loader(range(10), 2, shuffle=True, drop_last=False)
    orders = []
    for epoch in (0, 0, 1):
        trained.sampler.set_epoch(epoch)
        orders.append([each for batch in trained for each in batch.tolist()])
        numbers: Any = range(10)  # it has a length, as a sampler needs
        reference: Any = torch.utils.data.DistributedSampler(numbers, size, rank)
        reference.set_epoch(epoch)
        assert orders[-1] == list(reference)
    assert orders[0] == orders[1] != orders[2]
    assert len(set(objcomm.all_gather((len(trained), len(trained.sampler))))) == 1
    assert list(objcomm.Shard(0, even=True)) == list(objcomm.Shard(0)) == []
    assert len(objcomm.Shard(1, even=True)) == 1
    assert len(objcomm.loader([1], sampler=None, batch_sampler=None).sampler) == (rank == 0)
    with pytest.raises(UsageError):
        objcomm.loader(iter([1]))
    with pytest.raises(UsageError):
        objcomm.loader([1], sampler=[0])
    with pytest.raises(UsageError):
        objcomm.Shard(-1)


# Models that differ or cannot be changed


#: What a rank gives, by whether it is the one that differs, and the error.
CASES: dict[str, tuple[Callable[[bool], Any], str]] = {
    "none": (
        lambda differs: [] if differs else nn.Linear(3, 2).named_parameters(),
        "number of tensors differs between rank 0 and rank 1: 2; and 0. Rank 1 lacks 'weight'",
    ),
    "fewer": (
        lambda differs: nn.Linear(3, 2, bias=differs).parameters(),
        "differs between rank 0 and rank 1: 1; and 2. Rank 0 lacks tensor 1 (float32",
    ),
    "shape": (
        lambda differs: nn.Linear(3 + differs, 2).named_parameters(),
        "'weight' differs between rank 0 and rank 1: float32 of shape (2, 3)",
    ),
    "dtype": (
        lambda differs: nn.Linear(3, 2, dtype=torch.double if differs else None).parameters(),
        "tensor 0 differs between rank 0 and rank 1: float32 of shape (2, 3), averaged as gradi",
    ),
    "order": (
        lambda differs: list(nn.Linear(2, 2).named_parameters())[:: -1 if differs else 1],
        "tensor 0 differs between rank 0 and rank 1: 'weight' (float32 of shape (2, 2), averag",
    ),
    "tied": (
        lambda differs: [(first := torch.ones(LARGE)), torch.ones(LARGE) if differs else first],
        "averaged as gradients, the same memory as tensor 0; and float32 of shape",
    ),
}


def sync_eagerly(tensors: Any) -> None:
    with objcomm.models.eager_sync_gradients(tensors):
        pass


@ranks(2, 3)
@pytest.mark.parametrize("name", CASES)
def test_other_tensors_are_one_error_on_all_ranks_that_names_the_difference(name: str) -> None:
    make, text = CASES[name]
    tensors: list[Any] = list(make(objcomm.rank() == 1))
    if name == "tied":
        for each in tensors:
            each.grad = each.detach()
    objcomm.reset_stats()
    error = error_in(CollectiveError, lambda: objcomm.models.sync_gradients(tensors))
    assert text in str(error)
    assert list(error.failures) == [1]
    assert objcomm.stats()["sync_gradients"].sent_nbytes < 60_000
    assert_group_works()


@ranks(2)
def test_models_that_differ_are_refused_by_every_function_of_models() -> None:
    mine = nn.Linear(3, 2 + objcomm.rank())
    models: Any = objcomm.models
    differs = r"differs between rank 0 and rank 1"
    for call in (models.sync_model, models.broadcast_model, models.wrap):
        with pytest.raises(CollectiveError, match=f"{differs}: float32"):
            call(mine)
    for call in (models.average_tensors, models.broadcast_tensors, models.sync_buffers):
        with pytest.raises(CollectiveError, match=f"{differs}: float32"):
            call(mine.parameters())
    with pytest.raises(CollectiveError, match=differs), models.eager_sync_model(mine):
        pass
    assert_group_works()


@ranks(2)
@pytest.mark.parametrize("name", ["sync_model", "broadcast_model", "wrap"])
def test_an_argument_that_is_not_a_model_on_one_rank_is_an_error_on_all(name: str) -> None:
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
    yield "not a tensor", 3, "tensor 0 is a int of no layout"
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    yield "freed", freed, "tensor 0 has no memory"
    wide = nn.Parameter(torch.ones(3))
    (wide.grad,) = torch.autograd.grad(wide.sum(), wide)
    yield "expanded gradient", wide, "the gradient of tensor 0 is expanded"


@ranks(2)
def test_a_tensor_that_cannot_be_changed_in_place_is_that_ranks_failure() -> None:
    for name, tensor, text in unusable():
        is_gradient = "sparse" in name or "gradient" in name
        call: Any = objcomm.models.sync_gradients if is_gradient else objcomm.models.average_tensors
        with case(name):
            mine = [tensor] if objcomm.rank() == 1 else [torch.ones(3)]
            error = error_in(CollectiveError, partial(call, mine))
            assert text in str(error)
            assert list(error.failures) == [1]
            assert (error.__cause__ is not None) == (objcomm.rank() == 1)
            assert_group_works()


@ranks(2)
def test_only_a_list_of_tensors_or_of_pairs_is_accepted() -> None:
    parameter = nn.Parameter(torch.ones(2))
    mixed: list[Any] = [("weight", parameter), parameter]
    models: Any = objcomm.models
    for call in (models.average_tensors, models.sync_gradients):
        with pytest.raises(CollectiveError, match="but not both"):
            call(mixed)
    for call in (models.sync_gradients, sync_eagerly):
        with pytest.raises(CollectiveError, match="a list of parameters"):
            call(parameter)
    assert_group_works()


@ranks(2)
def test_wrap_compares_all_parameters_and_which_are_to_be_trained() -> None:
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
    rank, last = objcomm.rank(), objcomm.world_size() - 1
    model = nn.Linear(3, 2)

    def fail_on_last() -> None:
        with objcomm.models.eager_sync_gradients(model.parameters()):
            if where == "after":
                model(torch.ones(1, 3)).sum().backward()
            if rank == last:
                raise ValueError("the batch is broken")
            if where == "collective":
                objcomm.barrier()
            else:
                model(torch.ones(1, 3)).sum().backward()

    error = error_in(CollectiveError, fail_on_last)
    assert list(error.failures) == [last]
    assert error.failures[last].message == "the batch is broken"
    assert error.operation == "eager_sync_gradients"
    assert isinstance(error.__cause__, ValueError) == (rank == last)
    objcomm.models.sync_gradients(model.parameters())
    assert_group_works()


@ranks(2)
def test_the_error_of_an_eager_block_has_the_users_line() -> None:
    call: Any = objcomm.models.sync_gradients if objcomm.rank() == 1 else sync_eagerly
    where = r"eager_sync_gradients \(call \d+\) at \S*test_models\.py"
    with pytest.raises(objcomm.DesyncError, match=where):
        call(nn.Linear(3, 2).parameters())
    assert_group_works()


@ranks(2)
def test_parameters_that_cannot_be_listed_are_an_error_on_all_ranks() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        if objcomm.rank() == 1:
            raise ValueError("half a model")

    models: Any = objcomm.models
    for call in (models.sync_gradients, models.average_tensors, sync_eagerly):
        with pytest.raises(CollectiveError, match="half a model"):
            call(broken())
    assert_group_works()


# torch's out-of-memory errors, for a device and for the CPU.
NO_ROOM: list[BaseException] = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
]


@ranks(2, 3)
def test_a_rank_without_room_for_a_gradient_fails_the_call_before_others_wait() -> None:
    is_failing = objcomm.rank() == 1
    for error, numel in itertools.product(NO_ROOM, (3, LARGE)):
        parameter = nn.Parameter(torch.ones(numel))
        if not is_failing:
            parameter.grad = torch.ones(numel)
        no_room = mock.patch.object(torch, "zeros_like", side_effect=error)
        with case(error, numel), no_room if is_failing else nullcontext():
            kind = type(error) if is_failing else CollectiveError
            with pytest.raises(kind, match="memory") as caught:
                objcomm.models.sync_gradients([parameter])
        if isinstance(caught.value, CollectiveError):
            assert list(caught.value.failures) == [1]
        assert (parameter.grad is None) == is_failing
        assert_group_works()
