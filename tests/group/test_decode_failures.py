"""What arrives cannot be rebuilt: whose error that is, and that all ranks stay in step."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

import objcomm
from objcomm import CodecError, CollectiveError, DecodeError
from objcomm._codecs import base
from objcomm._codecs.base import Encoded
from tests.cases import case
from tests.group.helpers import RefusesToArrive, assert_group_works
from tests.group.operations import OPERATIONS, first
from tests.ranks import ranks


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
    """A codec that raises what is no error of objcomm's, on the way that it is told."""

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
def registered(*codecs: Odd) -> Iterator[None]:
    """Let codecs be known in this block, and by no later test."""
    known = base._registry  # noqa: SLF001  # a program never takes one back
    with mock.patch.object(known, "_codecs", known._codecs):  # noqa: SLF001  # likewise
        for codec in codecs:
            objcomm.codecs.register_codec(codec)
        yield


@ranks(2)
def test_whatever_a_users_codec_raises_is_told_as_a_codecs_error() -> None:
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
