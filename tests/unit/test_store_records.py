"""What ranks write into the store: verdicts and positions, and bytes that are neither."""

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objcomm import errors
from objcomm._failures.deadlock import Deadlock, LaneWait, Step, WaitSnapshot
from objcomm._failures.verdict import Cause, Verdict
from objcomm._observe.stacks import Running
from objcomm._transport.store import pack_record, unpack_record
from objcomm.errors import Position, RankFailure, WireError

POSITIONS = (
    Position(0, "gather", 3, 1, "train.py:3", 1.5),
    Position(2, "barrier", 2, -1, "\udce9.py:9", 0.5, is_over=True, group="dp", line="\udce9.py:1"),
)
FAILURE = RankFailure(1, "ValueError", "no \udce9", "Traceback …")
DESYNC = Verdict.of(
    Cause.DESYNC, reason="roots differ", positions=POSITIONS, meshes=("a", "b"), deadlock=b"\0\xff"
)
FAILED = Verdict.of(Cause.FAILED, failures=(FAILURE,), operation="fail_together")
TIMEOUT = Verdict.of(Cause.TIMEOUT, ranks=(1, 3), seconds=2.5, positions=POSITIONS, silent=(3,))
LOST = Verdict.of(Cause.LOST, ranks=(1,), reason="it died")
VERDICTS = {
    Cause.DESYNC: (DESYNC, errors.DesyncError),
    Cause.REFUSED: (Verdict.of(Cause.REFUSED, failures=(FAILURE,)), errors.CollectiveError),
    Cause.FAILED: (FAILED, errors.CollectiveError),
    Cause.TIMEOUT: (TIMEOUT, errors.TransportTimeout),
    Cause.LOST: (LOST, errors.TransportError),
    Cause.LEFT: (Verdict.of(Cause.LEFT, ranks=(1,), reason="Ctrl-C"), errors.TransportError),
    Cause.APART: (Verdict.of(Cause.APART, ranks=(1, 3), reason="no route"), errors.TransportError),
}
CALL = Step(3, 2, 0, 9, "a.py:1", "gather")
STATE = LaneWait("world", "n", 0, 1, 1, 4, -1, CALL, 2, 1.5, 0.5, ())
PAST = Step(0, 7, -1, 0, "\udce9.py:2")
WHEREABOUTS = WaitSnapshot(
    7,
    140_000_000_000_000,
    (STATE, LaneWait("dp", "", 5, 2, 2, 0, 3, None, -1, 0.0, 0.0, (PAST,))),
    (Deadlock("each waits for another", ((3, STATE, CALL), (4, STATE, CALL)), is_published=True),),
    is_single=True,
    running=(Running(1, "\udce9.py:2", "load", 0.5),),
)


@pytest.mark.parametrize("cause", Cause)
def test_a_verdict_that_was_stored_is_the_same(cause: Cause) -> None:
    verdict, kind = VERDICTS[cause]
    got = unpack_record(pack_record(verdict), Verdict, "a verdict")
    assert got == verdict
    assert got.is_recoverable == (cause in {Cause.DESYNC, Cause.REFUSED, Cause.FAILED})
    error = got.error("gather")
    assert type(error) is kind
    assert str(error) == str(verdict.error("gather"))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301  # made here


def test_a_desync_also_shows_this_ranks_own_position() -> None:
    error = DESYNC.error("gather", Position(1, "gather", 3, 0, "third.py:1"))
    assert isinstance(error, errors.DesyncError)
    assert sorted(error.positions) == [0, 1, 2]
    assert "third.py:1" in str(error)


@pytest.mark.parametrize("verdict", [TIMEOUT, LOST], ids=["timeout", "lost"])
def test_a_verdict_that_no_store_confirmed_says_so(verdict: Verdict) -> None:
    assert "store: no answer" in str(verdict._replace(is_store_silent=True).error("gather"))


def test_whereabouts_that_were_stored_are_the_same() -> None:
    got = unpack_record(pack_record(WHEREABOUTS), WaitSnapshot, "whereabouts")
    assert got == WHEREABOUTS
    assert got.lane("world", 0) == WHEREABOUTS.lanes[0]
    assert got.waiting_of(1) == WHEREABOUTS.lanes[0]
    assert got.waiting_of(2) is None
    assert got.is_single
    assert (got.lanes[0].taken, got.lanes[1].taken) == (-1, 3)
    other = WHEREABOUTS._replace(is_single=False)
    assert unpack_record(pack_record(other), WaitSnapshot, "whereabouts") == other


