"""Received objects that cannot be rebuilt: which ranks raise, and that all stay in step."""

import contextlib
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import objcomm
from objcomm import CollectiveError, DecodeError
from objcomm._codecs import base
from objcomm._codecs.base import Encoded
from tests.cases import case
from tests.group.control import fail
from tests.group.helpers import RefusesToArrive, assert_group_works, error_in, outcome_of, subgroup
from tests.group.operations import OPERATIONS, first
from tests.ranks import ranks
from tests.workers import here


@ranks(2, 3)
def test_a_decode_error_stays_on_the_rank_that_sees_it() -> None:
    for turn in range(3):
        outcome = outcome_of(lambda: objcomm.broadcast(RefusesToArrive(1)))
        assert outcome == ("DecodeError" if objcomm.rank() == 1 else "returned")
        assert objcomm.all_gather(turn) == [turn] * objcomm.world_size()
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("name", ["broadcast", "all_gather", "scatter", "gather"])
def test_with_confirm_a_decode_error_is_raised_on_every_rank(name: str) -> None:
    failing = 0 if name == "gather" else 1
    call = partial(OPERATIONS[name], RefusesToArrive(failing), confirm=True)
    error = error_in(CollectiveError, call)
    assert list(error.failures) == [failing]
    assert "DecodeError" in error.failures[failing].type_name
    assert f"cannot be rebuilt on rank {failing}" in error.failures[failing].message
    assert_group_works()


@ranks(1, 2, 3)
def test_confirm_changes_no_result() -> None:
    for name in ("broadcast", "gather", "all_gather", "scatter", "all_reduce"):
        with case(name):
            assert OPERATIONS[name]("x", confirm=True) == OPERATIONS[name]("x")
            assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_and_broadcast"])
def test_an_operand_that_cannot_be_rebuilt_where_it_is_combined_fails_the_call(name: str) -> None:
    if name == "reduce" and objcomm.rank() != 0:
        assert OPERATIONS[name](RefusesToArrive(0)) is None
    else:
        error = error_in(CollectiveError, partial(OPERATIONS[name], RefusesToArrive(0)))
        assert list(error.failures) == [0]
        assert "DecodeError" in error.failures[0].type_name
        assert isinstance(error.__cause__, DecodeError) == (objcomm.rank() == 0)
    assert_group_works()


@ranks(2, 3)
def test_a_large_operand_that_cannot_be_rebuilt_leaves_no_rank_waiting() -> None:
    for failing in range(objcomm.world_size()):
        mine = [RefusesToArrive(failing), bytes(2_000_000)]
        outcome = outcome_of(partial(objcomm.all_reduce, mine, first))
        assert outcome in {"CollectiveError", "DecodeError", "returned"}
        assert set(objcomm.all_gather(outcome)) != {"returned"}
    assert_group_works()


class Custom:
    """A user's codec, which sends a text; by default that of the object."""

    def __init__(
        self,
        name: str,
        write: Callable[[object], str] = str,
        read: Callable[[str], object] = str,
    ) -> None:
        self.name, self._write, self._read = name, write, read

    def encode(self, obj: object, *, device_type: str | None = None) -> Encoded:
        del device_type
        return Encoded(self._write(obj).encode())

    def decode(
        self, meta: memoryview, buffers: Sequence[Any], *, device: torch.device | None = None
    ) -> Any:
        del buffers, device
        return self._read(bytes(meta).decode())


def refuse(obj: object) -> Any:
    raise ArithmeticError(f"cannot convert {obj}")


@contextlib.contextmanager
def registered(*codecs: base.Codec) -> Iterator[None]:
    """Register codecs for this block only."""
    known = base.registry
    with mock.patch.object(known, "codecs", known.codecs):  # programs cannot unregister codecs
        for codec in codecs:
            objcomm.codecs.register_codec(codec)
        yield


@ranks(2)
def test_a_codec_that_replaces_another_is_used_from_the_next_call() -> None:
    other = 1 - objcomm.rank()
    with registered(Custom("own")), objcomm.configure(codec="own"):
        for text in ("{} twice", "{} three times"):
            former = objcomm.all_gather("said")[other]
            objcomm.codecs.register_codec(Custom("own", text.format))
            assert objcomm.all_gather("said")[other] == text.format("said") != former
        assert objcomm.all_gather("said", codec="msgpack") == ["said"] * 2
    assert objcomm.all_gather("said") == ["said"] * 2


