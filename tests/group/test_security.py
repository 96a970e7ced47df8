"""What a rank accepts: for one call, in a scope, and with a key."""

import dataclasses
import os
import re
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import numpy as np
import pytest
import torch

import objcomm
from objcomm import DecodeError, ForbiddenTypeError, ObjcommError, TransportError, WireError
from objcomm._codecs.base import Encoded
from objcomm._codecs.msgpack import MsgpackCodec
from objcomm._config import secret_of
from objcomm._transport import connect, doors, rendezvous
from objcomm._transport.frames import AHEAD_MAX
from objcomm._wire import admission, header
from objcomm._wire.signing import signer_for
from tests.cases import case
from tests.group.any_call import called
from tests.group.helpers import (
    RefusesToPickle,
    assert_group_works,
    error_in,
    outcome_of,
    subgroup,
    tell_all,
)
from tests.group.operations import OBJECT_OPERATIONS, OPERATIONS
from tests.group.test_handlers import COLLECTIVE
from tests.ranks import ranks
from tests.workers import here

KEY = "correct horse battery staple"

#: Whether this rank decodes other ranks' objects if every rank has the same options.
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
    """Unpickling it creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@ranks(2, 3)
def test_a_pickle_of_os_system_is_refused_and_an_allowed_class_passes(tmp_path: Path) -> None:
    bomb = Touches(str(tmp_path / f"was run on {objcomm.rank()}"))
    for name, decodes in DECODES.items():
        operation = partial(OPERATIONS[name], bomb)
        with case(name):
            expected = "ForbiddenTypeError" if decodes() else "returned"
            assert outcome_of(partial(operation, allow=[Order])) == expected
            expected = "DecodeError" if decodes() else "returned"
            assert outcome_of(partial(operation, accept={"msgpack"})) == expected
            objcomm.barrier()
            assert not list(tmp_path.iterdir())
            OPERATIONS[name](Order("tea"), allow=[Order], accept=["pickle"])
            assert_group_works()


@ranks(1, 2, 3)
def test_what_is_allowed_arrives_unchanged() -> None:
    for name in OBJECT_OPERATIONS:
        for numel in (5, 50_000):
            sent: dict[str, Any] = {"order": Order("tea"), "array": np.arange(numel)}
            with case(name, numel):
                got = OPERATIONS[name](sent, allow=[Order], accept={"pickle"})
                for each in got if isinstance(got, list) else [got]:
                    assert each is None or each["order"] == Order("tea")
                    assert each is None or each["array"].sum() == sent["array"].sum()
        with case(name):
            plain = OPERATIONS[name](["plain"], codec="msgpack", accept={"msgpack"})
            assert plain in (None, ["plain"], [["plain"]] * objcomm.world_size())
            assert_group_works()


@ranks(2)
def test_every_call_works_on_ranks_that_accept_one_codec(codec: str) -> None:
    with objcomm.configure(codec=codec, accept=[codec], allow=[]):
        for name in COLLECTIVE:
            with case(name):
                called(name, "objs", [1, 2])
        assert list(objcomm.stream(None if here().rank else [1])) == [1]
    assert_group_works()


@ranks(2)
def test_a_call_can_widen_and_narrow_what_its_scope_accepts() -> None:
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
def test_ranks_that_accept_only_msgpack_meet_fail_and_confirm() -> None:
    def fail() -> None:
        raise ValueError("no")

    with objcomm.configure(codec="msgpack", accept={"msgpack"}):
        objcomm.barrier()
        with pytest.raises(objcomm.CollectiveError, match="ValueError"):
            objcomm.reduce_and_broadcast(fail, len)
        assert objcomm.all_gather(1, confirm=True) == [1] * objcomm.world_size()
        assert objcomm.all_reduce({"a": 1}, lambda left, _: left, confirm=True) == {"a": 1}
        assert objcomm.metrics.all_gather_scalar(2**70) == [2**70] * objcomm.world_size()
        with pytest.raises(objcomm.CollectiveError, match=r"obj\['x'\].* is not registered"):
            objcomm.all_gather({"x": Order("tea")})
    assert_group_works()


@ranks(2)
def test_a_large_message_of_a_refused_codec_is_refused_unread() -> None:
    objcomm.barrier()
    objcomm.reset_stats()
    if here().rank == 0:
        with pytest.raises(ObjcommError):
            objcomm.broadcast(bytes(5_000_000))
    else:
        with pytest.raises(DecodeError, match="accepts only msgpack"):
            objcomm.broadcast(None, accept={"msgpack"})
        assert objcomm.stats()["broadcast"].received_nbytes < 100_000
    assert_group_works()


@ranks(1, 2, 3, 4)
def test_every_operation_works_with_a_key() -> None:
    size = objcomm.world_size()
    for turn, (name, operation) in enumerate(OPERATIONS.items()):
        # A few bytes in some worlds, many pieces in the others.
        nbytes = 10 if (turn + size) % 2 else 3_000_000
        value: Any = 0.5 if "scalar" in name else bytes(nbytes)
        key = KEY if here().rank else KEY.encode()  # text or bytes
        with case(name, nbytes), objcomm.configure(key=key):
            for _ in range(2):
                assert operation(value) in (None, value, [value] * size)
            if name in OBJECT_OPERATIONS and name != "reduce_and_broadcast":
                operation(value, confirm=True)
                with pytest.raises(objcomm.CollectiveError) if size > 1 else nullcontext():
                    operation(RefusesToPickle(ValueError()), confirm=True)
            assert_group_works()
        assert_group_works()


@ranks(2, 3)
def test_one_rank_with_another_key_is_detected() -> None:
    last = here().rank == here().world_size - 1
    for key in ("another key of some length", None):
        with subgroup(*range(here().world_size)) as group:
            objcomm.barrier(group=group)
            with case(key), objcomm.configure(key=key if last else KEY):
                outcome = outcome_of(partial(objcomm.all_gather, here().rank, group=group))
            outcomes = tell_all(f"with {key}", outcome)
            assert "returned" not in outcomes
            assert "AuthenticationError" in outcomes


@ranks(2, disposable=True)
def test_a_recording_of_an_earlier_run_is_refused() -> None:
    """Rank 0 does not have the key, but a recording of a run with it, and the store."""
    heads: list[bytearray] = []
    sign = admission.Gate.head_of

    def recorded(gate: admission.Gate, *message: Any) -> bytearray:
        heads.append(bytearray(sign(gate, *message)))
        return heads[-1]

    def replayed(*_: Any) -> bytearray:
        return heads.pop(0)

    def believed(_: admission.Gate, raw: bytes, *__: Any) -> header.Header:
        return header.Header.unpack(raw)

    def with_key(session: str, _: object) -> doors.Handshakes:
        return doors.Handshakes(session, secret_of(KEY))

    number = uuid.uuid4().hex
    both_runs = mock.Mock(uuid4=lambda: mock.Mock(hex=number))

    def run(group: Any, key: Any, **gate: Any) -> str:
        with (
            mock.patch.object(rendezvous, "uuid", both_runs if here().rank == 0 else uuid),
            mock.patch.multiple(admission.Gate, **gate),
            objcomm.configure(key=key),
        ):
            return outcome_of(lambda: objcomm.broadcast("a value", group=group))

    with subgroup(0, 1) as group:
        assert run(group, KEY, head_of=recorded) == "returned"
    signer_for.cache_clear()  # the processes of another run have seen no message
    with subgroup(0, 1) as group:
        if here().rank == 0:
            another = "a key of the attacker's own"
            with mock.patch.object(connect, "Handshakes", with_key):  # or it can't connect
                outcome = run(group, another, head_of=replayed, header_in=believed)
        else:
            outcome = run(group, KEY, head_of=sign)
        assert tell_all("replayed", outcome)[1] == "AuthenticationError"


@pytest.mark.parametrize("other", [None, "a key of the attacker's own"])
@pytest.mark.parametrize("transport", ["streams", "gloo"])
@ranks(3)
def test_ranks_of_different_keys_are_not_connected(transport: Any, other: str | None) -> None:
    """A process that reaches the store can meet the others in a rank's place, but no more."""
    with (
        subgroup(0, 1, 2) as group,
        objcomm.configure(transport=transport),
        objcomm.configure(key=KEY) if here().rank != 1 else objcomm.configure(key=other),
    ):
        error = error_in(TransportError, lambda: objcomm.all_gather("secret", group=group))
    assert "they have different keys, or only one of them has a key" in error.reason
    assert "can't connect to each other" in error.reason
    assert 1 in error.peers or here().rank == 1
    assert_group_works()


