"""Received objects that cannot be rebuilt: which ranks raise, and that all stay in step."""

import contextlib
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

import objcomm
from objcomm import CodecError, CollectiveError, DecodeError
from objcomm._codecs import base
from objcomm._codecs.base import Encoded
from tests.cases import case
from tests.group.helpers import RefusesToArrive, assert_group_works, error_in, subgroup
from tests.group.operations import OPERATIONS, first
from tests.ranks import ranks
from tests.workers import here


@ranks(2, 3)
def test_a_decode_error_stays_on_the_rank_that_sees_it() -> None:
    obj = RefusesToArrive(1)
    for turn in range(3):
        if objcomm.rank() == 1:
            with pytest.raises(DecodeError, match="cannot be rebuilt on rank 1"):
                objcomm.broadcast(None, src=0)
        else:
            assert isinstance(objcomm.broadcast(obj, src=0), RefusesToArrive)
        assert objcomm.all_gather(turn) == [turn] * objcomm.world_size()
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("name", ["broadcast", "all_gather", "scatter", "gather"])
def test_with_confirm_a_decode_error_is_everybodys(name: str) -> None:
    failing = 0 if name == "gather" else 1
    with pytest.raises(CollectiveError) as caught:
        OPERATIONS[name](RefusesToArrive(failing), confirm=True)
    assert list(caught.value.failures) == [failing]
    told = caught.value.failures[failing]
    assert "DecodeError" in told.type_name
    assert f"cannot be rebuilt on rank {failing}" in told.message
    assert_group_works()


@ranks(1, 2, 3)
def test_confirm_changes_nothing_where_all_is_well() -> None:
    for name in ("broadcast", "gather", "all_gather", "scatter", "all_reduce"):
        with case(name):
            assert OPERATIONS[name]("x", confirm=True) == OPERATIONS[name]("x")
            assert_group_works()


@ranks(2)
def test_a_receiver_that_accepts_plain_data_only_refuses_a_pickle_unread(tmp_path: Any) -> None:
    bomb = tmp_path / "was run"
    if objcomm.rank() == 0:
        objcomm.broadcast(_Touches(str(bomb)), codec="pickle")
    else:
        with pytest.raises(CodecError), objcomm.configure(accept={"msgpack"}):
            objcomm.broadcast(None)
    objcomm.barrier()
    assert not bomb.exists()
    assert_group_works()


class _Touches:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


@ranks(2, 3)
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_and_broadcast"])
def test_an_operand_that_cannot_be_rebuilt_where_it_is_combined_fails_the_call(name: str) -> None:
    if name == "reduce" and objcomm.rank() != 0:
        assert OPERATIONS[name](RefusesToArrive(0)) is None
    else:
        with pytest.raises(CollectiveError) as caught:
            OPERATIONS[name](RefusesToArrive(0))
        assert list(caught.value.failures) == [0]
        assert "DecodeError" in caught.value.failures[0].type_name
        assert isinstance(caught.value.__cause__, DecodeError) == (objcomm.rank() == 0)
    assert_group_works()


@ranks(2, 3)
def test_a_large_operand_that_cannot_be_rebuilt_leaves_nobody_waiting() -> None:
    size = objcomm.world_size()
    for failing in range(size):
        mine = [RefusesToArrive(failing), bytes(2_000_000)]
        try:
            objcomm.all_reduce(mine, first)
        except (CollectiveError, DecodeError):
            outcome = "raised"
        else:
            outcome = "returned"
        assert "raised" in objcomm.all_gather(outcome)
    assert_group_works()


class Odd:
    """A codec whose ``decode`` raises ArithmeticError; named "odd encode", ``encode`` does too."""

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, obj: object, *, device_type: str | None = None) -> Encoded:
        del device_type
        if self.name == "odd encode":
            raise ArithmeticError(f"cannot add {obj}")
        return Encoded(b"anything")

    def decode(
        self, meta: memoryview, buffers: Sequence[Any], *, device: torch.device | None = None
    ) -> Any:
        del buffers, device
        raise ArithmeticError(f"cannot subtract {bytes(meta)!r}")


