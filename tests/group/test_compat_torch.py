"""``objcomm.compat.torch``: torch's calls, one for one."""

import collections
import contextlib
import fractions
import inspect
import threading
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, ForbiddenTypeError, UsageError
from objcomm.compat import torch as dist_objects
from tests.group.helpers import assert_group_works, in_thread, subgroup
from tests.ranks import ranks, solo
from tests.same import assert_same
from tests.waits import PATIENCE_S
from tests.workers import here

if TYPE_CHECKING:
    from collections.abc import Callable

    Action = Callable[[], object]

BAD: Any = threading.Lock()  # no codec accepts it


def sample(rank: int) -> list[Any]:
    """Return entries of several types and sizes, different on each rank."""
    large = torch.arange(30_000 * (rank + 1), dtype=torch.float64)
    return [None, {"rank": rank, "w": torch.ones(rank)}, large, "é" * rank, (2**70, 0.1)]


def test_signatures_are_torchs() -> None:
    for name in dist_objects.__all__:
        if name == "patch":
            continue
        theirs, ours = (
            [(p.name, p.kind, p.default) for p in inspect.signature(each).parameters.values()]
            for each in (getattr(dist, name), getattr(dist_objects, name))
        )
        assert ours[: len(theirs)] == theirs, name
        # Arguments new in torch 2.15 work with earlier versions, so programs need only one form.
        assert {each for each, *_ in ours[len(theirs) :]} <= {"use_batch", "weights_only"}, name


@ranks(1, 2)
def test_weights_only_accepts_what_torch_considers_safe() -> None:
    mine: list[Any] = [collections.OrderedDict(w=torch.ones(3)), {"lr": 0.1, "betas": (0.9, 0.999)}]
    got: list[Any] = [None] * objcomm.world_size()
    dist_objects.all_gather_object(got, mine, weights_only=True)
    for each in got:
        assert_same(each, mine)
    with contextlib.suppress(ForbiddenTypeError):  # in a world of one nothing is unpickled
        dist_objects.all_gather_object(got, fractions.Fraction(1, 3), weights_only=True)
        assert objcomm.world_size() == 1
    with torch.serialization.safe_globals([fractions.Fraction]):
        dist_objects.all_gather_object(got, fractions.Fraction(1, 3), weights_only=True)
    assert got == [fractions.Fraction(1, 3)] * objcomm.world_size()
    assert_group_works()


@ranks(1, 2, 4)
def test_lists_are_filled_as_by_torch() -> None:
    rank, size = here().rank, here().world_size
    outcomes = []
    for api in (dist, dist_objects):
        seen: list[Any] = []
        for root in range(size):
            for spelled in ({}, {"src": root}, {"group_src": root}):
                box = sample(rank)
                for count in (1, len(box)):
                    part = box[:count]
                    assert api.broadcast_object_list(part, **spelled) is None
                    seen.append(part)
                inputs = [sample(turn) for turn in range(size)]
                out = ["replaced", "kept"]
                at = next(iter(spelled.values()), 0)
                api.scatter_object_list(out, inputs if rank == at else None, **spelled)
                seen.append(out)
            for spelled in ({}, {"dst": root}, {"group_dst": root}):
                at = next(iter(spelled.values()), 0)
                filled: Any = [None] * size + ["kept"] if rank == at else None
                api.gather_object(sample(rank), filled, **spelled)
                seen.append(filled)
        gathered: list[Any] = [None] * size + ["kept"]
        api.all_gather_object(gathered, sample(rank), group=dist.group.WORLD)
        outcomes.append([*seen, gathered])
    assert_same(outcomes[1], outcomes[0], sharing=False)


@ranks(1, 2)
def test_the_source_keeps_its_objects_and_other_results_are_copies() -> None:
    mine: dict[str, Any] = {"w": torch.zeros(3), "many": torch.zeros(50_000)}
    box = [mine]
    dist_objects.broadcast_object_list(box, device=torch.device("cpu"))
    assert (box[0] is mine) == (here().rank == 0)
    rank, size = here().rank, here().world_size
    gathered: list[Any] = [None] * size
    dist_objects.all_gather_object(gathered, mine)
    collected = [None] * size
    dist_objects.gather_object(mine, collected if rank == 0 else [])
    out: list[Any] = [None]
    dist_objects.scatter_object_list(out, [mine] * size)
    for tensor in mine.values():
        tensor.add_(1)
    for got in [gathered[rank], *(collected if rank == 0 else []), out[0]]:
        assert (float(got["w"].sum()), float(got["many"].sum())) == (0.0, 0.0)


