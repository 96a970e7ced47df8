"""When two ranks' lines are the same, when different ones are logged, and how a name travels."""

import linecache
from collections.abc import Iterator
from unittest import mock

import pytest

from objcomm import DesyncError
from objcomm._observe import lines
from objcomm._observe.lines import check_lines
from objcomm._wire.header import Header, Operation
from tests.group.logs import collected

PROGRAM = """\
def share():
    if rank == 0:
        broadcast(1)
    elif rank == 1:
        broadcast(2)
    else:
        broadcast(3)
    broadcast(4)

def early():
    for each in range(3):
        if rank == 0:
            broadcast(5)
            continue
        broadcast(6)
    broadcast(7)

value = (
    broadcast(8)
    if rank == 0
    else broadcast(9)
)
"""


@pytest.fixture(autouse=True)
def _program() -> Iterator[None]:
    """Lines that are in no file, none of them logged before."""
    entry = (len(PROGRAM), None, PROGRAM.splitlines(keepends=True), "/job/train.py")
    with (
        mock.patch.object(lines, "_known", set()),
        mock.patch.dict(linecache.cache, {"/job/train.py": entry}),
    ):
        yield


def _header(rank: int, place: str, root: int = -1, name: str = "") -> Header:
    return Header(operation=Operation.BROADCAST, sender=rank, root=root, call_site=place, name=name)


def _line_of(text: str) -> str:
    number = next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if f"({text})" in line)
    return f"/job/train.py:{number}"


def _logged(mine: str, theirs: str, root: int = -1) -> list[str]:
    with collected() as found:
        check_lines(_header(0, mine, root), _header(1, theirs, root), "g", must_agree=False)
    assert all(vars(each)["group"] == "g" for each in found.records)
    return found.told


def test_a_pair_of_lines_is_logged_once_whichever_rank_is_on_which() -> None:
    (text,) = _logged("/job/train.py:3", "/job/train.py:8")
    assert "rank 0 is in broadcast (call 0) at /job/train.py:3, but rank 1 is in" in text
    assert "at /job/train.py:8: " in text
    assert "name=" in text
    assert not _logged("/job/train.py:3", "/job/train.py:8")
    assert not _logged("/job/train.py:8", "/job/train.py:3")
    assert _logged("/job/train.py:3", "/job/train.py:9")


def test_ranks_may_run_from_different_folders() -> None:
    theirs = "b/" * 31 + "train.py:3"
    check_lines(_header(0, "/a/train.py:3"), _header(1, theirs), "", must_agree=True)
    assert not _logged("/a/train.py:3", theirs)


@pytest.mark.parametrize("place", ["/job/train.py:4", "/job/eval.py:3", ""])
def test_other_lines_are_a_desync_if_they_must_agree(place: str) -> None:
    mine, theirs = _header(0, "/job/train.py:3", 0), _header(1, place, 0)
    for _ in range(2):
        with pytest.raises(DesyncError, match=r"same name=$") as caught:
            check_lines(mine, theirs, "", must_agree=True)
        assert caught.value.reason == "other lines"
        assert caught.value.positions == {0: mine.position, 1: theirs.position}


@pytest.mark.parametrize(
    "pair", [("1", "2"), ("1", "3"), ("2", "3"), ("5", "6"), ("8", "9")], ids="-".join
)
def test_a_branch_for_the_root_is_not_logged(pair: tuple[str, str]) -> None:
    mine, theirs = map(_line_of, pair)
    assert not _logged(mine, theirs, root=1)
    assert not _logged(theirs, mine, root=0)
    lines._known.clear()  # noqa: SLF001  # all are known by now
    assert _logged(mine, theirs, root=2)


@pytest.mark.parametrize(
    "pair", [("1", "4"), ("3", "4"), ("5", "7"), ("6", "7"), ("1", "5")], ids="-".join
)
def test_a_call_that_the_root_may_make_additionally_is_logged(pair: tuple[str, str]) -> None:
    mine, theirs = map(_line_of, pair)
    assert _logged(mine, theirs, root=0)


def test_branches_are_logged_if_no_rank_is_the_root() -> None:
    assert _logged(_line_of("1"), _line_of("2"))


@pytest.mark.parametrize("place", ["<stdin>:1", "/nowhere/train.py:3", "train.py", "é.py:x", ""])
def test_a_program_that_cannot_be_read_is_logged(place: str) -> None:
    assert _logged(place, "train.py:4", root=0)


def test_other_ranks_cannot_fill_the_memory() -> None:
    with mock.patch.object(lines, "_PAIRS_MAX", 3):
        texts = [_logged("/job/train.py:3", f"{number}.py:1") for number in range(5)]
        assert [len(each) for each in texts] == [1, 1, 1, 0, 0]
        assert len(lines._known) == 3  # noqa: SLF001  # the memory of logged pairs


@pytest.mark.parametrize(
    ("place", "name", "unpacked"),
    [
        ("/job/train.py:3", "x", ("/job/train.py:3", "x")),
        ("/job/train.py:3", "n" * 48, ("/job/train.py:3", "n" * 48)),
        ("/job/train.py:3", "n" * 49, ("/job/train.py:3", "n" * 48)),
        ("p" * 70 + ".py:3", "n" * 40, ("p" * 27 + ".py:3", "n" * 31)),
        ("p" * 70 + ".py:3", "x", ("p" * 57 + ".py:3", "x")),
        ("p" * 70 + ".py:3", "é" * 40, ("p" * 28 + ".py:3", "é" * 15)),
        ("", "n" * 64, ("", "n" * 63)),
        ("/job/train.py:3", "two\0parts", ("/job/train.py:3", "two\0parts")),
    ],
)
def test_line_and_name_share_a_field(place: str, name: str, unpacked: tuple[str, str]) -> None:
    header = Header.unpack(_header(0, place, name=name).pack())
    assert (header.call_site, header.name) == unpacked
    assert header.position.name == unpacked[1]
