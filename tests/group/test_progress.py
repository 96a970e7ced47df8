"""``progress=True``: bytes are counted while they move, and a bar shows them on one rank."""

import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from tqdm.auto import tqdm

import objcomm
from objcomm._algorithms.transfers import Transfers
from objcomm._observe.progress import Bar
from objcomm.errors import MissingDependencyError, TransportError
from tests.cases import case
from tests.group.helpers import assert_group_works, hear, outcome_of, say, subgroup, tell_all
from tests.ranks import OVER_GLOO, ranks, solo
from tests.workers import here

MIB = 1 << 20
#: Sent in pieces of at most 4 MiB.
LARGE_NBYTES = 20 * MIB


def large(fill: int = 1) -> torch.Tensor:
    return torch.full((LARGE_NBYTES,), fill, dtype=torch.uint8)


class Recording:
    """Replaces a bar and records its calls."""

    def __init__(self) -> None:
        self.total = 0
        self.pieces: list[int] = []
        self.is_closed = False

    def expect(self, nbytes: int) -> None:
        self.total += nbytes

    def moved(self, nbytes: int) -> None:
        self.pieces.append(nbytes)

    def close(self) -> None:
        self.is_closed = True


@contextlib.contextmanager
def recording(meter: Recording | None = None) -> Iterator[Recording]:
    """Record what the group's first rank would show."""
    found = meter or Recording()
    with mock.patch("objcomm._calls.call.bar_for", lambda _, rank: found if rank == 0 else None):
        yield found


@contextlib.contextmanager
def terminal(patience_s: float = 0.0) -> Iterator[io.StringIO]:
    """Capture standard error; bars appear after this time."""
    with (
        mock.patch("objcomm._observe.progress._PATIENCE_SECONDS", patience_s),
        contextlib.redirect_stderr(io.StringIO()) as shown,
    ):
        yield shown


def _calls(size: int) -> dict[str, tuple[Callable[..., object], int]]:
    """Each operation, and how many objects the first of this many ranks shows."""
    obj, last = large(), size - 1
    return {
        "broadcast": (partial(objcomm.broadcast, obj), 1),
        "broadcast from the last": (partial(objcomm.broadcast, obj, last), 1),
        "gather": (partial(objcomm.gather, obj), size - 1),
        "gather to the last": (partial(objcomm.gather, obj, last), 1),
        "all_gather": (partial(objcomm.all_gather, obj), size),
        "scatter": (partial(objcomm.scatter, [obj] * size), size - 1),
        "scatter from the last": (partial(objcomm.scatter, [obj] * size, last), 1),
        "async broadcast": (lambda **o: objcomm.broadcast(obj, async_op=True, **o).wait(), 1),
    }


@ranks(2, 3, 4)
def test_every_byte_is_counted_once_and_piece_by_piece() -> None:
    size = here().world_size
    for turn, (name, (call, objects)) in enumerate(_calls(size).items()):
        if (turn + size) % 3 == 0:  # each in two of the three world sizes
            continue
        with case(name), recording() as meter:
            call(progress=True)
            if here().rank == 0:
                assert sum(meter.pieces) == meter.total
                # The codec's own bytes may be counted as well.
                assert objects * LARGE_NBYTES <= meter.total < objects * LARGE_NBYTES + MIB
                assert max(meter.pieces) <= 4 * MIB
            else:
                assert meter.pieces == []
            assert meter.is_closed == (here().rank == 0)


@ranks(2)
def test_an_object_that_is_pickled_as_one_is_counted_too() -> None:
    words = [f"word {n}" for n in range(500_000)]
    for call in (objcomm.broadcast, objcomm.gather, objcomm.all_gather):
        with recording() as meter:
            call(words, progress=True)
        assert (len(meter.pieces) > 1) == (here().rank == 0)
        assert sum(meter.pieces) == meter.total