def test_nobody_waits_for_a_call_that_no_thread_waits_for() -> None:
    unwaited = STATE._replace(waiter=0)
    assert WHEREABOUTS._replace(lanes=(unwaited,)).waiting_of(0) is None


VERDICT = msgpack.unpackb(pack_record(Verdict(Cause.REFUSED, "n", positions=POSITIONS[:1])))
FIELDS = {name: at for at, name in enumerate(Verdict._fields)}
POSITION = VERDICT[FIELDS["positions"]][0]
NOT_VERDICTS: dict[str, tuple[str, Any]] = {
    "a rank that is a claim": ("positions", [[True, *POSITION[1:]]]),
    "a position too short": ("positions", [POSITION[:-1]]),
    "a position that is text": ("positions", ["gather..."]),
    "the limit": ("seconds", "2.5"),
    "the cause": ("cause", 8),
    "a cause that only equals one": ("cause", 2.0),
}


@pytest.mark.parametrize("case", NOT_VERDICTS)
def test_a_verdict_with_a_field_of_another_type_is_refused(case: str) -> None:
    """Otherwise its error would raise a TypeError on the rank that reads it."""
    name, value = NOT_VERDICTS[case]
    fields = [*VERDICT]
    assert unpack_record(msgpack.packb(fields), Verdict, "a verdict").name == "n"
    fields[FIELDS[name]] = value
    with pytest.raises(WireError, match="the store holds a verdict that can't be read"):
        unpack_record(msgpack.packb(fields), Verdict, "a verdict")


@pytest.mark.parametrize(
    ("record", "least"), [(WHEREABOUTS, 100), (DESYNC, 30), (FAILED, 15), (TIMEOUT, 30)]
)
def test_no_field_of_a_record_may_be_of_another_type(record: Any, least: int) -> None:
    def altered(plain: Any) -> Iterator[Any]:
        """Yield copies with one field, at any depth, replaced by a value of a type no field has."""
        yield {}
        for at, each in enumerate(plain if isinstance(plain, list) else ()):
            for other in altered(each):
                yield [*plain[:at], other, *plain[at + 1 :]]

    whole = msgpack.unpackb(pack_record(record), unicode_errors="surrogatepass")
    count = 0
    for count, plain in enumerate(altered(whole), start=1):  # noqa: B007  # used after the loop
        raw = msgpack.packb(plain, unicode_errors="surrogatepass")
        with pytest.raises(WireError, match="a record that can't be read"):
            unpack_record(raw, type(record), "a record")
    assert count > least


def test_a_record_longer_than_any_rank_writes_is_not_read() -> None:
    """An empty list takes one byte in the record, and 64 in memory."""
    raw = msgpack.packb([[]] * (4 << 20))
    with pytest.raises(WireError, match=f"holds a verdict of {len(raw)} bytes, which objcomm"):
        unpack_record(raw, Verdict, "a verdict")


def test_a_limit_may_have_been_given_as_an_integer() -> None:
    got = unpack_record(pack_record(Verdict.of(Cause.TIMEOUT, seconds=8)), Verdict, "a verdict")
    assert (got.seconds, type(got.seconds)) == (8.0, float)


def test_a_rank_that_is_inside_no_call_has_left_it() -> None:
    assert STATE._replace(now=None, is_inside=True).is_over(CALL)


RECORDS = [pack_record(WHEREABOUTS), *[pack_record(verdict) for verdict, _ in VERDICTS.values()]]


@given(
    record=st.sampled_from(RECORDS),
    at=st.integers(0, 400),
    byte=st.integers(0, 255),
    end=st.integers(0, 400),
)
def test_other_bytes_give_an_error_of_ours_or_another_record(
    record: bytes, at: int, byte: int, end: int
) -> None:
    mutated = bytearray(record)
    mutated[at % len(record)] = byte
    for raw in (bytes(mutated), record[:end]):
        with contextlib.suppress(WireError):
            assert isinstance(unpack_record(raw, WaitSnapshot, "whereabouts"), WaitSnapshot)
        with contextlib.suppress(WireError):
            error = unpack_record(raw, Verdict, "a verdict").error("gather", POSITIONS[0])
            assert isinstance(error, errors.ObjcommError)
            assert str(error)
