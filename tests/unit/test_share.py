"""Memory handed over within one process: sealed, private to each mapping, and released."""

import copy
import fcntl
import gc
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objcomm._codecs.buffers import BufferKind, over
from objcomm._transport import share as share_module
from objcomm._transport.share import FILES_MAX, Place, Share, places
from tests.open_files import open_files
from tests.scripts import run_python

_LENGTHS = st.lists(st.integers(1, 3 * mmap.PAGESIZE), min_size=1, max_size=8)


def counting(nbytes: int, first: int = 1) -> torch.Tensor:
    return torch.arange(first, first + nbytes).to(torch.uint8)


def mapped(share: Share, nbytes: int, place: Place = (0, 0)) -> torch.Tensor:
    """Return a tensor over a member, as a decoder gets it."""
    tensor: torch.Tensor = over(BufferKind.TENSOR, share.mapped(place, nbytes)).owner
    return tensor


def mappings() -> int:
    """Return how many mappings of such a file this process has."""
    return len(re.findall("memfd:objcomm", Path("/proc/self/maps").read_text()))


def filled_later(flats: list[torch.Tensor]) -> Share:
    share = Share.with_room([flat.numel() for flat in flats])
    for into, flat in zip(share.flats, flats, strict=True):
        into.copy_(flat)
    share.seal()
    assert not share.flats
    return share


@pytest.mark.parametrize("make", [Share.of, filled_later])
@given(_LENGTHS, st.sampled_from([1, 5000, 1 << 30]))
def test_each_member_comes_back_as_it_was(
    make: Callable[[list[torch.Tensor]], Share], lengths: list[int], file_min_nbytes: int
) -> None:
    flats = [counting(length, 1 + at) for at, length in enumerate(lengths)]
    with patch.object(share_module, "_FILE_MIN_NBYTES", file_min_nbytes):
        share = make(flats)
        where = places(lengths)
    assert share.is_final()
    for flat, place in zip(flats, where, strict=True):
        member = mapped(share, flat.numel(), place)
        assert torch.equal(member, flat)
        assert member.data_ptr() % 64 == 0
        into = torch.zeros_like(flat)
        share.read_into(into, place)
        assert torch.equal(into, flat)


@given(st.lists(st.integers(1, 1 << 34), min_size=1, max_size=200))
def test_a_member_keeps_little_of_what_came_with_it(lengths: list[int]) -> None:
    """Each has its own pages, in no more files than the receiver accepts."""
    where = places(lengths)
    assert max(file for file, _ in where) < FILES_MAX
    most = max(64 << 20, sum(lengths) // 32)
    ends: dict[int, int] = {}
    for (file, start), length in zip(where, lengths, strict=True):
        assert start % mmap.PAGESIZE == 0
        assert ends.get(file, 0) <= start <= most + mmap.PAGESIZE
        ends[file] = start + length


def test_nobody_can_change_it_anymore() -> None:
    share = Share.of([counting(5000)])
    (file,) = share.descriptors
    for change in (
        lambda: os.pwrite(file, b"x", 0),
        lambda: os.ftruncate(file, 10),
        lambda: os.ftruncate(file, 1 << 20),
        lambda: fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK),
        lambda: mmap.mmap(file, 4096),
    ):
        with pytest.raises(PermissionError):
            change()


@pytest.mark.parametrize(
    "seals",
    [0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE],
    ids=["none", "may be written", "may shrink"],
)
def test_memory_that_its_creator_could_change_is_not_sealed(seals: int) -> None:
    descriptor = os.memfd_create("objcomm", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    assert not Share([descriptor]).is_final()
    assert not Share([os.open("/dev/zero", os.O_RDWR)]).is_final()  # another kind of file


def test_only_the_sealed_length_counts() -> None:
    """Its creator could still shrink it before."""
    descriptor = os.memfd_create("objcomm", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 100_000)
    share = Share([descriptor])
    os.ftruncate(descriptor, 5000)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 1 | 2 | 4 | 8)
    assert share.is_fixed()
    with pytest.raises(ValueError, match="of 5000"):
        share.mapped((0, 0), 100_000)
    with pytest.raises(ValueError, match="of 5000"):
        share.read_into(torch.zeros(100_000, dtype=torch.uint8), (0, 0))


def test_a_descriptor_that_cannot_be_read_is_refused() -> None:
    share = Share.of([counting(5000)])
    (file,) = share.descriptors
    other = Share([os.open(f"/proc/self/fd/{file}", os.O_WRONLY)])
    assert other.is_fixed()
    with pytest.raises(ValueError, match="Bad file descriptor"):
        other.read_into(torch.zeros(5000, dtype=torch.uint8), (0, 0))
    with pytest.raises(OSError, match="denied"):
        other.mapped((0, 0), 5000)


