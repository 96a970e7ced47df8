"""The stand-in device is as strict as the tests that use it need."""

import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.ranks import solo
from tests.standin import device
from tests.standin.device import Queued, Stream


@solo()
def test_a_device_is_initialized_at_its_first_use() -> None:
    device.set_up()
    assert not device.is_initialized()
    assert torch.accelerator.current_accelerator() == torch.device("standin")
    assert torch.accelerator.device_count() == device.COUNT
    assert torch.accelerator.current_device_index() == 0
    assert device.is_initialized()  # querying initializes, as for torch's own device types
    torch.accelerator.set_device_index(2)
    assert device.contexts() == set()
    torch.ones(3).to("standin")
    assert device.contexts() == {2}
    Stream(1)
    assert device.contexts() == {1, 2}


@solo()
def test_it_computes_as_the_cpu_does() -> None:
    device.set_up()
    numbers = torch.arange(12.0)
    there = numbers.to("standin:1")
    assert type(there) is torch.Tensor
    assert there.device == torch.device("standin:1")
    assert there.is_contiguous()
    cases: list[Any] = [
        lambda each: each.view(3, 4).t()[1:].contiguous().flatten() + 1,
        lambda each: each.view(torch.uint8)[4:12].view(torch.float32),
        lambda each: torch.cat([each, each[2:4]]),
        lambda each: each.clone().add_(1).mul_(2).div_(3),
        lambda each: torch.complex(each, each).conj().resolve_conj(),
        lambda each: torch.view_as_real(torch.complex(each, each))[3:, 1],
        lambda each: each.double().sum(),
        lambda each: each[:1].expand(5) == each[:5],
        lambda each: torch.zeros(0, 3, device=each.device),
        lambda each: torch.full((3,), 7, device=each.device),
        lambda each: torch.arange(5, device=each.device),
    ]
    for make in cases:
        got, want = make(there), make(numbers)
        assert got.device == there.device
        assert got.stride() == want.stride()
        assert torch.equal(got.cpu(), want)
    parts = [torch.empty(size, device="standin:1") for size in (2, 10)]
    torch.split_with_sizes_copy(there, [2, 10], out=parts)
    assert [each.cpu().tolist() for each in parts] == [[0, 1], [*range(2, 12)]]
    view = there[3:5]
    view.zero_()
    assert there.cpu().tolist() == [0, 1, 2, 0, 0, *range(5, 12)]


@solo()
def test_the_cpu_reads_nothing_by_accident() -> None:
    device.set_up()
    there = torch.ones(3).to("standin")
    for read in (torch.Tensor.item, bool, int):
        with pytest.raises(RuntimeError, match="would read memory of standin:0"):
            read(there[0])
    with pytest.raises(RuntimeError, match="would read memory"):
        torch.equal(there, there)
    with pytest.raises(TypeError, match="copy the tensor to host memory"):
        there.numpy()
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3).to("standin:1")
    child = os.fork()
    if not child:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file, on machines that keep them
        ctypes.string_at(there.data_ptr(), 1)
        os._exit(0)  # not reached
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) in {signal.SIGSEGV, signal.SIGBUS}


@solo()
def test_each_thread_has_a_current_device_and_a_name_without_index_means_it() -> None:
    device.set_up()
    there = torch.zeros(1)
    seen = []

    def look() -> None:
        seen.append(device.current_device())
        device.set_device(1)
        seen.append(there.to("standin").device.index)

    with torch.accelerator.device_index(2):
        assert there.to("standin").device.index == 2
        assert there.to(device=torch.device("standin")).device.index == 2
        assert torch.empty(1, device="standin").device.index == 2
        assert torch.nn.Linear(2, 2).to("standin").weight.device.index == 2
        other = threading.Thread(target=look)
        other.start()
        other.join()
        assert seen == [0, 1]
        assert device.current_device() == 2
    assert device.current_device() == 0
    with pytest.raises(RuntimeError, match="no standin:3"):
        there.to("standin:3")


@solo()
def test_streams_note_what_is_queued_and_must_wait_for_each_other() -> None:
    device.set_up()
    there = torch.ones(3).to("standin")
    torch.accelerator.synchronize()
    assert device.queued() == [Queued(0, 0, "copy from cpu to standin")]
    later = there + 1
    side = Stream(0)
    with side:
        assert torch.accelerator.current_stream() == side
        there.add_(1)  # no wait is needed again
        with pytest.raises(RuntimeError, match="stream 1 of standin:0 uses what stream 0 of"):
            later.add_(1)
        side.wait_stream(Stream(0, number=0))
        later.add_(1)
    assert torch.accelerator.current_stream().stream_id == 0
    with pytest.raises(
        RuntimeError,
        match="copy from standin to cpu on stream 0 of standin:0 uses what stream 1 of",
    ):
        later.cpu()
    with side:
        assert later.cpu().tolist() == [3, 3, 3]  # waits on the CPU
    assert later.cpu().tolist() == [3, 3, 3]
    assert [each.stream for each in device.queued()] == [0, 1, 1, 1, 0]


@solo()
def test_threads_may_use_a_device_at_once() -> None:
    device.set_up()
    there = torch.ones(3).to("standin")
    torch.accelerator.synchronize()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def read(_: int) -> None:
        for _ in range(200):
            with Stream(0):
                assert there.cpu().tolist() == [1, 1, 1]

    try:
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(read, range(3))) == [None] * 3
    finally:
        sys.setswitchinterval(interval)


@solo()
def test_allocations_are_counted_and_can_be_limited() -> None:
    device.set_up()
    before = device.allocations(1)
    there = torch.zeros(100, device="standin:1")
    alias = there[50:]
    assert device.allocations(1) == before + 1
    assert device.memory_allocated(1) == 400
    assert device.memory_allocated(0) == 0
    del there
    gc.collect()
    assert device.memory_allocated(1) == 400  # kept by a view
    with (
        device.room(1, 300),
        pytest.raises(torch.OutOfMemoryError, match="no room for 400 bytes"),
    ):
        torch.zeros(100, device="standin:1")
    del alias
    assert device.memory_allocated(1) == 0


@solo()
def test_a_stream_that_is_left_alone_neither_waits_nor_is_waited_for() -> None:
    device.set_up()
    there, own = torch.ones(3).to("standin"), torch.accelerator.current_stream()
    other = Stream()
    with device.left_alone(own):
        for touch in (
            lambda: there.add_(1),
            torch.accelerator.synchronize,
            own.synchronize,
            lambda: other.wait_stream(own),
            lambda: own.wait_stream(other),
        ):
            with pytest.raises(RuntimeError, match="stream 0 of standin:0 is busy"):
                touch()
    torch.accelerator.synchronize()
    with device.left_alone(own), other:
        assert (there + 1).cpu().tolist() == [2, 2, 2]