@ranks(2, 3)
def test_results_are_the_same_with_a_bar() -> None:
    rank, size = here().rank, here().world_size
    mixed: dict[str, Any] = {"w": large(7), "words": [str(n) for n in range(100_000)], "rank": rank}
    with recording():
        got = objcomm.broadcast(mixed, size - 1, progress=True)
        assert (got["rank"], got["words"]) == (size - 1, mixed["words"])
        assert torch.equal(got["w"], large(7))
        everybody = objcomm.all_gather(mixed, progress=True)
    assert [each["rank"] for each in everybody] == list(range(size))
    assert all(torch.equal(each["w"], large(7)) for each in everybody)
    assert_group_works()


class Telling(Recording):
    """Notifies the other rank when the third piece has moved."""

    def moved(self, nbytes: int) -> None:
        super().moved(nbytes)
        if len(self.pieces) == 3:
            say("third", str(sum(self.pieces)))


@contextlib.contextmanager
def after_pieces(count: int, action: Callable[[], object], step: str = "_take") -> Iterator[None]:
    """Run ``action`` when ``count`` pieces have arrived, or left, before the next one.

    Args:
        count: how many.
        action: what to run.
        step: ``_take`` is called when a piece has arrived, ``_send`` when one leaves.
    """
    original, numbers = getattr(Transfers, step), itertools.count(1)

    def counted(*args: Any, **options: Any) -> None:
        original(*args, **options)
        if next(numbers) == count:
            action()

    with mock.patch.object(Transfers, step, counted):
        yield


def _sender_has_counted() -> None:
    assert int(hear("third")) < LARGE_NBYTES


@ranks(2)
@pytest.mark.parametrize(("call", "root"), [(objcomm.broadcast, 0), (objcomm.gather, 1)])
def test_a_sender_counts_while_bytes_move_and_not_at_the_end(
    call: Callable[..., object], root: int
) -> None:
    # The receiver stops at the fourth piece until the sender has counted three.
    with recording(Telling()) as meter:
        if here().rank == 0:
            call(large(), root, progress=True)
            assert len(meter.pieces) > 3
        else:
            with after_pieces(4, _sender_has_counted):
                call(None, root, progress=True)


@ranks(3)
def test_several_senders_are_counted_in_turn() -> None:
    mine = large()[: (0, 6, 10)[here().rank] * MIB]
    with recording() as meter:
        objcomm.gather(mine, progress=True)
    if here().rank == 0:
        # Rank 1's and rank 2's first pieces, then their second ones, then the rest of rank 2's.
        assert meter.pieces == [4 * MIB, 4 * MIB, 2 * MIB, 4 * MIB, 2 * MIB]


@ranks(2)
def test_one_rank_alone_may_ask_for_it() -> None:
    is_first = here().rank == 0
    with recording() as meter:
        objcomm.gather(large(), progress=is_first)
        objcomm.broadcast(large(), 1, progress=is_first)
        objcomm.broadcast(large(), 0, progress=is_first)
        objcomm.broadcast(large(), 0, progress=not is_first)
    assert sum(meter.pieces) == meter.total == (3 * LARGE_NBYTES if is_first else 0)


@ranks(2, 4)
def test_the_first_rank_shows_a_bar_and_no_other_shows_anything() -> None:
    with terminal() as shown:
        objcomm.broadcast(large(), here().world_size - 1, progress=True)
    text = shown.getvalue()
    if here().rank == 0:
        first, *_, last = text.lstrip("\r").split("\r")
        assert re.match(r"broadcast: +\d+%\|.*\d\.\d+M/20\.0M \[", first)
        finished = r"broadcast: 100%\|.*\| 20\.0M/20\.0M \[\d\d:\d\d<00:00, .*B/s\] *\n$"
        assert re.match(finished, last)
    else:
        assert text == ""


@ranks(2)
def test_a_work_shows_a_bar_from_its_own_thread() -> None:
    with terminal() as shown:
        objcomm.gather(large(), progress=True, async_op=True).wait()
    assert ("20.0M/20.0M" in shown.getvalue()) == (here().rank == 0)


@ranks(3)
def test_the_first_rank_of_a_subgroup_shows_it() -> None:
    with subgroup(1, 2) as group, terminal() as shown:
        if here().rank:
            objcomm.gather(large(), group_dst=0, group=group, progress=True)
    assert bool(shown.getvalue()) == (here().rank == 1)


