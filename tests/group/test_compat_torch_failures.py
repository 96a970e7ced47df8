"""``objcomm.compat.torch``: which calls fail, on which ranks, and that no list changes."""

import fractions
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, DesyncError, ForbiddenTypeError, ObjcommError, UsageError
from objcomm.compat import torch as dist_objects
from tests.group.helpers import assert_group_works, error_in, hear, say
from tests.ranks import ranks
from tests.workers import here

Action = Callable[[], object]

BAD: Any = threading.Lock()  # no codec accepts it


def fails_on(rank: int, call: Action, text: str) -> Any:
    """The error of a call that must fail because of one rank."""
    error = error_in(CollectiveError, call, text)
    assert set(error.failures) == {rank}
    return error


@ranks(2)
def test_only_the_receiver_decides_what_it_accepts_in_a_list() -> None:
    if here().rank == 0:
        dist_objects.send_object_list([fractions.Fraction(1, 3)], dst=1)
    else:
        box = [None]
        with pytest.raises(ForbiddenTypeError, match="Fraction"):
            dist_objects.recv_object_list(box, src=0, weights_only=True)
        assert box == [None]
    assert_group_works()


@ranks(3)
def test_a_wrong_argument_is_refused_before_any_traffic() -> None:
    box: list[Any] = [None, None, None]
    peer = 1 if here().rank == 0 else 0
    no_group: Any = "world"
    group_is_text = "all_gather_object: group='world' must"
    refused: list[tuple[Action, str]] = [
        (lambda: dist_objects.broadcast_object_list(box, 0, group_src=0), "were both given"),
        (lambda: dist_objects.broadcast_object_list(box, 7), "src=7 is not in"),
        (lambda: dist_objects.gather_object(1, box, 0, group_dst=0), "were both given"),
        (lambda: dist_objects.scatter_object_list(box, box, group_src=3), "group_src=3 is not in"),
        (lambda: dist_objects.all_gather_object(box, 1, group=no_group), group_is_text),
        (lambda: dist_objects.send_object_list(box), "pass dst= or group_dst="),
        (lambda: dist_objects.send_object_list(box, here().rank), "this rank itself"),
        (lambda: dist_objects.send_object_list(5, peer), "give a list"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: dist_objects.recv_object_list(box, here().rank), "this rank itself"),
        (lambda: dist_objects.recv_object_list(None, peer), "give a list"),  # type: ignore[arg-type]  # wrong on purpose
    ]
    for faulty, text in refused:
        with pytest.raises(ValueError, match=text):  # torch raises ValueErrors for most of these
            faulty()
    assert box == [None, None, None]
    assert_group_works()


def raised_by(call: Callable[[Any], object], library: object) -> Exception:
    """Return the exception that a library raises in a call."""
    try:
        call(library)
    except Exception as error:  # noqa: BLE001  # the test compares its class
        return error
    pytest.fail("it should have raised")


@ranks(1)
def test_in_a_world_of_one_torchs_class_catches_each_error() -> None:
    # With one rank, no other rank can be left waiting, so torch's own error can be compared.
    box: Any = [None]
    wrong: list[Callable[[Any], object]] = [
        lambda lib: lib.all_gather_object([], 1),
        lambda lib: lib.all_gather_object(None, 1),
        lambda lib: lib.all_gather_object((None,), 1),
        lambda lib: lib.all_gather_object(box, BAD),
        lambda lib: lib.broadcast_object_list(None),
        lambda lib: lib.broadcast_object_list(5),
        lambda lib: lib.broadcast_object_list(box, 7),
        lambda lib: lib.broadcast_object_list(box, -1),
        lambda lib: lib.broadcast_object_list(box, group_src=7),
        lambda lib: lib.broadcast_object_list(box, "0"),
        lambda lib: lib.broadcast_object_list(box, 0, group_src=0),
        lambda lib: lib.gather_object(1),
        lambda lib: lib.gather_object(1, []),
        lambda lib: lib.gather_object(1, (None,)),
        lambda lib: lib.gather_object(1, 5),
        lambda lib: lib.gather_object(1, box, 7),
        lambda lib: lib.gather_object(1, None, 7),
        lambda lib: lib.scatter_object_list([], [1]),
        lambda lib: lib.scatter_object_list((None,), [1]),
        lambda lib: lib.scatter_object_list(box),
        lambda lib: lib.scatter_object_list(box, []),
        lambda lib: lib.scatter_object_list(box, [1, 2]),
        lambda lib: lib.scatter_object_list(box, 5),
        lambda lib: lib.scatter_object_list(box, [1], 7),
        lambda lib: lib.scatter_object_list(box, [1], 0.5),
        lambda lib: lib.send_object_list([1]),
        lambda lib: lib.send_object_list([1], 0),
        lambda lib: lib.recv_object_list([1], 0),
    ]
    for number, call in enumerate(wrong):
        theirs, ours = raised_by(call, dist), raised_by(call, dist_objects)
        assert isinstance(ours, ObjcommError), (number, ours)
        assert isinstance(ours, type(theirs)), (number, theirs, ours)
        again = pickle.loads(pickle.dumps(ours))  # noqa: S301  # pickled here
        assert (type(again), again.args) == (type(ours), ours.args)
    assert box == [None]
    assert_group_works()