def test_a_write_to_one_mapping_is_seen_in_no_other() -> None:
    share = Share.of([counting(10_000)])
    first, second = mapped(share, 10_000), mapped(share, 10_000)
    first.fill_(7)
    assert torch.equal(second, counting(10_000))
    assert torch.equal(mapped(share, 10_000), counting(10_000))


@pytest.mark.parametrize(
    ("place", "nbytes"),
    [((0, 0), 5001), ((0, 4096), 905), ((0, 8192), 1), ((0, -4096), 1), ((1, 0), 1), ((-1, 0), 1)],
)
def test_a_place_outside_of_it_is_refused(place: Place, nbytes: int) -> None:
    share = Share.of([counting(5000)])
    with pytest.raises(ValueError, match=r"of (5000|1)$"):
        share.mapped(place, nbytes)
    with pytest.raises(ValueError, match=r"of (5000|1)$"):
        share.read_into(torch.zeros(nbytes, dtype=torch.uint8), place)


def test_it_is_freed_with_its_last_user() -> None:
    gc.collect()
    before, descriptors = mappings(), open_files()
    share = Share.of([counting(100_000), counting(100_000)])
    members = [mapped(share, 100_000, place) for place in places([100_000] * 2)]
    assert open_files() == descriptors + 1  # not one per mapping
    share.close()
    del share
    assert open_files() == descriptors
    assert mappings() == before + 2
    view = members.pop()[5:]
    members.clear()
    assert mappings() == before + 1  # keeping one keeps no other
    assert int(view[0]) == 6
    del view
    assert mappings() == before


def _moved_to_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()
    assert tensor.is_shared()
    return tensor


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor.resize_(tensor.numel()),
        copy.deepcopy,
        lambda tensor: torch.from_numpy(tensor.numpy()),
        lambda tensor: tensor.add_(1).sub_(1),
        _moved_to_shared_memory,
    ],
    ids=["resize_", "deepcopy", "numpy", "in place", "share_memory_"],
)
def test_a_tensor_in_it_is_like_any_other(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    flat = torch.arange(50_000.0)
    share = Share.of([flat.view(torch.uint8)])
    received = mapped(share, 200_000).view(torch.float32)
    share.close()
    assert torch.equal(use(received), flat)
    received.fill_(1)
    assert torch.equal(received, torch.ones(50_000))


def test_a_tensor_in_it_may_not_outgrow_it() -> None:
    """Like a tensor in torch's own shared memory."""
    share = Share.of([counting(5000)])
    with pytest.raises(RuntimeError, match="not resizable"):
        mapped(share, 5000).resize_(100_000)


def test_a_forked_process_has_its_own() -> None:
    run_python(
        """
        import os, torch
        torch.set_num_threads(1)  # a forked process has no others
        from objcomm._codecs.buffers import BufferKind, over
        from objcomm._transport.share import Share
        share = Share.of([torch.ones(100_000, dtype=torch.uint8)])
        tensor = over(BufferKind.TENSOR, share.mapped((0, 0), 100_000)).owner
        pid = os.fork()
        if not pid:
            tensor.fill_(2)
            os._exit(0 if tensor.sum() == 200_000 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert tensor.sum() == 100_000
        """
    )


def test_a_process_without_room_says_so_and_loses_nothing() -> None:
    run_python(
        """
        import resource, torch
        from pathlib import Path
        from objcomm._transport.share import Share
        share = Share.of([torch.ones(200 << 20, dtype=torch.uint8)])
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (100 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            share.mapped((0, 0), 200 << 20)
        except OSError:
            pass
        else:
            raise AssertionError("mapped")
        assert torch.frombuffer(share.mapped((0, 0), 10 << 20), dtype=torch.uint8).sum() == 10 << 20
        """
    )


def test_memory_that_is_being_written_is_not_mapped_by_a_forked_process() -> None:
    share = Share.with_room([100_000])
    share.flats[0].fill_(7)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # like a data loader's worker, which lives long
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        share.seal()
        assert mapped(share, 100_000).eq(7).all()
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_memory_that_another_process_can_write_is_not_sealed_but_can_be_read() -> None:
    share = Share.with_room([100_000])
    share.flats[0].fill_(7)
    other = mmap.mmap(share.descriptors[0], 100_000)
    with pytest.raises(OSError, match="busy"):
        share.seal()
    assert not share.is_final()
    room = counting(100_000)
    share.read_into(room, (0, 0))
    assert room.eq(7).all()
    other.close()