@ranks(2)
def test_any_error_of_a_users_codec_is_raised_as_a_codec_error() -> None:
    with registered(Custom("odd encode", write=refuse), Custom("odd decode", read=refuse)):
        with pytest.raises(CollectiveError, match="cannot convert 1"):
            objcomm.all_gather(1, codec="odd encode")
        with pytest.raises(DecodeError, match="cannot convert 1") as caught:
            objcomm.all_gather(1, codec="odd decode")
        assert caught.value.codec == "odd decode"
        with pytest.raises(CollectiveError, match="cannot convert 1"):
            objcomm.all_gather(1, codec="odd decode", confirm=True)
    assert_group_works()


@ranks(2)
def test_a_codec_that_the_receiver_does_not_have_is_named() -> None:
    if objcomm.rank() == 0:
        with registered(Custom("rare")):
            assert objcomm.broadcast("x", codec="rare") == "x"
    else:
        with pytest.raises(DecodeError, match="rare"):
            objcomm.broadcast(None)
    assert_group_works()


@ranks(2)
def test_a_device_that_this_machine_lacks_is_named_and_leaves_no_rank_waiting() -> None:
    with pytest.raises(objcomm.ObjcommError, match=r"(?i)xpu"):
        objcomm.all_gather(torch.ones(2), device="xpu")
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("name", ["reduce", "all_reduce"])
def test_with_confirm_structures_that_differ_are_an_error_on_every_rank(name: str) -> None:
    mine = {"b" if objcomm.rank() == 1 else "a": 1}
    for _ in range(2):
        with pytest.raises(CollectiveError, match="differs between rank 0 and rank 1") as caught:
            getattr(objcomm, name)(mine, "sum", confirm=True)
        assert list(caught.value.failures) == [1]
    assert_group_works()


class Thing:
    """A class presented as part of a module that only the sender has."""


#: By reason: what the receiver lacks, the error it gets instead, and the advice.
LACKING: dict[str, tuple[str, str, str]] = {
    "a program": (
        "__main__:Thing",
        "AttributeError",
        "rank 1 defines 'Thing' in its program or notebook, this process does not: define it on",
    ),
    "a module": (
        "only.there",
        "ModuleNotFoundError",
        "rank 1 can import the module 'only', this process cannot: install it here",
    ),
    "another version": (
        "new_here:Thing",
        "AttributeError",
        "rank 1 has 'Thing' in the module 'new_here', this process does not: install the same",
    ),
}


@contextlib.contextmanager
def lacking(why: str, *, size: int = 0) -> Iterator[Any]:
    """Yield an object whose class only global rank 1 has; on the other ranks, yield 0."""
    name = LACKING[why][0].partition(":")[0]
    there = {name: types.ModuleType(name)} if why == "another version" else {}
    if here().rank == 1 and why != "a program":
        there = {each: types.ModuleType(each) for each in (name.partition(".")[0], name)}
    with mock.patch.dict(sys.modules, there):
        if here().rank != 1:
            yield 0
            return
        with (
            mock.patch.object(sys.modules[name], "Thing", Thing, create=True),
            mock.patch.object(Thing, "__module__", name),
        ):
            thing = Thing()
            vars(thing)["size"] = bytes(size)
            yield thing


def _send(obj: Any) -> None:
    """Send from rank 1 to each other rank."""
    if here().rank != 1:
        objcomm.recv(1)
        return
    for rank in {*range(here().world_size)} - {1}:
        objcomm.send(obj, rank)


def _isend(obj: Any) -> None:
    """Send asynchronously from rank 1 to each other rank, then wait."""
    others = {*range(here().world_size)} - {1}
    works: list[Any] = (
        [objcomm.isend(obj, rank) for rank in others] if here().rank == 1 else [objcomm.irecv(1)]
    )
    objcomm.wait_all(works)


#: Calls in which rank 1 sends an object, and the name of its own call.
SENDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "broadcast": (lambda obj: objcomm.broadcast(obj, 1), "broadcast"),
    "async broadcast": (lambda obj: objcomm.broadcast(obj, 1, async_op=True).wait(), "broadcast"),
    "scatter": (lambda obj: OPERATIONS["scatter"](obj, src=1), "scatter"),
    "all_gather": (objcomm.all_gather, "all_gather"),
    "all_to_all": (OPERATIONS["all_to_all"], "all_to_all"),
    "send": (_send, "send"),
    "isend": (_isend, "send"),
}


