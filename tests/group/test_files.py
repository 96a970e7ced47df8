"""``broadcast_file``: a file or folder on every host, all of it or nothing."""

import contextlib
import errno
import fcntl
import itertools
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, DesyncError, NotInGroupError, TransportError, UsageError
from objcomm._training import files
from objcomm._training.disk import FOLDER, Copy, Listing, Reader, digest_of_start, nbytes_of
from objcomm._wire.header import Operation
from tests.cases import case
from tests.group.helpers import assert_group_works, subgroup, tell_all
from tests.group.large_objects import pss_nbytes
from tests.group.test_progress import Recording
from tests.group.test_several_hosts import on_hosts
from tests.ranks import OVER_GLOO, ranks, solo
from tests.workers import here

# Longer than a message that is sent without being asked for: the source waits for receivers.
_PIECE_NBYTES = 2 << 20
_SMALL_NBYTES = 1 << 16
_NBYTES = 5 * _PIECE_NBYTES + 77
_NOT_TEXT = os.fsdecode(b"not text \xff")

#: The host of each rank.
LAYOUTS: dict[str, Callable[[int], int]] = {
    "one host": lambda _: 0,
    "two hosts": lambda rank: rank % 2,
    "a host for each rank": lambda rank: rank,
}


@contextlib.contextmanager
def hosts(
    layout: str = "a host for each rank", piece_nbytes: int = _PIECE_NBYTES
) -> Iterator[Path]:
    """Connect as on several hosts, and send in small pieces; gives the name of this rank's host."""
    numbers = [LAYOUTS[layout](rank) for rank in range(here().world_size)]
    with (
        on_hosts(*numbers),
        mock.patch.object(files, "_PIECE_NBYTES", piece_nbytes),
        mock.patch.object(files, "_PIECES_OF_A_STRETCH", 2),
    ):
        yield Path(f"host{numbers[here().rank]}")


def only_on(rank: int, context: contextlib.AbstractContextManager[Any]) -> Any:
    """A context that only one rank enters."""
    return context if here().rank == rank else contextlib.nullcontext()


def content(seed: int = 0, nbytes: int = _NBYTES) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def make_source(folder: Path) -> None:
    """A file on rank 0."""
    if here().rank == 0:
        (folder / "source").write_bytes(content())


def make_tree(top: Path, seed: int = 0) -> None:
    """A folder with files of several sizes, links, names and permissions."""
    (top / "deep" / "deeper").mkdir(parents=True)
    (top / "empty folder").mkdir()
    (top / "weights.bin").write_bytes(content(seed))
    (top / "deep" / "empty").touch()
    (top / "deep" / "deeper" / "vocab.json").write_bytes(content(seed + 1, 100))
    (top / "run.sh").write_bytes(b"#!/bin/sh\n")
    (top / "run.sh").chmod(0o751)
    (top / "secret").write_bytes(b"key")
    (top / "secret").chmod(0o400)
    (top / _NOT_TEXT).write_bytes(b"a name that is not UTF-8")
    (top / "link").symlink_to("weights.bin")