@contextlib.contextmanager
def registered(*codecs: base.Codec) -> Iterator[None]:
    """Register codecs for this block only."""
    known = base.registry
    with mock.patch.object(known, "codecs", known.codecs):  # programs cannot unregister codecs
        for codec in codecs:
            objcomm.codecs.register_codec(codec)
        yield


class Marked:
    """A codec that adds its mark to each object."""

    name = "marked"

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def encode(self, obj: object, *, device_type: str | None = None) -> Encoded:
        del device_type
        return Encoded(f"{obj} by {self.mark}".encode())

    def decode(
        self, meta: memoryview, buffers: Sequence[Any], *, device: torch.device | None = None
    ) -> Any:
        del buffers, device
        return bytes(meta).decode()


@ranks(2)
def test_a_codec_that_takes_the_place_of_another_is_the_next_calls() -> None:
    other = 1 - objcomm.rank()
    with registered(Marked("one")), objcomm.configure(codec="marked"):
        for mark in ("two", "three"):
            former = objcomm.all_gather("said")[other]
            objcomm.codecs.register_codec(Marked(mark))
            assert objcomm.all_gather("said")[other] == f"said by {mark}" != former
        assert objcomm.all_gather("said", codec="msgpack") == ["said"] * 2
    assert objcomm.all_gather("said") == ["said"] * 2


@ranks(2)
def test_any_error_of_a_users_codec_is_raised_as_a_codec_error() -> None:
    with registered(Odd("odd encode"), Odd("odd decode")):
        with pytest.raises(CollectiveError, match="cannot add 1"):
            objcomm.all_gather(1, codec="odd encode")
        with pytest.raises(DecodeError, match="cannot subtract") as caught:
            objcomm.all_gather(1, codec="odd decode")
        assert caught.value.codec == "odd decode"
        with pytest.raises(CollectiveError, match="cannot subtract"):
            objcomm.all_gather(1, codec="odd decode", confirm=True)
    assert_group_works()


@ranks(2)
def test_a_codec_that_the_receiver_does_not_have_is_named() -> None:
    if objcomm.rank() == 0:
        with registered(Odd("rare")):
            assert objcomm.broadcast("x", codec="rare") == "x"
    else:
        with pytest.raises(DecodeError, match="rare"):
            objcomm.broadcast(None)
    assert_group_works()


@ranks(2)
def test_a_device_that_this_machine_lacks_is_told_and_leaves_nobody_waiting() -> None:
    with pytest.raises(objcomm.ObjcommError, match=r"(?i)xpu"):
        objcomm.all_gather(torch.ones(2), device="xpu")
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("name", ["reduce", "all_reduce"])
def test_with_confirm_structures_that_differ_are_everybodys_error(name: str) -> None:
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


def _recv(obj: Any, **options: Any) -> Any:
    """Send from the source to all others."""
    group = options.get("group")
    own, sender = objcomm.rank(group), options.pop("group_src")
    if own != sender:
        return objcomm.recv(group_src=sender, **options)
    for rank in range(objcomm.world_size(group)):
        if rank != own:
            objcomm.send(obj, group_dst=rank, **options)
    return None


def _irecv(obj: Any, **options: Any) -> Any:
    """Send asynchronously from the source to all others, then wait."""
    group = options.get("group")
    own, sender = objcomm.rank(group), options.pop("group_src")
    others = [rank for rank in range(objcomm.world_size(group)) if rank != own]
    works: list[Any] = (
        [objcomm.irecv(group_src=sender, **options)]
        if own != sender
        else [objcomm.isend(obj, group_dst=rank, **options) for rank in others]
    )
    return [work.wait() for work in works]