def _assert_names_the_sender(error: DecodeError, why: str, operation: str, rank: int) -> None:
    place, kind, advice = LACKING[why]
    assert error.origin is not None
    assert (error.origin.rank, error.origin.operation) == (rank, operation)
    assert re.search(r"(test_decode_failures|operations)\.py:[0-9]+$", error.origin.call_site)
    assert error.lacking == place.partition(".")[0]
    named = f"'pickle' cannot decode what rank {rank} gave to {operation} at"
    assert error.path.startswith("obj")
    member = f"at {error.path}, made by {error.made_by!r}"
    assert f"{named} {error.origin.call_site}, {member}: {kind}: " in str(error)
    assert advice.replace("rank 1", f"rank {rank}") in str(error)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # pickled here
    assert (str(again), again.origin, again.lacking) == (str(error), error.origin, error.lacking)


@ranks(2, 3)
@pytest.mark.parametrize("why", LACKING)
@pytest.mark.parametrize("size", [0, 200_000])
def test_a_rank_that_cannot_rebuild_an_object_names_its_sender_and_call(
    why: str, size: int
) -> None:
    with lacking(why, size=size) as obj:
        for name, (send, operation) in SENDS.items():
            with case(name):
                if here().rank == 1:
                    send(obj)
                else:
                    error = error_in(DecodeError, partial(send, obj))
                    _assert_names_the_sender(error, why, operation, 1)
    assert_group_works()


@ranks(2, 3)
def test_the_destination_of_a_gather_names_the_sender() -> None:
    with lacking("a program") as obj:
        if here().rank == 0:
            error = error_in(DecodeError, lambda: objcomm.gather(obj, dst=0))
            _assert_names_the_sender(error, "a program", "gather", 1)
        else:
            assert objcomm.gather(obj, dst=0) is None
    assert_group_works()


@ranks(3)
def test_in_a_subgroup_the_sender_is_named_by_its_rank_there() -> None:
    with subgroup(1, 2) as group, lacking("a module") as obj:
        if here().rank == 2:
            call = partial(objcomm.broadcast, obj, group_src=0, group=group)
            _assert_names_the_sender(error_in(DecodeError, call), "a module", "broadcast", 0)
        elif here().rank == 1:
            objcomm.broadcast(obj, group_src=0, group=group)
        if here().rank > 0:
            assert_group_works(group)
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "scan"])
def test_a_reduction_names_the_rank_whose_operand_cannot_be_rebuilt(name: str) -> None:
    with lacking("another version") as obj:
        text = ""
        try:
            OPERATIONS[name](obj)
        except CollectiveError as error:
            text = str(error)
        assert text or name == "reduce" or here().rank > 0
        if here().rank == 0:
            assert f"cannot decode what rank 1 gave to {name} at " in text
            assert "new_here" in text
    assert_group_works()


@ranks(2)
def test_the_sender_of_an_object_that_is_not_accepted_is_named() -> None:
    for size in (10, 200_000):  # sent with the header, and after it
        with case(size):
            if here().rank == 1:
                with contextlib.suppress(CollectiveError):
                    objcomm.broadcast(bytes(size), src=1, codec="pickle")
            else:
                with objcomm.configure(accept={"msgpack"}):
                    error = error_in(DecodeError, lambda: objcomm.broadcast(None, src=1))
                assert "what rank 1 gave to broadcast at " in str(error)
                assert "this rank accepts only msgpack" in str(error)
            assert_group_works()


def test_bytes_that_no_rank_sent_have_no_sender() -> None:
    with registered(Custom("odd", read=refuse)):
        tensor = objcomm.to_tensor(1, codec="odd")
        error = error_in(DecodeError, lambda: objcomm.from_tensor(tensor))
    assert "cannot decode what arrived: ArithmeticError" in str(error)
    assert "if that raises too" in str(error)
    assert error.origin is None
    refused = objcomm.to_tensor(1, codec="pickle")
    with pytest.raises(DecodeError, match="cannot decode what arrived: this rank accepts"):
        objcomm.from_tensor(refused, accept={"msgpack"})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("Can't get attribute 'A.B' on <module 'm.n' from '/x'>", "m.n:A.B"),  # up to Python 3.13
        ("module 'm' has no attribute 'A'", "m:A"),
        ("Can't resolve path 'A.B' on module 'm'", "m:A.B"),
        ("'A' object has no attribute 'b'", ""),  # raised by a class's own code
    ],
)
def test_what_a_module_lacks_is_read_from_pythons_own_words(text: str, place: str) -> None:
    with registered(Custom("odd", read=lambda _: fail(AttributeError(text)))):
        tensor = objcomm.to_tensor(1, codec="odd")
        assert error_in(DecodeError, lambda: objcomm.from_tensor(tensor)).lacking == place