_average = partial(objcomm.metrics.average_metrics, {"a": 1.0})
_MODEL = torch.nn.Linear(2, 2)
#: A call that expects a specific answer, and the wrong answer that one rank gives.
ANSWERED: dict[str, tuple[Callable[..., object], Any]] = {
    "a list for averages": (_average, [[]]),
    "text for an average": (_average, {"a": "1.0"}),
    "averages without mine": (_average, {"b": 1.0}),
    "a list for a yes": (partial(objcomm.any_rank, flag=True), [[]]),
    "a number for a yes": (partial(objcomm.all_ranks, flag=True), 1),
    "a list for a seed": (objcomm.shared_seed, [[]]),
    "a seed too large": (objcomm.shared_seed, 1 << 40),
    "a list for a digest": (partial(objcomm.models.broadcast_tensors, [torch.zeros(3)]), [[]]),
    "a list for a model's digest": (partial(objcomm.models.sync_model, _MODEL), [[]]),
}


@ranks(2, disposable=True)
@pytest.mark.parametrize("kind", ANSWERED)
@pytest.mark.parametrize("src", [0, 1], ids=["of the hub", "to the hub"])
def test_an_answer_of_another_kind_is_an_error_that_names_its_rank(kind: str, src: int) -> None:
    call, answer = ANSWERED[kind]
    raw = Encoded(msgpack.packb(answer))
    is_hostile = here().rank == src
    lie = mock.patch.object(MsgpackCodec, "encode", return_value=raw)
    with subgroup(0, 1) as group:
        with lie if is_hostile else nullcontext():
            try:
                outcome = repr(call(group=group))
            except ObjcommError as error:
                outcome = f"{type(error).__name__} {error}"
        others_outcome = tell_all(kind, outcome)[1 - src]
    if src == 1 and "seed" in kind:
        return  # rank 1's answer is not used
    assert "DecodeError" in others_outcome
    assert f"cannot decode what rank {src} gave to " in others_outcome
    assert "it is not " in others_outcome


