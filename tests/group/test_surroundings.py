"""What a program may do around a call: modes, default devices, thread pools, forked workers."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import objcomm
from objcomm._calls.group import resolve
from objcomm._transport.streams import StreamLink
from tests.cases import case
from tests.group.helpers import assert_group_works, assert_in_child, error_in, tell_all
from tests.group.operations import MESSAGES, OBJECT_OPERATIONS, OPERATIONS
from tests.ranks import ranks, solo
from tests.workers import here

NBYTES = (4, 100_000)  # in the first message, and in its own buffer


@ranks(2, 3)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_arrives_in_inference_mode_can_be_trained_on(mode: Any) -> None:
    names = [name for name in OBJECT_OPERATIONS if name != "scatter"]
    for name, codec, numel in itertools.product(names, ("pickle", "msgpack"), NBYTES):
        with case(name, codec, numel):
            with mode():
                mine = torch.full((numel,), 2.0)
                got = OPERATIONS[name](mine, codec=codec)
            for tensor in got if isinstance(got, list) else [got]:
                if tensor is not None and tensor is not mine:  # created in the mode
                    assert_can_be_trained_on(tensor)
    assert_group_works()


def assert_can_be_trained_on(tensor: torch.Tensor) -> None:
    assert not tensor.is_inference()
    weights = tensor.clone().requires_grad_()
    (weights * tensor).sum().backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad, tensor)
    tensor.add_(1)


@ranks(2)
def test_a_tensor_made_in_inference_mode_can_be_sent(codec: str) -> None:
    with torch.inference_mode():
        made = torch.arange(50_000) + here().rank
    got = objcomm.all_gather(made, codec=codec)
    other = got[1 - here().rank]
    assert other.is_inference() is False
    assert torch.equal(other, torch.arange(50_000) + 1 - here().rank)
    assert torch.equal(objcomm.all_reduce(made, "sum"), torch.arange(50_000) * 2 + 1)


@ranks(2)
def test_the_default_device_and_dtype_have_no_effect() -> None:
    for name, operation in {**OPERATIONS, **MESSAGES}.items():
        objects = [3, 0.1] if "scalar" in name or name == "barrier" else [3, torch.ones(30_000)]
        with case(name):
            want = [operation(obj) for obj in objects]
            torch.set_default_device("meta")
            torch.set_default_dtype(torch.float16)
            try:
                got = [operation(obj) for obj in objects]
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
            assert repr(got) == repr(want)


@ranks(2)
def test_a_group_may_be_made_under_a_default_device() -> None:
    torch.set_default_device("meta")
    try:
        group = objcomm.dup()
        assert_group_works(group)
        large = torch.ones(300_000, device="cpu")  # reduced in shared memory
        assert objcomm.all_reduce(large, "sum", group=group)[-1] == 2
        dist.destroy_process_group(group)
    finally:
        torch.set_default_device(None)


@ranks(2)
def test_threads_may_split_groups_at_the_same_time() -> None:
    def job(number: int) -> Any:
        with objcomm.lane(f"split {number}"):
            return objcomm.dup()

    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(job, range(3)))
    for group in groups:
        assert_group_works(group)
        dist.destroy_process_group(group)


class Numbers(Dataset[int]):
    """Each item is the pid of the process that reads it."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@contextlib.contextmanager
def may_have_children() -> Iterator[None]:
    """Allow child processes, which Python forbids a daemon such as a rank of the pool."""
    with pytest.MonkeyPatch.context() as patch:
        config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001  # the one way
        patch.setitem(config, "daemon", value=False)
        yield


@ranks(2, disposable=True)
@pytest.mark.parametrize("persistent", [False, True])
def test_forked_workers_of_a_loader_start_and_end_during_calls(*, persistent: bool) -> None:
    assert_group_works()  # connections and watchdog threads exist when the workers are forked
    loader = DataLoader(
        Numbers(),
        batch_size=2,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=persistent,
    )
    for _ in range(2):
        readers = set()
        with may_have_children():
            batches = iter(loader)
        for batch in batches:
            readers |= set(batch.tolist())
            assert objcomm.all_gather(here().rank) == [0, 1]
        assert os.getpid() not in readers
        assert_group_works()  # after the workers' exit, unless they persist
    del loader, batches
    gc.collect()
    assert_group_works()
    objcomm.barrier()