@ranks(3)
def test_every_rank_can_catch_torchs_class_and_finds_the_cause() -> None:
    is_last = here().rank == 2
    out: list[Any] = [None]
    full: list[Any] = [None] * 3
    short: Any = out if is_last else full
    none: Any = None if is_last else full
    five: Any = 5
    wrong: list[tuple[type[Exception], str, Action]] = [
        (IndexError, "has 1 entries", lambda: dist_objects.all_gather_object(short, 1)),
        (TypeError, "not a NoneType", lambda: dist_objects.all_gather_object(none, 1)),
        (TypeError, "not a NoneType", lambda: dist_objects.broadcast_object_list(none, 2)),
        (ValueError, "an entry", lambda: dist_objects.scatter_object_list([], full, 2)),
        (ValueError, "not a list of 0", lambda: dist_objects.scatter_object_list(out, [], 2)),
        (RuntimeError, "a list of 2", lambda: dist_objects.scatter_object_list(out, full[:2], 2)),
        (TypeError, "not a int", lambda: dist_objects.scatter_object_list(out, five, 2)),
    ]
    for kind, text, call in wrong:
        error = fails_on(2, call, "failed on rank 2")
        assert isinstance(error, kind)
        assert isinstance(error.__cause__, UsageError)
        assert isinstance(error.__cause__, kind)
        assert text in str(error.__cause__)
        # The error has only torch's class; a further one could select another except clause.
        others = {ValueError, TypeError, IndexError, RuntimeError} - {kind}
        assert not any(isinstance(error, each) for each in others)
        # The failing rank shows its cause; the others have its traceback in the text.
        assert ("Traceback of rank 2" in str(error)) is not is_last
    assert (out, full) == ([None], [None] * 3)
    assert_group_works()


@ranks(3)
def test_an_error_on_some_ranks_has_torchs_class_there() -> None:
    rank = here().rank
    lists: list[tuple[type[Exception], Any]] = [
        (IndexError, [None]),
        (ValueError, []),
        (ValueError, None),
        (TypeError, (None, None, None)),
    ]
    for kind, given in lists:
        if rank == 1:
            error = error_in(kind, partial(dist_objects.gather_object, rank, given, dst=1))
            assert isinstance(error, CollectiveError)
        else:
            dist_objects.gather_object(rank, dst=1)
    # A list on the wrong rank raises on the destination too, with the same class.
    if rank == 0:
        dist_objects.gather_object(rank, dst=1)
    else:
        gather = partial(dist_objects.gather_object, rank, [None] * 3, dst=1)
        error = fails_on(2, gather, "only the destination")
        assert isinstance(error, ValueError)
        assert isinstance(error.__cause__, UsageError)
    # Only a receiver can detect these.
    boxes: list[tuple[type[Exception], Any, str]] = [
        (RuntimeError, [None], "one of 1 entries"),
        (TypeError, (1, 2), "a tuple"),
    ]
    for kind, box, given in boxes:
        if rank == 2:
            call = partial(dist_objects.broadcast_object_list, box, 1)
            text = f"sent 2 objects, but the list to fill is {given}"
            assert isinstance(error_in(kind, call, text), UsageError)
            assert box in ([None], (1, 2))
        else:
            dist_objects.broadcast_object_list([1, 2], 1)
    out: list[Any] = [] if rank == 2 else [None]
    scatter = partial(dist_objects.scatter_object_list, out, ["a", "b", "c"], 1)
    if rank == 2:
        error_in(UsageError, scatter, "a list with an entry")
    else:
        scatter()
    assert out == [["a"], ["b"], []][rank]
    assert_group_works()


@ranks(3)
def test_an_object_that_cannot_be_encoded_changes_no_list() -> None:
    rank = here().rank
    mine = [1, {"cb": BAD}] if rank == 1 else [1, 2]
    box, gathered, out = list(mine), [None] * 3, [None]
    calls: list[Action] = [
        lambda: dist_objects.broadcast_object_list(box, 1),
        lambda: dist_objects.all_gather_object(gathered, mine),
        lambda: dist_objects.scatter_object_list(out, [1, mine, 3], 1),  # for rank 1 itself
        lambda: dist_objects.scatter_object_list(out, [mine, 1, 3], 1),
    ]
    for call in calls:
        error = fails_on(1, call, r"obj\[1\]\['cb'\]")
        assert error.operation.endswith(("_object", "_object_list"))
    assert (box, gathered, out) == (mine, [None] * 3, [None])
    assert_group_works()


@ranks(2)
def test_an_error_of_ranks_in_different_calls_names_both() -> None:
    if here().rank == 0:  # it has only sent, so it raises in its next call
        dist_objects.broadcast_object_list([{"lr": 0.1}])
        hear("rank 1 has raised")
        with pytest.raises(DesyncError):
            objcomm.barrier()
    else:
        with pytest.raises(DesyncError) as caught:
            dist_objects.all_gather_object([None, None], "ready")
        operations = [caught.value.positions[rank].operation for rank in (0, 1)]
        assert operations == ["broadcast", "all_gather"]
        say("rank 1 has raised")
    assert_group_works()


@ranks(2)
def test_torchs_calls_and_objcomms_own_do_not_pair() -> None:
    if here().rank == 0:
        objcomm.broadcast(["an object"])
        with pytest.raises(DesyncError):
            objcomm.barrier()
    else:
        with pytest.raises(DesyncError, match="check= or function"):
            dist_objects.broadcast_object_list([None])
    assert_group_works()


@ranks(3)
def test_in_a_main_only_region_a_broadcast_is_local_and_the_rest_refused() -> None:
    def on_main() -> list[Any]:
        boxes: list[Any] = [[{"src": src}] for src in range(3)]
        for src, box in enumerate(boxes):
            dist_objects.broadcast_object_list(box, src)
        refused: list[Action] = [
            lambda: dist_objects.all_gather_object([None] * 3, 1),
            lambda: dist_objects.gather_object(1, [None] * 3),
            lambda: dist_objects.send_object_list([1], 1),
        ]
        for faulty in refused:
            with pytest.raises(UsageError, match="run_on_main"):
                faulty()
        return boxes

    assert objcomm.run_on_main(on_main) == [[{"src": src}] for src in range(3)]
    assert_group_works()
