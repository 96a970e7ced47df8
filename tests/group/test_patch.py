"""``objcomm.compat.torch.patch()``: what it replaces, when it ends, and what it leaves alone."""

import inspect
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import all_gather_object as imported_before
from torch.distributed import distributed_c10d

import objcomm
from objcomm import CollectiveError, UsageError
from objcomm.compat import torch as dist_objects
from objcomm.compat.torch import patch
from tests.group.helpers import assert_group_works, error_in, in_thread, subgroup
from tests.ranks import ranks, solo
from tests.workers import here

NAMES = [name for name in dist_objects.__all__ if name != "patch"]
ORIGINALS = {name: getattr(dist, name) for name in NAMES}


def places() -> list[Callable[..., Any]]:
    return [getattr(module, name) for module in (dist, distributed_c10d) for name in NAMES]


def are_torchs() -> bool:
    return places() == [*ORIGINALS.values(), *ORIGINALS.values()]


def calls() -> int:
    """Count this rank's objcomm calls on the world."""
    return sum(figures.calls for figures in objcomm.stats().values())


def gathered_by(all_gather_object: Callable[..., None]) -> bool:
    """Return whether objcomm carries out this function's call; check its result."""
    before, boxes = calls(), [None] * here().world_size
    all_gather_object(boxes, here().rank)
    assert boxes == list(range(here().world_size))
    return calls() > before


def test_each_function_is_replaced_in_both_modules_and_looks_alike() -> None:
    with patch() as held:
        for name in NAMES:
            replaced = getattr(dist, name)
            assert replaced is getattr(distributed_c10d, name) is not ORIGINALS[name]
            assert inspect.signature(replaced) == inspect.signature(ORIGINALS[name])
            assert (replaced.__name__, replaced.__doc__) == (name, ORIGINALS[name].__doc__)
        held.undo()
        assert are_torchs()
        held.undo()
    assert are_torchs()


def test_torchs_functions_come_back_with_the_last_patch_and_after_an_error() -> None:
    outer, inner = patch(), patch()
    outer.undo()
    assert not are_torchs()
    inner.undo()
    assert are_torchs()

    def fail_inside() -> None:
        with patch(), patch():
            assert not are_torchs()
            raise KeyError("a program's own")

    with pytest.raises(KeyError):
        fail_inside()
    assert are_torchs()
    with outer:  # it may be used again
        assert not are_torchs()
    assert are_torchs()
    # Patched by one thread, undone by another.
    held: list[Any] = []
    in_thread(lambda: held.append(patch())).join()
    assert not are_torchs()
    held[0].undo()
    assert are_torchs()


@ranks(2)
def test_only_calls_by_a_modules_name_are_replaced() -> None:
    assert not gathered_by(dist.all_gather_object)
    assert not gathered_by(imported_before)
    local = imported_before
    with patch():
        imported_meanwhile = dist.all_gather_object
        assert gathered_by(dist.all_gather_object)
        assert gathered_by(distributed_c10d.all_gather_object)
        assert gathered_by(imported_before)
        assert not gathered_by(local)
        with patch():
            assert gathered_by(imported_meanwhile)
        assert gathered_by(imported_meanwhile)
    assert not gathered_by(dist.all_gather_object)
    assert not gathered_by(imported_meanwhile)
    assert imported_before is local is ORIGINALS["all_gather_object"]
    with patch():
        assert gathered_by(imported_meanwhile)
        theirs = dist.all_gather_object

        def wrapper(*args: Any, **kwargs: Any) -> None:
            theirs(*args, **kwargs)

        dist.all_gather_object = wrapper
        with patch():
            assert dist.all_gather_object is wrapper
    # Another library's wrapper stays, and calls torch's own function again.
    assert dist.all_gather_object is wrapper
    assert not gathered_by(wrapper)
    dist.all_gather_object = ORIGINALS["all_gather_object"]
    assert are_torchs()