def found_in(top: Path) -> dict[str, tuple[bytes | None, int]]:
    """The content and permissions of everything below, and whether it is a file of its own."""
    return {
        str(each.relative_to(top)): (
            each.read_bytes() if each.is_file() else None,
            each.stat().st_mode,
        )
        for each in sorted([top, *top.rglob("*")])
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@ranks(1, 2, 3, 4, disposable=True)
def test_files_and_folders_arrive_on_every_host(layout: str, tmp_path: Path) -> None:
    rank, size = here().rank, here().world_size
    with hosts(layout, _SMALL_NBYTES) as host:
        for src in {0, size - 1}:
            source = tmp_path / f"source {src}"
            if rank == src:
                make_tree(source, src)
            for name in ("", "weights.bin", "deep/empty", "empty folder"):
                with case(src, name):
                    path, to = source / name, tmp_path / host / f"{src}" / f"copy of {name[:7]}"
                    assert objcomm.broadcast_file(path if rank == src else None, to, src) == to
                    assert found_in(to) == found_in(path)
                    assert not [each for each in (to, *to.rglob("*")) if each.is_symlink()]
                    views = objcomm.broadcast_file(str(path) if rank == src else None, src=src)
                    if path.is_file():
                        views = {".": views}
                    wanted = {at: got for at, (got, _) in found_in(path).items() if got is not None}
                    assert {name: bytes(view) for name, view in views.items()} == wanted
                    assert all(view.readonly for view in views.values())
        assert_group_works()
        assert not list(tmp_path.rglob("*.objcomm-partial"))


@ranks(3, disposable=True)
def test_a_subgroup_without_rank_0_has_its_own_sources(tmp_path: Path) -> None:
    rank, path = here().rank, tmp_path / "source"
    if rank:
        path = path.with_name(f"source{rank}")
        path.write_bytes(content(rank))
    with hosts() as host, subgroup(1, 2) as group:
        if rank == 0:
            with pytest.raises(NotInGroupError):
                objcomm.broadcast_file(path, tmp_path / host, group=group)
        sources: list[tuple[Any, int]] = [({}, 1), ({"src": 2}, 2), ({"group_src": 1}, 2)]
        for options, src in sources if rank else []:
            to = tmp_path / host
            objcomm.broadcast_file(path, to, group=group, **options)
            assert to.read_bytes() == content(src)


@ranks(2, disposable=True)
def test_the_sources_own_file_is_not_touched(tmp_path: Path) -> None:
    for source in ("file", "folder"):
        own = tmp_path / str(here().rank) / source  # the same name on different disks
        if here().rank == 0 and source == "folder":
            make_tree(own)
        elif here().rank == 0:
            own.parent.mkdir()
            own.write_bytes(content())
        before = own.stat().st_ino if own.exists() else 0
        with hosts():
            objcomm.broadcast_file(own, own)
            objcomm.barrier()
        assert found_in(own) == found_in(tmp_path / "0" / source)
        assert before in {0, own.stat().st_ino}


@ranks(2, disposable=True)
def test_an_existing_file_is_replaced_atomically(tmp_path: Path) -> None:
    to = tmp_path / f"{here().rank}"
    to.write_bytes(b"old")
    make_source(tmp_path)
    with hosts(), to.open("rb") as old:
        objcomm.broadcast_file(tmp_path / "source", to)
        assert (old.read(), to.read_bytes()) == (b"old", content())


@ranks(3, disposable=True)
def test_ranks_of_one_host_share_memory(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "source", 24 << 20
    if here().rank == 0:
        path.write_bytes(content(nbytes=nbytes))
    objcomm.broadcast_file(path).tobytes()  # what a first call also allocates
    copies: list[float] = []
    view: Any = None
    for _ in range(3):  # one-time allocations are not in all of them
        view = None
        objcomm.barrier()
        before = pss_nbytes()
        view = objcomm.broadcast_file(path)
        assert np.frombuffer(view, dtype=np.uint8).any()
        objcomm.barrier()
        copies.append(sum(objcomm.all_gather(pss_nbytes() - before)) / nbytes)
    assert min(copies) < 1.5, copies  # 3 if each rank had its own
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1


@ranks(2, environment=OVER_GLOO)
def test_over_gloo_every_rank_has_its_own_memory(tmp_path: Path) -> None:
    if here().rank == 0:
        make_tree(tmp_path / "source")
    with hosts("one host") as host:
        views = objcomm.broadcast_file(tmp_path / "source")
        assert bytes(views["weights.bin"]) == bytes(views["link"]) == content()
        to = objcomm.broadcast_file(tmp_path / "source", tmp_path / host)
        assert found_in(to) == found_in(tmp_path / "source")


# ----------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def at_call(number: int, target: Any, name: str, action: Callable[..., object]) -> Iterator[None]:
    """Run an action, with the same arguments, before one of the calls of a function."""
    original, numbers = getattr(target, name), itertools.count(1)

    def counted(*given: Any, **named: Any) -> Any:
        if next(numbers) == number:
            action(*given)
        return original(*given, **named)

    with mock.patch.object(target, name, counted):
        yield


def _fail_to_read(*_: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "the disk")


def reading_fails(*_: object) -> Any:
    """Fail the source's fourth piece with an error of its disk."""
    return at_call(4, Reader, "read", _fail_to_read)


def changing(change: Callable[[Path], object]) -> Callable[[Path, Path], Any]:
    """Change the source's file after its first piece was read."""

    @contextlib.contextmanager
    def changed(path: Path, _to: Path) -> Iterator[None]:
        with at_call(2, Reader, "read", lambda *_: change(path)):
            yield
        path.write_bytes(content())

    return changed


def damaged(damage: Callable[[torch.Tensor], object]) -> Callable[[Path, Path], Any]:
    """Damage the third piece that a rank receives."""
    return lambda *_: at_call(3, files, "_write", lambda _target, _piece, flat: damage(flat))


def flip_bit(flat: torch.Tensor) -> None:
    flat[7] ^= 1


@contextlib.contextmanager
def missing(path: Path, _to: Path) -> Iterator[None]:
    path.rename(path.with_name("away"))
    yield
    path.with_name("away").rename(path)


@contextlib.contextmanager
def full(*_: object) -> Iterator[None]:
    """A disk that takes only the first three pieces."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * _PIECE_NBYTES + 5, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def full_from_the_start(*_: object) -> Any:
    return mock.patch("shutil.disk_usage", return_value=SimpleNamespace(total=10**9, free=10))


def hostile(*_: object) -> Any:
    """A source whose list of files leads out of the folder."""
    evil = Listing(["", "../evil"], [FOLDER, 1], [0o755, 0o644])
    return mock.patch.object(files, "listed", return_value=evil)


@contextlib.contextmanager
def in_the_way(_path: Path, to: Path) -> Iterator[None]:
    to.mkdir(parents=True)
    (to / "something").touch()
    yield
    shutil.rmtree(to)


_CHANGED = "OSError: .*it has changed since the transfer began: .*/source'"
_DAMAGED = "WireError: a piece of a file has another"

#: Faults: whether they strike the last or the first rank, the error, and a context.
FAULTS: dict[str, tuple[bool, str, Callable[[Path, Path], Any]]] = {
    "no such file": (False, "FileNotFoundError: .*No such file or dir.*: .*/source'", missing),
    "the source's disk": (False, "OSError: .*Input/output error: 'the disk'", reading_fails),
    "the source shrinks": (False, _CHANGED, changing(lambda path: os.truncate(path, 10))),
    "the source changes": (False, _CHANGED, changing(lambda path: path.write_bytes(content(1)))),
    "a disk becomes full": (True, "OSError: .*File too large: .*copy", full),
    "a disk is full": (True, "OSError: .*No space left on device: .*copy", full_from_the_start),
    "a folder in the way": (True, "IsADirectoryError: ", in_the_way),
    "bytes change on the way": (True, _DAMAGED, damaged(flip_bit)),
    "a piece is zero on the way": (True, _DAMAGED, damaged(torch.Tensor.zero_)),
    "hostile names": (False, "DecodeError: .*it is not a list of files", hostile),
}


@pytest.mark.parametrize("name", FAULTS)
@ranks(2, 3, disposable=True)
def test_an_error_on_one_rank_is_raised_on_all_and_leaves_nothing(
    name: str, tmp_path: Path
) -> None:
    is_last, text, fault = FAULTS[name]
    rank, last = here().rank, here().world_size - 1
    struck = last if is_last else 0
    failing = {*range(1, last + 1)} if name == "hostile names" else {struck}
    path = tmp_path / "source"
    make_source(tmp_path)
    with hosts() as host:
        to = tmp_path / host / "copy"
        raised = pytest.raises(CollectiveError, match=text)
        with only_on(struck, fault(path, to)), raised as caught:
            objcomm.broadcast_file(path, to)
        assert caught.value.operation == "broadcast_file"
        assert set(caught.value.failures) == failing
        assert (caught.value.__cause__ is not None) == (rank in failing)
        assert not to.exists()
        tell_all("nothing is there", "")
        assert not list(tmp_path.rglob("evil"))
        if name.startswith("a disk") and rank == struck:
            assert not list(tmp_path.glob(f"{host}/.*"))
        objcomm.broadcast_file(path, to)
        assert to.read_bytes() == content()
        assert_group_works()


#: The arguments, given a folder, and the error.
WRONG: dict[str, tuple[Callable[[Path], tuple[Any, ...]], str]] = {
    "no path": (lambda _: (None,), "the source passed path=None"),
    "an empty path": (lambda _: ("",), "the source passed path=''"),
    "into itself": (lambda top: (top, top / "deep" / "copy"), "is inside the folder path="),
    "over a folder": (lambda top: (top / "deep", top), "the destination of .* exists; remove it"),
}


@pytest.mark.parametrize("name", WRONG)
@ranks(1, 2)
def test_a_wrong_path_is_refused_on_all_ranks(name: str, tmp_path: Path) -> None:
    arguments, text = WRONG[name]
    if here().rank == 0:
        make_tree(tmp_path / "top")
    with pytest.raises(CollectiveError, match=text):
        objcomm.broadcast_file(*arguments(tmp_path / "top"))
    assert_group_works()


@pytest.mark.parametrize("to", ["", ".", "/"])
@ranks(2)
def test_a_copy_without_a_name_is_refused(to: str) -> None:
    with pytest.raises(UsageError, match=f"to='{to}' does not end in a name"):
        objcomm.broadcast_file("source", to)


@ranks(3, 4, disposable=True)
def test_ranks_of_one_host_must_name_the_same_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of them writes: another name would not exist."""
    rank, last = here().rank, here().world_size - 1
    make_source(tmp_path)
    path, host = tmp_path / "source", tmp_path / f"{rank % 2}"
    monkeypatch.chdir(tmp_path)
    for to, is_right in {
        host / f"of {'another' if rank == last else 'all'}": False,
        host / ".." / host.name / "of all": True,
        Path(host.name, "of all, relative"): True,
    }.items():
        with hosts("two hosts"), case(to.name):
            if is_right:
                assert objcomm.broadcast_file(path, to).read_bytes() == content()
                continue
            with pytest.raises(CollectiveError, match="must be the same on all ranks") as caught:
                objcomm.broadcast_file(path, to)
            assert set(caught.value.failures) == {last}
            assert not host.exists()
    assert_group_works()


@ranks(2)
def test_ranks_that_want_memory_and_ranks_that_want_a_file_are_out_of_step(tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    with pytest.raises(DesyncError, match=r"different op=, to=,"):
        objcomm.broadcast_file(tmp_path / "source", tmp_path / "to" if here().rank else None)
    objcomm.reset_stats()
    objcomm.broadcast_file(tmp_path / "source")
    assert set(objcomm.stats()) == {Operation.BROADCAST_FILE.name.lower()}


@ranks(2, disposable=True)
def test_memory_beyond_a_limit_is_not_allocated(tmp_path: Path) -> None:
    make_source(tmp_path)
    limit = objcomm.configure(max_operation_nbytes=_NBYTES - 1) if here().rank else None
    with (
        hosts(),
        limit or contextlib.nullcontext(),
        mock.patch.object(files, "_InMemory", side_effect=AssertionError("allocated")),
        pytest.raises(CollectiveError, match=f"files of {_NBYTES} bytes are more than the limit"),
    ):
        objcomm.broadcast_file(tmp_path / "source")
    assert_group_works()


@ranks(2, disposable=True)
def test_two_processes_do_not_write_the_same_copy(tmp_path: Path) -> None:
    make_source(tmp_path)
    to = tmp_path / f"{here().rank}"
    partial = tmp_path / f".{to.name}.objcomm-partial"
    with hosts(), partial.open("wb") as other:
        if here().rank:
            fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CollectiveError, match="another process writes this copy") as caught:
            objcomm.broadcast_file(tmp_path / "source", to)
        assert set(caught.value.failures) == {1}
        assert partial.exists()


# ----------------------------------------------------------------------------------- resuming


def interrupt(source: Path, to: Path) -> None:
    """Begin a transfer that fails in the middle."""
    with only_on(0, reading_fails()), pytest.raises(CollectiveError):
        objcomm.broadcast_file(source, to)


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """Count the bytes that the source reads in pieces."""
    read, counted = Reader.read, [0]

    def counted_read(self: Reader, piece: Any, into: memoryview) -> None:
        counted[0] += nbytes_of(piece)
        read(self, piece, into)

    with mock.patch.object(Reader, "read", counted_read):
        yield counted


def _longer(file: Path) -> None:
    file.write_bytes(file.read_bytes().ljust(2 * _NBYTES))


def _flip(file: Path) -> None:
    kept = bytearray(file.read_bytes())
    kept[len(kept) // 2] ^= 1
    file.write_bytes(kept)


def _link(file: Path) -> None:
    victim = file.parents[1] / f"victim of {file.parent.name}"
    victim.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(victim)


def _hard_link(file: Path) -> None:
    os.link(file, file.parents[1] / f"victim of {file.parent.name}")


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


#: What happens to a host's temporary copy, and whether the next call continues it.
TAMPERED: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (lambda _: None, True),
    "a file that has gone from the source": (lambda file: _longer(file.with_name("old")), True),
    "a byte": (_flip, False),
    "a longer file": (_longer, False),
    "a link": (_link, False),
    "a hard link": (_hard_link, False),
    "a folder": (_folder, False),
    "no file": (lambda file: file.unlink(), False),
}


@pytest.mark.parametrize("name", TAMPERED)
@ranks(2, disposable=True)
def test_an_interrupted_transfer_is_continued_if_the_partial_copy_is_right(
    name: str, tmp_path: Path
) -> None:
    tamper, is_continued = TAMPERED[name]
    rank, source = here().rank, tmp_path / "source"
    with hosts() as host:
        to = tmp_path / host / "copy"
        if rank == 0:
            make_tree(source)
        interrupt(source, to)
        file = to.with_name(".copy.objcomm-partial") / "link"  # comes before other large files
        assert _PIECE_NBYTES < file.stat().st_size < _NBYTES
        if rank == 1:
            if name.startswith("a file that"):
                file.with_name("old").touch()
            tamper(file)
        victims = {each: each.read_bytes() for each in (tmp_path / "host1").glob("victim*")}
        with counting() as counted:
            objcomm.broadcast_file(source, to)
        assert found_in(to) == found_in(source)
        assert all(each.read_bytes() == before for each, before in victims.items())
        if rank == 0:
            total = sum(len(each) for each, _ in found_in(source).values() if each)
            assert (counted[0] < total - _PIECE_NBYTES) == is_continued


@ranks(2, disposable=True)
def test_a_source_that_changes_after_its_digest_is_not_mixed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_source(tmp_path)

    def digest_and_change(path: Path, nbytes: int) -> bytes:
        found = digest_of_start(path, nbytes)
        if path == source:
            path.write_bytes(content(1))
        return found

    with hosts() as host:
        to = tmp_path / host
        interrupt(source, to)
        with (
            mock.patch(f"{files.__name__}.digest_of_start", digest_and_change),
            pytest.raises(CollectiveError, match="it has changed since the transfer began"),
        ):
            objcomm.broadcast_file(source, to)
        assert not to.exists()
        objcomm.broadcast_file(source, to)
        assert to.read_bytes() == content(1)


def _outlive(victim: int, layout: str, tmp_path: Path) -> None:
    """Let a rank die in the middle; the others raise, and repeat the call without it.

    It dies when it writes its third piece; rank 2, which only waits, when it begins to wait.
    """
    survivors = [each for each in range(4) if each != victim]
    dying: Any = at_call(3, Copy, "write", lambda *_: os._exit(1))
    if victim == 2:
        dying = mock.patch.object(files, "Path", side_effect=lambda _: os._exit(1))
    make_source(tmp_path)
    with hosts(layout) as host:
        to = tmp_path / host / "copy"
        assert_group_works()
        with only_on(victim, dying), pytest.raises(TransportError) as caught:
            objcomm.broadcast_file(tmp_path / "source", to)
        assert caught.value.peers == (victim,)
        # Its host's copy may be complete when a rank dies that only waits.
        assert not to.exists() or (victim == 2 and to.read_bytes() == content())
        group = objcomm.new_group(survivors)
        objcomm.broadcast_file(tmp_path / "source", to, group=group)
        assert to.read_bytes() == content()
        dist.destroy_process_group(group)


@ranks(4, expect_dead={0})
def test_the_death_of_the_source_is_reported_on_all_ranks(tmp_path: Path) -> None:
    _outlive(0, "a host for each rank", tmp_path)


@ranks(4, expect_dead={1})
def test_the_death_of_a_rank_that_passes_pieces_on_is_reported_on_all_ranks(tmp_path: Path) -> None:
    _outlive(1, "a host for each rank", tmp_path)


@ranks(4, expect_dead={3})
def test_the_death_of_the_last_rank_is_reported_on_all_ranks(tmp_path: Path) -> None:
    _outlive(3, "a host for each rank", tmp_path)


@ranks(4, expect_dead={2})
def test_the_death_of_a_rank_that_only_waits_is_reported_on_all_ranks(tmp_path: Path) -> None:
    _outlive(2, "two hosts", tmp_path)


# ----------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("src", [0, 1])
@ranks(2, disposable=True)
def test_the_source_shows_progress(src: int, tmp_path: Path) -> None:
    make_source(tmp_path)
    meter = Recording()
    shown = mock.patch.object(files, "bar_for", lambda _, nth: None if nth else meter)
    with hosts() as host, shown:
        objcomm.barrier()
        objcomm.broadcast_file(tmp_path / "source", tmp_path / host, src, progress=True)
    assert (meter.total, sum(meter.pieces)) == ((_NBYTES,) * 2 if here().rank == src else (0, 0))
    assert meter.is_closed == (here().rank == src)


@solo()
def test_without_torch_distributed_it_copies(tmp_path: Path) -> None:
    make_tree(tmp_path / "source")
    to = objcomm.broadcast_file(tmp_path / "source", tmp_path / "to")
    assert found_in(to) == found_in(tmp_path / "source")
    assert bytes(objcomm.broadcast_file(to / "weights.bin")) == content()
    with pytest.raises(CollectiveError, match="No such file"):
        objcomm.broadcast_file(tmp_path / "nothing", to)