@ranks(2, disposable=True)
def test_a_call_that_ends_soon_shows_nothing_and_imports_nothing() -> None:
    sys.modules.pop("tqdm.auto", None)
    with terminal(60.0) as shown:  # the default of 0.5 s may pass too soon
        for nbytes in (10, 100_000, MIB):
            assert len(objcomm.broadcast(bytes(nbytes), progress=True)) == nbytes
            objcomm.gather(bytes(nbytes), progress=True)
    assert shown.getvalue() == ""
    assert "tqdm.auto" not in sys.modules


@ranks(2)
def test_a_bar_below_another_one_leaves_nothing_behind() -> None:
    with terminal() as shown:
        with tqdm(total=2, desc="epochs", disable=here().rank != 0) as epochs:
            objcomm.broadcast(large(), progress=True)
            epochs.update(2)
        lines = shown.getvalue().splitlines()
    if here().rank == 0:
        assert lines[-1].startswith("epochs: 100%")


def die_after(topic: str) -> None:
    hear(topic)
    os._exit(0)


@ranks(2, 3, expect_dead=(1,))
def test_a_death_in_the_middle_ends_the_bar_and_its_line() -> None:
    original = Bar.moved

    def moved(self: Bar, nbytes: int) -> None:
        original(self, nbytes)
        say("shown")

    with terminal() as shown:
        if here().rank == 1:
            with after_pieces(2, lambda: die_after("shown")):
                objcomm.broadcast(None, progress=True)
        if here().rank == 2:  # it may have everything before it learns of the death
            outcome_of(lambda: objcomm.broadcast(None, progress=True))
            return
        with mock.patch.object(Bar, "moved", moved), pytest.raises(TransportError, match="rank 1"):
            objcomm.broadcast(large(), progress=True)
    text = shown.getvalue()
    assert "M/20.0M" in text
    assert "100%" not in text
    assert text.endswith("\n")
    assert not getattr(tqdm, "_instances", ())


@ranks(2, expect_dead=(1,), environment=OVER_GLOO)  # which sends while no rank waits
def test_a_sender_that_dies_in_the_middle_ends_the_bar_and_its_line() -> None:
    with terminal() as shown:
        if here().rank == 1:
            with after_pieces(5, lambda: die_after("one has arrived"), "_send"):
                objcomm.gather(large(), progress=True)
        has_come = after_pieces(1, lambda: say("one has arrived"))
        with has_come, pytest.raises(TransportError, match="rank 1"):
            objcomm.gather(large(), progress=True)
    text = shown.getvalue()
    assert "100%" not in text
    assert text.endswith("\n")


class _Broken(io.StringIO):
    def write(self, text: str) -> int:
        del text
        raise BrokenPipeError


@ranks(2)
def test_a_bar_that_cannot_be_shown_ends_no_call_and_stops_no_other_thread() -> None:
    with terminal(), contextlib.redirect_stderr(_Broken()):
        assert len(objcomm.broadcast(large(), progress=True)) == LARGE_NBYTES
        # Another thread needs tqdm's lock too.
        objcomm.gather(large(), progress=True, async_op=True).wait()
    assert_group_works()


@ranks(1, 2)
def test_without_tqdm_every_rank_raises_before_any_traffic() -> None:
    objcomm.barrier()
    objcomm.reset_stats()
    with mock.patch.dict(sys.modules, {"tqdm": None}):
        for call in (objcomm.broadcast, objcomm.gather, objcomm.all_gather):
            with pytest.raises(MissingDependencyError, match=r"pip install tqdm$"):
                call("small", progress=True)
        assert outcome_of(lambda: objcomm.broadcast("small")) == "returned"
    assert set(objcomm.stats()) == {"broadcast"}
    tell_all("asked", "")
    assert_group_works()


@solo()
def test_a_world_of_one_has_nothing_to_show() -> None:
    with terminal() as shown:
        assert objcomm.gather("x", progress=True) == ["x"]
        assert objcomm.scatter([large()], progress=True).numel() == LARGE_NBYTES
    assert shown.getvalue() == ""