@ranks(4)
def test_every_function_accepts_its_arguments_in_any_form() -> None:
    rank = here().rank
    objcomm.reset_stats()
    with patch(), subgroup(1, 3) as group:
        box: list[Any] = [rank]
        dist.broadcast_object_list(object_list=box, src=2)
        out: list[Any] = [None]
        dist.scatter_object_list(out, [0, 1, 2, 3], 0, None)
        gathered: Any = [None] * 4 if rank == 3 else None
        dist.gather_object(rank, gathered, dst=3)
        assert (box, out, gathered) == ([2], [rank], [0, 1, 2, 3] if rank == 3 else None)
        if rank in {1, 3}:
            objcomm.reset_stats(group)
            pair: list[Any] = [None, None]
            dist.all_gather_object(pair, rank, group)
            assert pair == [1, 3]
            if rank == 1:
                dist.send_object_list(pair, 3, group)
            else:
                assert dist.recv_object_list(pair, group=group) == 1
            assert sum(each.calls for each in objcomm.stats(group).values()) == 2
        else:
            with pytest.warns(UserWarning, match="does not belong"):
                dist.all_gather_object([], rank, group)
    assert calls() == 3


@ranks(2)
def test_a_failure_reaches_all_ranks_under_the_patch() -> None:
    with patch():
        for _ in range(2):
            with pytest.raises(CollectiveError, match="all_gather_object failed on rank 1"):
                dist.all_gather_object([None] * 2, threading.Lock() if here().rank else 1)
        assert gathered_by(dist.all_gather_object)
    assert_group_works()


@solo()
def test_groups_that_objcomm_cannot_use_are_left_to_torch() -> None:
    monkeypatch = pytest.MonkeyPatch()  # the process ends with the test
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  # slow

    with patch():
        boxes: list[Any] = [None]
        dist.all_gather_object(boxes, "nothing is initialized")
        assert (boxes, calls()) == (["nothing is initialized"], 1)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        boxes = [None, None]
        dist.all_gather_object(boxes, "by torch")
        assert (boxes, calls()) == (["by torch", "by torch"], 0)
        with pytest.raises(ValueError, match="Can't specify both"):  # torch's own message
            dist.broadcast_object_list(boxes, 0, group_src=0)
        # A group whose store no other rank can reach, whatever its backend.
        monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
        dist.all_gather_object(boxes, "by torch too")
        assert (boxes, calls()) == (["by torch too"] * 2, 0)
        with pytest.raises(TypeError, match="nonsense"):  # torch's own, too
            dist.all_gather_object(boxes, 1, nonsense=True)  # type: ignore[call-arg]  # wrong on purpose


@ranks(2, joined=False, environment={"TP_SOCKET_IFNAME": "lo"})
def test_a_group_that_torch_made_for_itself_needs_no_world() -> None:
    from torch.distributed import rpc  # noqa: PLC0415  # only fresh processes need it

    rank = here().rank
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{here().folder}/rpc")
    with patch():
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        assert rpc.rpc_sync(f"rank{1 - rank}", divmod, (7, 2 + rank)) == divmod(7, 2 + rank)
        rpc.shutdown()
    assert not objcomm.stats()


@ranks(1, 2)
def test_a_group_that_torch_made_for_itself_is_left_to_torch() -> None:
    rank, size = here().rank, here().world_size
    store = dist.PrefixStore("torch's own", here().store("own"))
    groups: list[Any] = [
        dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=300)),
        dist.ProcessGroup(store, rank, size),
    ]
    before = calls()
    with patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about a group without a name
        boxes: list[Any] = [None] * size
        dist.all_gather_object(boxes, rank, groups[0])
        assert boxes == list(range(size))
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            ORIGINALS["all_gather_object"](boxes, rank, groups[1])
        with pytest.raises(type(theirs.value)) as caught:
            dist.all_gather_object(boxes, rank, groups[1])
        assert caught.traceback[-1].name == theirs.traceback[-1].name
    assert calls() == before
    assert_group_works()


@ranks(2)
def test_torch_refuses_what_is_not_a_group() -> None:
    given: Any = "a group"
    boxes = [None, None]
    with patch(), pytest.warns(UserWarning, match="as a ProcessGroup"):
        error = error_in(
            ValueError, lambda: dist.all_gather_object(boxes, 1, group=given), "a group"
        )
    assert not isinstance(error, UsageError)
    assert_group_works()