@ranks(4)
def test_ranks_are_global_in_a_subgroup_and_others_get_a_warning() -> None:
    rank = here().rank
    with subgroup(1, 3) as group:
        box: list[Any] = [rank, "own"]
        out: list[Any] = [None]
        gathered: list[Any] = [None, None]
        if rank not in {1, 3}:
            calls: list[Action] = [
                lambda: dist_objects.broadcast_object_list(box, 3, group),
                lambda: dist_objects.all_gather_object(gathered, rank, group),
                lambda: dist_objects.gather_object(rank, None, 3, group),
                lambda: dist_objects.scatter_object_list(out, None, 3, group),
                lambda: dist_objects.send_object_list(box, 3, group),
                lambda: dist_objects.recv_object_list(box, 3, group),
            ]
            for call in calls:
                with pytest.warns(UserWarning, match=f"on global rank {rank} which") as caught:
                    assert call() in {None, -1}
                # Works dropped by earlier tests may be collected here; their category differs.
                (warning,) = [each for each in caught if each.category is UserWarning]
                assert warning.filename == __file__
            assert (box, out, gathered) == ([rank, "own"], [None], [None, None])
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                dist_objects.broadcast_object_list(box, 3, group)
                assert box == [3, "own"]
                dist_objects.broadcast_object_list(box, group=group, group_src=0)
                dist_objects.all_gather_object(gathered, rank, group)
                assert gathered == [1, 3]
                dist_objects.gather_object(rank, [None, 0] if rank == 3 else None, 3, group)
                dist_objects.scatter_object_list(out, ["a", "b"], 1, group)
                assert out == ["a" if rank == 1 else "b"]
                if rank == 3:
                    dist_objects.send_object_list(["x", rank], 1, group, group_dst=None)
                    assert dist_objects.recv_object_list(box, 1, group=group) == 1
                else:
                    assert dist_objects.recv_object_list(box, group=group) == 3
                    assert box == ["x", 3]
                    dist_objects.send_object_list([None, None], group=group, group_dst=1)
            # Torch's default is global rank 0, which is not in this group.
            refused: list[Action] = [
                lambda: dist_objects.broadcast_object_list(box, group=group),
                lambda: dist_objects.gather_object(rank, None, group=group),
                lambda: dist_objects.scatter_object_list(out, None, group=group),
            ]
            for faulty in refused:
                with pytest.raises(UsageError, match=r"(src|dst)=0 is not in this group.*1, 3"):
                    faulty()
            assert_group_works(group)
    assert_group_works()


@ranks(3)
def test_lists_go_from_rank_to_rank() -> None:
    rank = here().rank
    if rank:
        dist_objects.send_object_list(sample(rank), 0, use_batch=True)
        objcomm.send("the program's own", 0)
        sent = ["only one"]
        dist_objects.send_object_list(sent, group_dst=0, device=None)
        assert sent == ["only one"]
        dist_objects.send_object_list(["two", "objects"], 0)
        with pytest.raises(CollectiveError, match=r"send_object_list failed on rank .*obj\[0\]"):
            dist_objects.send_object_list([BAD], 0)
        dist_objects.send_object_list([], 0)
    else:
        senders = set()
        for _ in range(2):
            box: list[Any] = [None] * 5
            sender = dist_objects.recv_object_list(box)
            assert_same(box, sample(sender))
            senders.add(sender)
            one: list[Any] = [None]
            assert dist_objects.recv_object_list(one, sender, use_batch=True) == sender
            assert one == ["only one"]
            with pytest.raises(UsageError, match="sent 2 objects"):
                dist_objects.recv_object_list(one, group_src=sender)
            assert one == ["only one"]
            with pytest.raises(CollectiveError, match="recv_object_list failed on rank"):
                dist_objects.recv_object_list(one, sender)
            assert objcomm.recv(sender) == "the program's own"
            assert dist_objects.recv_object_list([], sender) == sender
        assert senders == {1, 2}
    assert_group_works()


@ranks(2)
def test_threads_need_no_lane() -> None:
    rank = here().rank
    both = threading.Barrier(2)
    seen: dict[str, list[Any]] = {"first": [], "second": [], "main": []}

    def collect(name: str) -> None:
        gathered: list[Any] = [None, None]
        dist_objects.all_gather_object(gathered, (name, rank))
        seen[name] += gathered

    def work(name: str, turn: int) -> None:
        for step in range(6):  # the two take turns, and both stay alive
            both.wait(PATIENCE_S)
            if step % 2 == turn:
                collect(name)

    threads = [in_thread(partial(work, *each)) for each in (("first", 0), ("second", 1))]
    for _ in range(20):  # meanwhile the main thread calls at any time
        collect("main")
        with objcomm.lane("a lane"):
            collect("main")
    for thread in threads:
        thread.join(PATIENCE_S)
    for name, count in (("first", 3), ("second", 3), ("main", 40)):
        assert seen[name] == [(name, 0), (name, 1)] * count
    assert_group_works()


@ranks(2)
def test_calls_are_recorded_under_torchs_names() -> None:
    objcomm.reset_stats()
    dist_objects.all_gather_object([None, None], here().rank)
    dist_objects.broadcast_object_list([here().rank])
    if here().rank:
        dist_objects.send_object_list([1], 0)
    else:
        dist_objects.recv_object_list([None], 1)
    p2p = "send_object_list" if here().rank else "recv_object_list"
    counts = {name: each.calls for name, each in objcomm.stats().items()}
    assert counts == {"all_gather_object": 1, "broadcast_object_list": 1, p2p: 1}


@ranks(2)
def test_the_default_codec_does_not_apply_to_torchs_calls() -> None:
    box: list[Any] = [{1, 2} if here().rank == 0 else None, slice(3)]
    with objcomm.configure(codec="msgpack"):
        dist_objects.broadcast_object_list(box)
    assert box == [{1, 2}, slice(3)]


@solo()
def test_one_process_needs_no_torch_distributed() -> None:
    box: list[Any] = [{"a": 1}, 2]
    dist_objects.broadcast_object_list(box)
    gathered: list[Any] = [None]
    dist_objects.all_gather_object(gathered, box)
    dist_objects.gather_object(box, gathered)
    assert (gathered, gathered[0] is box) == ([[{"a": 1}, 2]], False)
    dist_objects.scatter_object_list(gathered, ["mine"])
    assert gathered == ["mine"]
    with pytest.raises(CollectiveError, match="all_gather_object failed on rank 0"):
        dist_objects.all_gather_object([], 1)
    with pytest.raises(CollectiveError, match="EncodeError") as caught:
        dist_objects.all_gather_object(gathered, {"cb": BAD})
    assert "obj['cb']" in str(caught.value)
    with pytest.raises(UsageError):
        dist_objects.recv_object_list([None])
