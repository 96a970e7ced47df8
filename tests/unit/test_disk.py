"""What is in a folder, which lists of names are refused, and how files are cut into pieces."""

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from objcomm._training.disk import FOLDER, Copy, Listing, Part, is_listing, listed, pieces

_FILE = 0o644


def test_a_listing_has_folders_before_their_content_and_follows_links(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "a").mkdir(parents=True)
    (top / "a" / "run.sh").write_bytes(b"12")
    (top / "a" / "run.sh").chmod(0o751)
    (tmp_path / "elsewhere").write_bytes(b"123")
    (tmp_path / "elsewhere").chmod(_FILE)
    (top / "link").symlink_to(tmp_path / "elsewhere")
    (top / "again").symlink_to("a")
    found = listed(top)
    assert found.names == ["", "a", "a/run.sh", "again", "again/run.sh", "link"]
    assert found.sizes == [FOLDER, FOLDER, 2, FOLDER, 2, 3]
    assert [found.modes[at] for at in (2, 5)] == [0o751, _FILE]
    assert found.nbytes == 7
    assert is_listing([found.names, found.sizes, found.modes])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda top: os.mkfifo(top / "pipe"), "neither a file nor a folder: '.*/pipe'"),
        (lambda top: (top / "loop").symlink_to(top), "a link to a folder around it: '.*/loop'"),
        (lambda top: (top / "gone").symlink_to("nowhere"), "No such file or directory: '.*/gone'"),
    ],
    ids=["a pipe", "a loop", "a dangling link"],
)
def test_what_cannot_be_copied_is_named(tmp_path: Path, make: Any, reason: str) -> None:
    make(tmp_path)
    with pytest.raises(OSError, match=reason):
        listed(tmp_path)


def _folder(*names: Any, sizes: Any = None) -> list[Any]:
    """A list of files in a folder, as it is received."""
    return [["", *names], sizes or [FOLDER] + [1] * len(names), [_FILE] * (1 + len(names))]


GOOD = {
    "a file": [[""], [3], [_FILE]],
    "an empty folder": _folder(),
    "a file in a folder": _folder("a", "a/b", sizes=[FOLDER, FOLDER, 0]),
    "dots in names": _folder("..a", "a..", "...", " "),
    "a name that is not text": _folder(os.fsdecode(b"\xff")),
}
HOSTILE = {
    "above": _folder(".."),
    "above, by a file": _folder("../evil"),
    "above, from below": _folder("a", "a/../../evil", sizes=[FOLDER, FOLDER, 1]),
    "from the root": _folder("/etc/passwd"),
    "the root's child": _folder("/evil"),
    "the folder itself": _folder("."),
    "no name": _folder(""),
    "no last name": _folder("a", "a/", sizes=[FOLDER, FOLDER, 1]),
    "no name between": _folder("a", "a//b", sizes=[FOLDER, FOLDER, 1]),
    "a zero byte": _folder("a\0b"),
    "twice": _folder("a", "a"),
    "in a file": _folder("a", "a/b"),
    "not in a folder": _folder("a/b"),
    "before its folder": _folder("a/b", "a", sizes=[FOLDER, 1, FOLDER]),
    "in a file that is everything": [["", "a"], [1, 1], [_FILE] * 2],
    "not from the top": [["a"], [1], [_FILE]],
    "nothing": [[], [], []],
    "a negative size": _folder("a", sizes=[FOLDER, -2]),
    "a size that is not a number": _folder("a", sizes=[FOLDER, True]),
    "a name in bytes": _folder(b"a"),
    "a set-user-id bit": [[""], [1], [0o4755]],
    "of different lengths": [[""], [1, 1], [_FILE]],
    "two lists": [[""], [1]],
    "no lists": "abc",
}


@pytest.mark.parametrize("name", GOOD)
def test_a_list_of_files_is_accepted(name: str) -> None:
    assert is_listing(GOOD[name])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_malformed_or_hostile_list_of_files_is_refused(name: str) -> None:
    assert not is_listing(HOSTILE[name])


@pytest.mark.parametrize(
    ("sizes", "starts", "nbytes", "cut"),
    [
        ([0], [0], 4, []),
        ([4], [0], 4, [[Part(0, 0, 4)]]),
        ([5], [0], 4, [[Part(0, 0, 4)], [Part(0, 4, 1)]]),
        ([5], [4], 4, [[Part(0, 4, 1)]]),
        ([FOLDER, 3, 0, 6], [0, 1, 0, 0], 4, [[Part(1, 1, 2), Part(3, 0, 2)], [Part(3, 2, 4)]]),
        ([FOLDER, 3, 6], [0, 3, 6], 4, []),
    ],
)
def test_files_are_cut_into_pieces(
    sizes: list[int], starts: list[int], nbytes: int, cut: list[list[Part]]
) -> None:
    assert list(pieces(sizes, starts, nbytes)) == cut


@pytest.mark.parametrize("name", ["a", "m/9", "z", "m"])
def test_a_file_that_cannot_be_synced_leaves_no_copy(name: str, tmp_path: Path) -> None:
    names = ["", "a", "m", *(f"m/{each}" for each in range(50)), "z"]
    sizes = [FOLDER if each in {"", "m"} else 0 for each in names]
    copy = Copy(tmp_path / "to", Listing(names, sizes, [0o755] * len(names)))
    copy.begin()
    failing = copy.path / name
    sync = os.fsync

    def fail(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve() == failing.resolve():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    with mock.patch("os.fsync", fail), pytest.raises(OSError, match="Input/output") as caught:
        copy.finish()
    copy.close()
    assert caught.value.filename == str(failing)
    assert not list(tmp_path.iterdir())


def test_a_listing_is_restored_from_its_lists() -> None:
    assert Listing(*GOOD["a file"]).nbytes == 3
    assert not Listing(*GOOD["a file"]).is_folder
