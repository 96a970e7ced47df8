"""Valid, damaged and hostile bytes: decoding gives an object or an objcomm error."""

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import objcomm
from objcomm import CodecError, WireError
from objcomm._wire import header as frames
from objcomm._wire.header import HEADER_NBYTES, Header, Operation
from tests.ranks import solo
from tests.same import assert_same
from tests.unit.address_space import peak_address_space_nbytes

_NUMBERS = st.integers() | st.floats() | st.complex_numbers() | st.decimals() | st.fractions()
_TEXTS = st.text(st.characters(exclude_categories=())) | st.binary() | st.binary().map(bytearray)
_TIMES = st.datetimes(timezones=st.none() | st.timezones()) | st.timedeltas()
_SCALARS = st.none() | st.booleans() | st.uuids() | _NUMBERS | _TEXTS | _TIMES
_KEYS = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers())
)
# A field may have a title besides its name, which plain data cannot carry and refuses.
_STRUCTS: st.SearchStrategy[Any] = npst.array_dtypes()
_STRUCTS = _STRUCTS.filter(lambda dtype: all(len(field) == 2 for field in dtype.fields.values()))
_REALS = npst.boolean_dtypes() | npst.integer_dtypes() | npst.floating_dtypes()
_TIMES_AND_TEXTS = npst.datetime64_dtypes() | npst.unicode_string_dtypes()
_DTYPES = _REALS | npst.complex_number_dtypes() | _TIMES_AND_TEXTS | _STRUCTS
_ARRAYS = npst.arrays(_DTYPES, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
_TENSORS = npst.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_, np.complex64]),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
).map(torch.from_numpy)
_OBJECTS = st.recursive(
    _SCALARS | _ARRAYS | _TENSORS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(_KEYS, inner)
        | st.sets(_KEYS)
        | st.frozensets(_KEYS)
    ),
    max_leaves=12,
)
_CODECS = st.sampled_from(["pickle", "msgpack"])
_DAMAGED = 60  # tests.fuzz damages many more


@given(_OBJECTS, _CODECS)
def test_any_object_survives_the_way_through_bytes(obj: Any, codec: str) -> None:
    got = objcomm.from_tensor(objcomm.to_tensor(obj, codec=codec))
    assert_same(got, obj, sharing=False)


def _message(obj: Any, codec: str) -> bytearray:
    return bytearray(objcomm.to_tensor(obj, codec=codec).tolist())


def _decoded(raw: bytes | bytearray) -> Any:
    return objcomm.from_tensor(torch.tensor(list(raw), dtype=torch.uint8))


def _check_refused(raw: bytes | bytearray) -> None:
    with pytest.raises((WireError, CodecError)):
        _decoded(raw)


@settings(max_examples=_DAMAGED)
@given(_OBJECTS, _CODECS, st.data())
def test_a_changed_byte_is_noticed(obj: Any, codec: str, data: st.DataObject) -> None:
    raw = _message(obj, codec)
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    _check_refused(raw)


@settings(max_examples=_DAMAGED)
@given(_OBJECTS, _CODECS, st.data())
def test_a_cut_or_lengthened_message_is_noticed(obj: Any, codec: str, data: st.DataObject) -> None:
    raw = _message(obj, codec)
    length = data.draw(st.integers(0, len(raw) - 1))
    _check_refused(raw[:length])
    _check_refused(raw + data.draw(st.binary(min_size=1)))


@pytest.mark.parametrize("cut", [1, 100_000, 399_999])
def test_a_large_buffer_that_was_cut_is_noticed(codec: str, cut: int) -> None:
    raw = objcomm.to_tensor({"w": torch.arange(100_000, dtype=torch.int32)}, codec=codec)
    with pytest.raises((WireError, CodecError)):
        objcomm.from_tensor(raw[:-cut])


@given(st.binary(max_size=2000))
def test_bytes_of_another_program_are_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        _decoded(raw)
    with pytest.raises(WireError):
        _decoded(frames.MAGIC + raw)


_UNSIGNED = {32: st.integers(0, 2**32 - 1), 64: st.integers(0, 2**64 - 1)}
_SIGNED = st.integers(-(2**31), 2**31 - 1)
_HEADERS = st.builds(
    Header,
    **dict.fromkeys(("status", "flags", "operation"), st.integers(0, 255)),
    **dict.fromkeys(("sender", "root", "destination"), _SIGNED),
    **dict.fromkeys(("lane", "epoch", "number", "body_checksum"), _UNSIGNED[32]),
    **dict.fromkeys(("group", "sequence", "fingerprint", "payload_nbytes", "tag"), _UNSIGNED[64]),
    codec=st.text("abc-5", max_size=16),
    call_site=st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=15),
    buffer_count=st.just(0),
    meta_nbytes=st.integers(0, 1000),
    body_nbytes=st.integers(1000, 2**64 - 1),
    digest=st.binary(min_size=32, max_size=32),
    signature=st.just(bytes(32)),
    name=st.just(""),
)


@given(_HEADERS)
def test_a_header_survives_the_way_through_bytes(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_NBYTES
    assert Header.unpack(packed) == header
    name = "body"[: header.meta_nbytes] if header.operation == Operation.BARRIER else ""
    assert Header.unpack(bytearray(packed) + b"body") == header._replace(name=name)


@pytest.mark.parametrize(
    "call_site", ["é" * 200 + "/train.py:12", "/" + "x" * 500 + "/train.py:12"]
)
def test_a_long_call_site_keeps_its_end(call_site: str) -> None:
    header = Header.unpack(objcomm.to_tensor(1).numpy().tobytes())
    got = Header.unpack(header._replace(call_site=call_site).pack()).call_site
    assert got.endswith("/train.py:12")


@settings(max_examples=_DAMAGED)
@given(_OBJECTS, _CODECS, _HEADERS)
def test_a_header_with_wrong_sizes_gives_an_error(obj: Any, codec: str, header: Header) -> None:
    raw = _message(obj, codec)
    true = Header.unpack(raw)
    hostile = header._replace(
        status=true.status, codec=true.codec, body_checksum=true.body_checksum
    )
    assume(hostile[12:16] != true[12:16])
    raw[:HEADER_NBYTES] = hostile.pack()
    _check_refused(raw)


@solo()
def test_an_announced_size_is_not_believed_before_it_is_checked() -> None:
    for codec, exponent in itertools.product(("pickle", "msgpack"), (33, 40, 60, 63)):
        raw = _message({"w": torch.arange(20_000)}, codec)
        true = Header.unpack(raw)
        before = peak_address_space_nbytes()
        for field in ("buffer_count", "meta_nbytes", "body_nbytes", "payload_nbytes"):
            size = min(2**exponent, 2**32 - 1) if field == "buffer_count" else 2**exponent
            _check_refused(true._replace(**{field: size}).pack() + raw[HEADER_NBYTES:])
        rows = raw[HEADER_NBYTES:]
        rows[:8] = (2**exponent).to_bytes(8, "little")
        checksum = zlib.crc32(rows[: true.body_nbytes])
        lie = true._replace(payload_nbytes=2**exponent, body_checksum=checksum)
        _check_refused(lie.pack() + rows)
        assert peak_address_space_nbytes() - before < 2**30