@ranks(2)
def test_a_small_message_beyond_a_limit_costs_only_its_reader() -> None:
    if objcomm.rank() == 0:
        objcomm.broadcast(bytes(1000))
    else:
        with objcomm.configure(max_nbytes=500), pytest.raises(WireError, match="limit of 500"):
            objcomm.broadcast(None)
    with objcomm.configure(max_operation_nbytes=500):
        error_in(WireError, lambda: objcomm.all_gather(bytes(1000)), "max_operation_nbytes")
    assert_group_works()


@ranks(3)
@pytest.mark.parametrize("name", ["all_gather", "send"])
def test_a_message_of_another_version_names_the_ranks_of_both(name: str) -> None:
    objcomm.barrier()
    version = header.VERSION

    def call() -> Any:
        if name == "all_gather":
            objcomm.all_gather(1)
        elif here().rank == 2:
            objcomm.send(1, dst=0)
        else:
            objcomm.recv(src=2)

    if name == "all_gather" or here().rank != 1:
        with mock.patch.object(header, "VERSION", version + (here().rank == 2)):
            # A rank that only sends may be some messages ahead.
            error = error_in(ObjcommError, lambda: [call() for _ in range(AHEAD_MAX + 2)])
        text = f"rank 2 sent rank 0 .* version {version}, got .* version {version + 1}"
        assert re.search(text, str(error))
    tell_all(f"refused {name}", "")
    assert_group_works()


#: Configurations that make one rank refuse what another sends.
REFUSALS: dict[str, dict[str, Any]] = {
    "another key": {"key": "battery staple correct horse"},
    "another codec": {"accept": {"msgpack"}},
    "a limit": {"max_nbytes": 1000},
}


#: Operations that move much data from one rank to all others.
FROM_ONE: dict[str, Callable[[int, int], Any]] = {
    "broadcast": lambda nbytes, root: objcomm.broadcast(bytes(nbytes), src=root),
    "scatter": lambda nbytes, root: OPERATIONS["scatter"](bytes(nbytes), src=root),
    "all_gather": lambda nbytes, root: objcomm.all_gather(
        bytes(nbytes if here().rank == root else 1)
    ),
}


@ranks(3, long=(4, 5))
@pytest.mark.parametrize("why", REFUSALS)
@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        (name, nbytes)
        for name in FROM_ONE  # a broadcast sends smaller ones whole
        for nbytes in (2_000_000 if name == "broadcast" else 40_000, 4_000_000)
    ],
    ids=str,
)
def test_much_data_that_one_rank_refuses_fails_on_all(name: str, why: str, nbytes: int) -> None:
    """No rank returns from the call, so all ranks are in step afterwards."""
    objcomm.barrier()
    for root, refusing in ((0, 2), (0, objcomm.world_size() - 1), (1, 0)):
        chosen = REFUSALS[why] if here().rank == refusing else {}
        with objcomm.configure(**{"key": KEY} | chosen), case(root, refusing):
            error = error_in(ObjcommError, partial(FROM_ONE[name], nbytes, root))
        # With another key, the hub may refuse what this rank has signed.
        if here().rank == refusing and (why, name) != ("another key", "all_gather"):
            assert not isinstance(error, objcomm.CollectiveError)
        assert_group_works()


@ranks(3)
@pytest.mark.parametrize("why", ["another codec", "a limit"])
@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("broadcast", 10_000),
        ("broadcast", 40_000),
        ("broadcast", 1_000_000),
        ("all_gather", 10_000),
    ],
)
def test_little_data_that_one_rank_refuses_fails_there(name: str, nbytes: int, why: str) -> None:
    """No rank waits for the rest of it, so all ranks are in step afterwards too."""
    refuses = here().rank == 2
    with objcomm.configure(**(REFUSALS[why] if refuses else {})):
        if refuses:
            error = error_in(ObjcommError, lambda: FROM_ONE[name](nbytes, 0))
            assert not isinstance(error, objcomm.CollectiveError)
        else:
            FROM_ONE[name](nbytes, 0)
    assert_group_works()
