"""What a rank lets in, on ranks: for one call, in a scope, with a key."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import objcomm
from objcomm import DecodeError, ForbiddenTypeError, ObjcommError, WireError
from tests.group.helpers import assert_group_works, outcome_of, tell_all
from tests.group.operations import OBJECT_OPERATIONS, OPERATIONS
from tests.ranks import ranks
from tests.workers import here

KEY = "correct horse battery staple"

#: Who decodes what the others sent, if every rank is given the same options.
DECODES: dict[str, Callable[[], bool]] = {
    "broadcast": lambda: objcomm.rank() != 0,
    "scatter": lambda: objcomm.rank() != 0,
    "gather": lambda: objcomm.rank() == 0,
    "all_gather": lambda: True,
    "all_to_all": lambda: True,
}


@dataclasses.dataclass
class Order:
    """A class that some calls allow."""

    item: str


class Touches:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@ranks(2, 3)
@pytest.mark.parametrize("name", DECODES)
def test_a_pickle_of_os_system_is_refused_before_it_runs_and_an_allowed_class_passes(
    name: str, tmp_path: Any
) -> None:
    bomb = Path(tmp_path) / f"was run on {objcomm.rank()}"
    expected = "ForbiddenTypeError" if DECODES[name]() else "returned"
    assert outcome_of(lambda: OPERATIONS[name](Touches(str(bomb)), allow=[Order])) == expected
    expected = "DecodeError" if DECODES[name]() else "returned"
    assert outcome_of(lambda: OPERATIONS[name](Touches(str(bomb)), accept={"msgpack"})) == expected
    objcomm.barrier()
    assert not list(Path(tmp_path).iterdir())
    OPERATIONS[name](Order("tea"), allow=[Order], accept=["pickle"])
    assert_group_works()


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", OBJECT_OPERATIONS)
@pytest.mark.parametrize("large", [False, True])
def test_what_is_admitted_arrives_as_ever(name: str, *, large: bool) -> None:
    sent = {"order": Order("tea"), "array": np.arange(50_000 if large else 5)}
    got = OPERATIONS[name](sent, allow=[Order], accept={"pickle"})
    for each in got if isinstance(got, list) else [got]:
        assert each is None or (each["order"], each["array"].sum()) == (
            Order("tea"),
            sent["array"].sum(),  # type: ignore[attr-defined]
        )
    plain = OPERATIONS[name](["plain"], codec="msgpack", accept={"msgpack"})
    assert plain in (None, ["plain"], [["plain"]] * objcomm.world_size())
    assert_group_works()


@ranks(2)
def test_a_call_can_widen_and_narrow_what_its_scope_says() -> None:
    with objcomm.configure(accept={"msgpack"}, allow=[]):
        assert objcomm.all_gather(1, codec="msgpack") == [1, 1]
        with pytest.raises(DecodeError, match="accepts only msgpack"):
            objcomm.all_gather(1)
        assert objcomm.all_gather(1, accept={"pickle"}) == [1, 1]
        with pytest.raises(ForbiddenTypeError):
            objcomm.all_gather(Order("x"), accept={"pickle"})
        orders = objcomm.all_gather(Order("x"), accept={"pickle"}, allow=[Order])
        assert orders == [Order("x")] * 2
    assert_group_works()


@ranks(2, 3)
def test_safe_ranks_still_meet_fail_and_confirm() -> None:
    with objcomm.configure(codec="msgpack", accept={"msgpack"}):
        objcomm.barrier()
        with pytest.raises(objcomm.CollectiveError, match="ValueError"):
            objcomm.reduce_and_broadcast(_fail, len)
        assert objcomm.all_gather(1, confirm=True) == [1] * objcomm.world_size()
        assert objcomm.all_reduce({"a": 1}, lambda left, _: left, confirm=True) == {"a": 1}
        assert objcomm.all_gather_scalar(2**70) == [2**70] * objcomm.world_size()
        with pytest.raises(objcomm.CollectiveError, match=r"obj\['x'\].* is not registered"):
            objcomm.all_gather({"x": Order("tea")})
    assert_group_works()


def _fail() -> None:
    raise ValueError("no")


@ranks(2, disposable=True)
def test_a_large_message_of_a_refused_codec_is_refused_unread() -> None:
    objcomm.barrier()
    large = bytes(5_000_000)
    if here().rank == 0:
        with pytest.raises(ObjcommError):
            objcomm.broadcast(large, timeout=3)
    else:
        with pytest.raises(DecodeError, match="accepts only msgpack"):
            objcomm.broadcast(None, accept={"msgpack"}, timeout=3)
        assert objcomm.stats()["broadcast"].received_nbytes < 100_000
    assert_group_works()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.parametrize("nbytes", [10, 3_000_000])
def test_every_operation_works_with_a_key(name: str, nbytes: int) -> None:
    value: Any = 0.5 if "scalar" in name else bytes(nbytes)
    with objcomm.configure(key=KEY):
        for _ in range(2):
            got = OPERATIONS[name](value)
            assert got in (None, value, [value] * objcomm.world_size())
        if name in OBJECT_OPERATIONS and name != "reduce_and_broadcast":
            OPERATIONS[name](value, confirm=True)
            with pytest.raises(objcomm.CollectiveError) if objcomm.world_size() > 1 else _nothing():
                OPERATIONS[name](_Fails(), confirm=True)
        assert_group_works()
    assert_group_works()


class _Fails:
    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("cannot be encoded")


class _nothing:  # noqa: N801  # a context
    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass


@ranks(2, 3, disposable=True)
@pytest.mark.parametrize("key", ["another key of some length", None])
def test_one_rank_with_another_key_is_found_out(key: str | None) -> None:
    objcomm.barrier()
    last = here().rank == here().world_size - 1
    mine = key if last else KEY
    outcome = ""
    with objcomm.configure(key=mine):
        try:
            objcomm.all_gather(here().rank, timeout=3)
        except ObjcommError as error:
            outcome = type(error).__name__
    told = tell_all("outcome", outcome)
    assert all(told)
    assert "AuthenticationError" in told


@ranks(2)
def test_a_key_may_come_from_a_file(tmp_path: Any) -> None:
    path = Path(tmp_path) / f"key{here().rank}"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    key = path.read_text().strip() if here().rank else KEY.encode()
    with objcomm.configure(key=key):
        assert objcomm.all_gather("x") == ["x", "x"]
    assert_group_works()


@ranks(2)
def test_a_small_message_beyond_a_limit_costs_only_its_reader() -> None:
    if objcomm.rank() == 0:
        objcomm.broadcast(bytes(1000))
    else:
        with objcomm.configure(max_nbytes=500), pytest.raises(WireError, match="limit of 500"):
            objcomm.broadcast(None)
    with (
        objcomm.configure(max_operation_nbytes=500),
        pytest.raises(WireError, match="max_operation_nbytes"),
    ):
        objcomm.all_gather(bytes(1000))
    assert_group_works()