def _told(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt an operation that has no source because every rank sends."""
    return lambda obj, group_src: operation(obj) if group_src == 1 else None


#: Calls in which rank 1 sends an object, and the name of its own call.
SENDS: dict[str, tuple[Callable[..., Any], str]] = {
    "broadcast": (objcomm.broadcast, "broadcast"),
    "scatter": (OPERATIONS["scatter"], "scatter"),
    "all_gather": (_told(objcomm.all_gather), "all_gather"),
    "all_to_all": (_told(OPERATIONS["all_to_all"]), "all_to_all"),
    "async broadcast": (
        lambda obj, **options: objcomm.broadcast(obj, async_op=True, **options).wait(),
        "broadcast",
    ),
    "recv": (_recv, "send"),
    "irecv": (_irecv, "isend"),
}


def _assert_told(error: DecodeError, why: str, operation: str, rank: int) -> None:
    place, kind, advice = LACKING[why]
    assert error.origin is not None
    assert (error.origin.rank, error.origin.operation) == (rank, operation.removeprefix("i"))
    assert re.search(r"(test_decode_failures|operations)\.py:[0-9]+$", error.origin.call_site)
    assert error.lacking == place.partition(".")[0]
    named = f"'pickle' cannot decode what rank {rank} gave to {operation.removeprefix('i')} at"
    assert error.path.startswith("obj")
    member = f"at {error.path}, made by {error.made_by!r}"
    assert f"{named} {error.origin.call_site}, {member}: {kind}: " in str(error)
    assert advice.replace("rank 1", f"rank {rank}") in str(error)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # pickled here
    assert (str(again), again.origin, again.lacking) == (str(error), error.origin, error.lacking)


@ranks(2, 3)
@pytest.mark.parametrize("why", LACKING)
@pytest.mark.parametrize("size", [0, 200_000])
def test_who_cannot_rebuild_an_object_is_told_whose_it_is_and_in_which_call(
    why: str, size: int
) -> None:
    with lacking(why, size=size) as obj:
        for name, (send, operation) in SENDS.items():
            with case(name):
                if here().rank == 1:
                    send(obj, group_src=1)
                else:
                    error = error_in(DecodeError, lambda: send(obj, group_src=1))  # noqa: B023  # called immediately
                    _assert_told(error, why, operation, 1)
    assert_group_works()


@ranks(2, 3)
def test_the_destination_of_a_gather_is_told_whose_object_it_is() -> None:
    with lacking("a program") as obj:
        if here().rank == 0:
            error = error_in(DecodeError, lambda: objcomm.gather(obj, dst=0))
            _assert_told(error, "a program", "gather", 1)
        else:
            assert objcomm.gather(obj, dst=0) is None
    assert_group_works()


@ranks(3)
def test_in_a_subgroup_the_sender_is_named_by_its_rank_there() -> None:
    with subgroup(1, 2) as group, lacking("a module") as obj:
        if here().rank == 2:
            receive = SENDS["broadcast"][0]
            error = error_in(DecodeError, lambda: receive(obj, group_src=0, group=group))
            _assert_told(error, "a module", "broadcast", 0)
        elif here().rank == 1:
            objcomm.broadcast(obj, group_src=0, group=group)
        if here().rank > 0:
            assert_group_works(group)
    assert_group_works()


@ranks(2, 3)
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "scan"])
def test_a_reduction_tells_every_rank_whose_operand_cannot_be_rebuilt(name: str) -> None:
    with lacking("another version") as obj:
        told = ""
        try:
            OPERATIONS[name](obj)
        except CollectiveError as error:
            told = str(error)
        assert told or name == "reduce" or here().rank > 0
        if here().rank == 0:
            assert f"cannot decode what rank 1 gave to {name} at " in told
            assert "new_here" in told
    assert_group_works()


@ranks(2)
def test_who_sent_what_is_not_accepted_is_named() -> None:
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


def test_of_bytes_that_no_rank_sent_the_sender_is_unknown() -> None:
    with registered(Odd("odd decode")):
        tensor = objcomm.to_tensor(1, codec="odd decode")
        with pytest.raises(DecodeError, match="cannot decode what arrived: ArithmeticErr") as told:
            objcomm.from_tensor(tensor)
        assert told.value.origin is None
        assert "if that raises too" in str(told.value)
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
    def decode(*_: Any, **__: Any) -> None:
        raise AttributeError(text)

    with registered(Odd("odd")), mock.patch.object(Odd, "decode", decode):
        tensor = objcomm.to_tensor(1, codec="odd")
        with pytest.raises(DecodeError) as told:
            objcomm.from_tensor(tensor)
    assert told.value.lacking == place
