"""A model's tensors on all ranks: shared, averaged, and dealt their batches."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import objcomm
from objcomm import CollectiveError, UsageError
from tests.cases import case
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks, solo
from tests.same import assert_same

LARGE = 200_000  # elements that travel separately, in several pieces


def assorted(rank: int) -> dict[str, torch.Tensor]:
    """Tensors of every kind that can be changed in place, with different values on each rank."""
    leaf = torch.full((3,), float(rank), requires_grad=True)
    return {
        "small": torch.full((2, 3), float(rank)),
        "leaf": leaf,
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
    of_root = assorted(root or 0)
    if root is not None:
        return of_root
    everyone = [assorted(rank) for rank in range(size)]
    means = {}
    for name, each in of_root.items():
        is_averaged = (each.is_floating_point() or each.is_complex()) and name != "eighths"
        wide = torch.complex128 if each.is_complex() else torch.float64
        total = torch.stack([tensors[name].detach().to(wide) for tensors in everyone]).sum(0)
        means[name] = (total / size).to(each.dtype) if is_averaged else each
    return means


def assert_same_tensors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, each in got.items():
        wanted = want[name]
        assert each.dtype == wanted.dtype
        if each.dtype is torch.float8_e4m3fn:  # which torch can't compare
            assert torch.equal(each.float(), wanted.float())
        else:
            assert torch.equal(each.detach(), wanted.detach()), name


@ranks(1, 2, 3, 4)
def test_tensors_of_every_kind_are_shared_and_averaged_in_place() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for root in (*range(size), None):
        mine = assorted(rank)
        kept = {name: (each.data_ptr(), each.stride()) for name, each in mine.items()}
        versions = {name: each._version for name, each in mine.items()}  # noqa: SLF001  # autograd's
        if root is None:
            objcomm.models.average_tensors(mine.items())
        else:
            objcomm.models.broadcast_tensors(mine.values(), root)
        assert_same_tensors(mine, expected(size, root))
        for name, each in mine.items():
            assert (each.data_ptr(), each.stride()) == kept[name]
            version = each._version  # noqa: SLF001  # likewise
            assert size == 1 or name == "empty" or version > versions[name], name
            assert each.requires_grad == (name in {"leaf", "parameter"})
            assert each.is_leaf


@ranks(2)
def test_a_tensor_that_is_given_twice_is_changed_once() -> None:
    for numel in (3, LARGE):
        twice = torch.full((numel,), float(objcomm.rank()))
        objcomm.models.average_tensors([twice, torch.ones(2), twice])
        assert bool((twice == 0.5).all())


@ranks(2, 3)
def test_a_gradient_that_is_given_twice_may_be_lacking_on_some_ranks() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    for numel in (3, LARGE):
        tied = nn.Parameter(torch.ones(numel))
        if rank == 1:
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
    rank = objcomm.rank()
    with subgroup(1, 3) as group:
        if rank in {1, 3}:
            tensor = torch.tensor([float(rank)])
            objcomm.models.average_tensors([tensor], group=group)
            assert tensor.item() == 2
            numbers = torch.tensor([rank])
            objcomm.models.broadcast_tensors([numbers], 3, group=group)
            assert numbers.item() == 3
            numbers = torch.tensor([rank])
            objcomm.models.sync_buffers([numbers], group=group)
            assert numbers.item() == 1
            assert_group_works(group)
        else:
            with pytest.raises(objcomm.NotInGroupError):
                objcomm.models.average_tensors([], group=group)


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
    wanted = gradients(want)
    for name, gradient in gradients(got).items():
        other = wanted[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            limit = 0.0 if exactly else 1e-6
            torch.testing.assert_close(gradient, other, rtol=limit, atol=limit / 10)


@ranks(2, 4)
def test_gradients_are_those_of_distributed_data_parallel() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    theirs = objcomm.models.wrap(network(), find_unused_parameters=True)
    assert isinstance(theirs, nn.parallel.DistributedDataParallel)
    backward(theirs, rank)

    def after(ours: nn.Module) -> None:
        backward(ours, rank)
        objcomm.models.sync_gradients(ours.named_parameters())

    def eagerly(ours: nn.Module) -> None:
        with objcomm.models.eager_sync_gradients(ours.parameters()):
            backward(ours, rank)

    def of_a_model(ours: nn.Module) -> None:
        backward(ours, rank)
        objcomm.models.sync_model(ours)

    def of_a_model_eagerly(ours: nn.Module) -> None:
        with objcomm.models.eager_sync_model(ours, average_buffers=False):
            backward(ours, rank)

    for way in (after, eagerly, of_a_model, of_a_model_eagerly):
        ours = network()
        with case(way.__name__):
            way(ours)
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
def test_gradients_that_have_accumulated_survive_several_backwards() -> None:
    rank = objcomm.rank()
    ours, theirs = network(), objcomm.models.wrap(network(), find_unused_parameters=True)
    steps = 3
    quiet: Any = getattr(theirs, "no_sync", contextlib.nullcontext)
    for step in range(steps):
        with quiet() if step < steps - 1 else contextlib.nullcontext():
            backward(theirs, rank, step=step)
    backward(ours, rank, step=0)
    with objcomm.models.eager_sync_gradients(ours.parameters()):
        backward(ours, rank, step=1)
        backward(ours, rank, step=2)
    assert_gradients(ours, theirs, exactly=True)


@ranks(2)
def test_buffers_are_averaged_or_shared_and_counters_never_left_out() -> None:
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
def test_models_are_carried_in_signed_messages_where_there_is_a_key() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    with objcomm.configure(key="a secret of this test's"):
        mine = assorted(rank)
        objcomm.models.broadcast_tensors(mine.values(), 1)
        assert_same_tensors(mine, expected(size, 1))
        mine = assorted(rank)
        objcomm.models.average_tensors(mine.values())
        assert_same_tensors(mine, expected(size, None))


@ranks(2)
def test_everything_works_in_inference_mode_and_on_tensors_of_it() -> None:
    with torch.inference_mode():
        inside = torch.full((LARGE,), float(objcomm.rank()))
        outside = nn.Linear(2, 2)
        objcomm.models.average_tensors([inside])
    assert bool((inside == 0.5).all())
    with torch.inference_mode():
        objcomm.models.broadcast_model(outside)
    with torch.inference_mode():
        small = torch.full((2,), float(objcomm.rank()))
    objcomm.models.average_tensors([small])
    assert small.tolist() == [0.5, 0.5]


@solo()
def test_without_other_ranks_nothing_changes_and_no_traffic_is_needed() -> None:
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
def test_loaders_deal_each_member_once_or_every_rank_equally_many() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    dealt = objcomm.all_gather(list(objcomm.loader(range(10), batch_size=None)))
    assert sorted(int(each) for part in dealt for each in part) == list(range(10))
    assert [int(each) for each in dealt[rank]] == list(range(rank, 10, size))
    trained = objcomm.loader(range(10), 2, shuffle=True, drop_last=False)
    orders = []
    for epoch in (0, 0, 1):
        trained.sampler.set_epoch(epoch)
        orders.append([each for batch in trained for each in batch.tolist()])
        reference: Any = torch.utils.data.DistributedSampler(
            range(10),  # type: ignore[arg-type]  # it has a length
            num_replicas=size,
            rank=rank,
        )
        reference.set_epoch(epoch)
        assert orders[-1] == list(reference)
    assert orders[0] == orders[1] != orders[2]
    lengths = objcomm.all_gather((len(trained), len(trained.sampler)))
    assert len(set(lengths)) == 1
    assert list(objcomm.Shard(0, even=True)) == list(objcomm.Shard(0)) == []
    assert len(objcomm.Shard(1, even=True)) == 1
    assert len(objcomm.loader([1], sampler=None, batch_sampler=None).sampler) == (rank == 0)
    for wrong in (
        lambda: objcomm.loader(iter([1])),
        lambda: objcomm.loader([1], sampler=[0]),
        lambda: objcomm.Shard(-1),
    ):
        with pytest.raises(UsageError):
            wrong()
