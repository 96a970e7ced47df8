"""A hostile size is refused before any memory is allocated for it."""

import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import objcomm
from objcomm import DecodeError, EncodeError, ForbiddenTypeError, UsageError, WireError
from objcomm._codecs import nesting
from objcomm._codecs.nesting import check_nesting
from objcomm._config import Settings, settings
from objcomm._wire.failure_message import failures_in
from objcomm._wire.header import HEADER_NBYTES, ROW_NBYTES, Header, Status
from objcomm._wire.message import Message, compose
from tests.unit.memory_link import header_of, sent_to_rank_0

LITTLE = 1 << 20


@contextmanager
def little_memory() -> Iterator[None]:
    """Check that the block allocates almost no memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LITTLE
    finally:
        tracemalloc.stop()


def message_with(**fields: Any) -> Message:
    """Return a message whose header has these fields."""
    message = compose(header_of(1), b"")
    message.header = message.header._replace(**fields)
    return message


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"payload_nbytes": 2**60}, f"a message of {2**60} bytes"),
        ({"body_nbytes": 2**60}, f"a message of {2**60} bytes"),
        (
            {"buffer_count": 10**6, "body_nbytes": 10**7},
            "1000000 buffers, more than the limit of 524288",
        ),
    ],
)
def test_a_header_that_announces_too_much_is_refused(fields: dict[str, int], reason: str) -> None:
    mine = sent_to_rank_0({1: message_with(**fields)}, chosen=Settings())
    with little_memory(), pytest.raises(WireError, match=reason):
        mine.recv_heads([1])


def test_a_header_of_another_codec_is_refused() -> None:
    chosen = Settings(accept=frozenset({"msgpack"}))
    mine = sent_to_rank_0({1: compose(header_of(1), bytes(100_000))}, chosen=chosen)
    with little_memory(), pytest.raises(DecodeError, match="accepts only msgpack"):
        mine.recv_heads([1])


def test_messages_of_one_operation_count_together() -> None:
    messages = {rank: compose(header_of(rank), bytes(600)) for rank in (1, 2)}
    mine = sent_to_rank_0(messages, 3, chosen=Settings(max_operation_nbytes=1000))
    first, second = mine.recv_heads([1, 2])
    first.check()
    with pytest.raises(WireError, match=r"1200 bytes with those .* more than the limit of 1000"):
        second.check()  # it arrived whole: no rank waits for it, and only its reader fails


def test_bytes_without_a_group_have_the_same_limits() -> None:
    small = objcomm.to_tensor(bytes(1000))
    with objcomm.configure(max_nbytes=999), pytest.raises(WireError, match="max_nbytes"):
        objcomm.from_tensor(small)
    parts = objcomm.to_tensor([torch.ones(1), torch.ones(2)])
    with objcomm.configure(max_buffers=1), pytest.raises(WireError, match="2 buffers"):
        objcomm.from_tensor(parts)
    with pytest.raises(DecodeError, match="accepts only msgpack"):
        objcomm.from_tensor(small, accept="msgpack")
    with objcomm.configure(accept={"msgpack"}):
        assert objcomm.from_tensor(small, accept={"pickle"}) == bytes(1000)


def test_a_message_may_have_very_many_small_buffers() -> None:
    message = message_with(buffer_count=300_000, body_nbytes=9 * 300_000)
    assert sent_to_rank_0({1: message}).recv_heads([1])[0].header == message.header


@pytest.mark.parametrize("name", ["max_nbytes", "max_operation_nbytes", "max_depth", "max_buffers"])
def test_a_limit_is_an_integer_that_leaves_room(name: str) -> None:
    given: dict[str, Any] = {name: 7}
    with objcomm.configure(**given):
        assert getattr(settings(), name) == 7
    least = 0 if name == "max_buffers" else 1
    wrong: list[Any] = [True, 1.5, "5", -1, least - 1]
    for limit in wrong:
        is_small = type(limit) is int
        reason = rf"{name}={limit}.* must be {least} or more" if is_small else "must be an integer"
        with pytest.raises(UsageError, match=reason):
            objcomm.configure(**{name: limit})


def unpacked(meta: bytes, like: Any = None) -> Any:
    """Decode the message of an object like this, with other content."""
    raw = objcomm.to_tensor(like, codec="msgpack").numpy().tobytes()
    header = Header.unpack(raw)
    body = raw[HEADER_NBYTES : HEADER_NBYTES + header.buffer_count * ROW_NBYTES] + meta
    nbytes, checksum = len(body), zlib.crc32(body)
    header = header._replace(meta_nbytes=len(meta), body_nbytes=nbytes, body_checksum=checksum)
    return objcomm.from_tensor(torch.frombuffer(bytearray(header.pack() + body), dtype=torch.uint8))


LONG_LIST = b"\xdd"  # followed by four bytes of length


@pytest.mark.parametrize(
    "meta",
    [
        pytest.param(LONG_LIST + b"\xff\xff\xff\xff", id="4 billion members"),
        pytest.param((LONG_LIST + b"\x00\x00\xf0\x00") * 10_000 + bytes(1), id="61,440, nested"),
        pytest.param((b"\xdc\x80\x00") * 200 + bytes(40_000), id="32,768, nested less"),
        pytest.param(b"\x91" * 50_000, id="depth"),
        pytest.param(b"\x81\x01" * 20_000 + b"\x01", id="depth of mappings"),
        pytest.param(b"\x92\x01" * 300 + b"\x01", id="depth of last members"),
        pytest.param(b"\x92" * 300 + b"\x01" * 301, id="depth of first members"),
    ],
)
def test_a_small_msgpack_stream_of_a_large_object_is_refused(meta: bytes) -> None:
    reasons = r"members|nested deeper|ValueError|exceeds"
    with little_memory(), pytest.raises(DecodeError, match=reasons):
        unpacked(meta)


def ext(name: bytes) -> Any:
    """Return the head of an extended value on the wire."""
    return msgpack.ExtType(1, name)


LONG_SHAPE = [ext(b"range"), 0, 1 << 50, 1]
CHOSEN: dict[str, tuple[list[Any], str]] = {
    "a fraction of a text": ([ext(b"fraction"), "1e9", 1], "part 0 of a fraction is a str, not"),
    "a fraction of a decimal": ([ext(b"fraction"), [ext(b"decimal"), "1e999999999"], 1], ""),
    "a scalar of 2 GB": ([ext(b"scalar"), "V2000000000", b""], ""),
    "a scalar of text": ([ext(b"scalar"), "U500000000", b""], ""),
    "a scalar of an object": ([ext(b"scalar"), "O", b""], ""),
    "a range as a shape": ([ext(b"ndarray"), 0, "f4", LONG_SHAPE, "C"], ""),
    "a text in a shape": ([ext(b"ndarray"), 0, "u1", [2**33, "x"], "C"], ""),
    "no such exception": ([ext(b"exception"), "SystemError2", [], [], "x"], ""),
    "a builtin function": ([ext(b"exception"), "open", ["x", "w"], [], "x"], ""),
    "a class that is not registered": ([ext(b"object"), "os.system", "true"], r"os\.system"),
    "no such rule": ([ext(b"eval"), "1"], ""),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_sender_cannot_choose_what_is_built(name: str) -> None:
    value, reason = CHOSEN[name]
    with little_memory(), pytest.raises(DecodeError, match=f"cannot decode.*{reason}"):
        unpacked(msgpack.packb(value))


@pytest.mark.parametrize("dtype", ["|V0", "|S0", "<U0"])
def test_an_array_of_empty_items_takes_no_memory(dtype: str) -> None:
    meta = msgpack.packb([ext(b"ndarray"), 0, dtype, [1 << 33], "C"])
    with little_memory():
        assert unpacked(meta, like=np.zeros(0, "f4")).nbytes == 0


def test_a_small_report_of_many_failures_is_refused() -> None:
    meta = (LONG_LIST + b"\x00\x00\x70\x00") * 1000 + bytes(24_000)
    message = compose(header_of(1, status=Status.FAILURE), meta)
    with little_memory(), pytest.raises(WireError, match="can't be read"):
        failures_in([message])


def test_an_object_that_is_nested_too_deep_is_refused_by_its_sender() -> None:
    deep: Any = ()
    for _ in range(198):
        deep = [deep]
    assert objcomm.from_tensor(objcomm.to_tensor({"a": deep}, codec="msgpack")) == {"a": deep}
    with pytest.raises(EncodeError, match="deeper than 200"):
        objcomm.to_tensor({"a": [deep]}, codec="msgpack")


_PLAIN = st.recursive(
    st.none() | st.floats() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(max_size=70),
    lambda member: st.lists(member, max_size=20) | st.dictionaries(st.text(), member, max_size=20),
    max_leaves=60,
)


def depth_of(obj: Any) -> int:
    if isinstance(obj, (list, dict)):
        members = obj.values() if isinstance(obj, dict) else obj
        return 1 + max(map(depth_of, members), default=0)
    return 0


@given(_PLAIN)
def test_the_depth_of_a_stream_is_that_of_its_object(obj: Any) -> None:
    meta = memoryview(msgpack.packb(obj))
    depth = depth_of(obj)
    check_nesting(meta, depth)
    if depth:
        with pytest.raises(DecodeError, match="nested deeper"):
            check_nesting(meta, depth - 1)


def nested(depth: int, innermost: bytes) -> bytes:
    return b"\x92" * (depth - 1) + innermost + b"\x01" * (depth - 1)


@pytest.mark.parametrize(
    "innermost", [b"\x90", b"\x80", b"\x91\x01", b"\x81\x01\x02", b"\xdc\x00\x00"]
)
def test_a_container_that_is_one_token_counts_as_a_level(innermost: bytes) -> None:
    for depth in range(1, 6):
        meta = memoryview(nested(depth, innermost))
        check_nesting(meta, depth)
        outer = memoryview(b"\x92\x01" + nested(depth, b"\x91" + innermost))
        check_nesting(outer, depth + 2)
        for tight, max_depth in ((meta, depth - 1), (outer, depth + 1)):
            with pytest.raises(DecodeError, match="nested deeper"):
                check_nesting(tight, max_depth)


@pytest.mark.parametrize("depth", [1, 198, 199, 200])
def test_a_token_behind_full_containers_counts_where_it_lies(depth: int) -> None:
    # A number is a list that adds no level, and what follows it is at the number's level.
    number = msgpack.packb([ext(b"int"), "0x7"])
    stream = b"\x92" * depth + number + b"\x91\x90" + b"\xc0" * (depth - 1)
    refusal = pytest.raises(DecodeError, match="nested deeper")
    with nullcontext() if depth <= 198 else refusal:
        check_nesting(memoryview(stream), 200, 8)


@pytest.mark.parametrize(
    "member", [b"\x90", b"\x80", b"\x91\x01", b"\x91\x90", b"\x81\xa0\x90", b"\x91" * 150 + b"\x90"]
)
def test_many_small_containers_are_checked_together(member: bytes) -> None:
    count = 300_000 // len(member)
    stream = b"\xdd" + count.to_bytes(4, "big") + member * count
    steps = sum(1 for _ in nesting._containers(stream))  # noqa: SLF001  # seconds would depend on the machine
    assert steps <= 3 + len(stream) / 3  # each is 1 µs


def test_many_empty_containers_arrive() -> None:
    objects: list[Any] = [[{}] * 100_000, [[]] * 100_000, [[{}], {"a": []}] * 10_000]
    for obj in objects:
        assert objcomm.from_tensor(objcomm.to_tensor(obj, codec="msgpack")) == obj


@given(st.binary(max_size=3000))
def test_any_bytes_are_accepted_or_refused(meta: bytes) -> None:
    try:
        check_nesting(memoryview(meta), 3)
    except DecodeError:
        return


def test_exceptions_are_plain_data() -> None:
    error = ExceptionGroup("both", [KeyError("a"), OSError(2, "gone", "file")])
    error.add_note("on rank 1")
    got = objcomm.from_tensor(objcomm.to_tensor({"e": error}, codec="msgpack"))["e"]
    assert type(got) is ExceptionGroup
    assert got.__notes__ == ["on rank 1"]
    assert [type(each) for each in got.exceptions] == [KeyError, FileNotFoundError]
    assert str(got.exceptions[1]) == str(error.exceptions[1])
    with pytest.raises(EncodeError, match=r"obj\['e'\].* is not registered"):
        objcomm.to_tensor({"e": UsageError("no")}, codec="msgpack")


def test_an_exception_that_is_not_registered_here_is_shown_by_its_text() -> None:
    value = [ext(b"exception"), "Disk", [], [], "/: 3"]
    with pytest.raises(ForbiddenTypeError, match="/: 3"):
        unpacked(msgpack.packb(value))