#: Calls that a worker may try, by name.
TRIED: dict[str, Callable[[], Any]] = {
    "all_gather": lambda: objcomm.all_gather(1, timeout=300),
    "broadcast": lambda: objcomm.broadcast(1, src=1, timeout=300),
    "barrier": lambda: objcomm.barrier(timeout=300),
    "send": lambda: objcomm.send(1, objcomm.rank()),  # even to the rank itself
    "recv": lambda: objcomm.recv(timeout=300),
    "init": objcomm.init,
}


class Caller(Dataset[tuple[str, str]]):
    """Makes each call of ``TRIED`` in a worker."""

    def __len__(self) -> int:
        return len(TRIED)

    def __getitem__(self, index: int) -> tuple[str, str]:
        name = list(TRIED)[index]
        try:
            return name, f"it returned {TRIED[name]()}"
        except objcomm.UsageError as error:
            return name, str(error)


@ranks(2, disposable=True)
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_call_in_a_worker_raises_an_error_that_names_its_rank(how: str) -> None:
    assert_group_works()
    own = here().rank
    place = {"RANK": str(own), "WORLD_SIZE": "2"}  # a launcher sets this for a rank's processes
    loader = DataLoader(Caller(), batch_size=None, num_workers=1, multiprocessing_context=how)
    with may_have_children(), mock.patch.dict(os.environ, place):
        answers = dict(loader)
    assert set(answers) == set(TRIED)
    text = f"this process is worker 0 of a DataLoader of rank {own}, and is not a rank itself; "
    for name, answer in answers.items():
        assert answer.startswith(f"{name}: {text}"), answer
    assert_group_works()


@solo()
def test_a_worker_of_a_single_process_may_make_calls() -> None:
    loader = DataLoader(Caller(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with may_have_children():
        answers = dict(loader)
    assert answers["all_gather"] == "it returned [1]"
    assert answers["init"].startswith("it returned no launcher: a world of one")


@ranks(2)
def test_a_call_while_the_interpreter_shuts_down_is_refused() -> None:
    """A generator's ``finally`` may run then, when no thread is left that could end a wait."""
    objcomm.barrier()
    other = 1 - here().rank
    with mock.patch.object(sys, "is_finalizing", return_value=True):
        for call in (objcomm.barrier, lambda: objcomm.recv(other), lambda: objcomm.iprobe(other)):
            with pytest.raises(objcomm.UsageError, match="the interpreter is shutting down"):
                call()
    assert_group_works()


@ranks(2, disposable=True)
def test_a_block_that_is_closed_while_the_interpreter_shuts_down_leaves_torch_alone() -> None:
    """A suspended generator closes it; a call into torch would abort the process."""

    def suspended() -> Generator[None]:
        with objcomm.fail_together():
            yield

    generator = suspended()
    next(generator)
    tell_all("all are inside", "")
    with (
        mock.patch.object(sys, "is_finalizing", return_value=True),
        mock.patch.object(StreamLink, "abort", side_effect=AssertionError) as abort,
    ):
        generator.close()
    assert not abort.called
    mesh = resolve(None).mesh
    assert mesh is not None
    assert mesh.verdict is not None
    tell_all("all have left", "")


@ranks(2)
def test_a_forked_child_does_not_wait_for_its_parents_work() -> None:
    late = objcomm.irecv(1 - here().rank, tag=7)
    text = "cannot wait for its parent's work"
    assert_in_child(lambda: text in str(error_in(objcomm.UsageError, late.wait)))
    objcomm.send("late", 1 - here().rank, tag=7)
    assert late.wait() == "late"


@ranks(2)
def test_a_forked_child_that_shuts_down_leaves_its_parents_groups_alone() -> None:
    """As in the ``finally`` of a script that forks its workers inside the block."""
    assert_group_works()

    def shut_down() -> bool:
        objcomm.shutdown()
        return dist.is_initialized()  # a failure crashes often, but not always

    assert_in_child(shut_down)
    assert_group_works()
