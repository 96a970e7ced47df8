"""Bytes that are well-formed except in one respect, which the error names."""

import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm import ForbiddenTypeError, WireError
from objcomm._codecs import restricted
from objcomm._codecs.pickle5 import PickleCodec
from objcomm._wire.header import HEADER_NBYTES, VERSION
from tests.unit.opcodes import BUILD, EMPTY_TUPLE, NEWOBJ, PROTO, REDUCE, STOP, mapping, named


class Command:
    """An admitted class whose instances can be called."""

    calls = 0

    def __call__(self) -> int:
        Command.calls += 1
        return Command.calls


def test_a_changed_byte_of_a_large_buffer_is_noticed(codec: str) -> None:
    raw = objcomm.to_tensor({"w": torch.arange(20_000)}, codec=codec)
    raw[-1] ^= 1
    with pytest.raises(WireError, match="payload's checksum"):
        objcomm.from_tensor(raw)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_tensor_that_is_too_short_or_too_long_is_noticed(change: int, codec: str) -> None:
    raw = objcomm.to_tensor([1, 2], codec=codec)
    changed = raw[:change] if change < 0 else torch.cat([raw, torch.zeros_like(raw[:change])])
    announced = f"{len(raw)} bytes was announced, but {len(changed)} arrived"
    with pytest.raises(WireError, match=announced):
        objcomm.from_tensor(changed)


def test_a_valid_header_of_another_version_is_refused() -> None:
    raw = bytearray(objcomm.to_tensor(1).numpy().tobytes())
    raw[4] = VERSION + 1
    end = HEADER_NBYTES - 4
    raw[end:HEADER_NBYTES] = struct.pack("<I", zlib.crc32(raw[:end]))
    with pytest.raises(WireError, match=f"version {VERSION}, got .* version {VERSION + 1}"):
        objcomm.from_tensor(torch.frombuffer(raw, dtype=torch.uint8))


def test_a_stream_calls_no_instance_of_an_admitted_class() -> None:
    name = f"{__name__}.Command"
    stream = PROTO + named(__name__, "Command") + EMPTY_TUPLE + NEWOBJ + EMPTY_TUPLE + REDUCE + STOP
    with pytest.raises(ForbiddenTypeError, match="a Command is called"):
        restricted.loads(memoryview(stream), [], {name: Command}, 100)
    assert Command.calls == 0


def test_a_stream_gives_no_state_to_an_object_that_the_program_has_listed() -> None:
    listed = Command()
    stream = PROTO + named(__name__, "listed") + mapping(calls=b"K\x07") + BUILD + STOP
    allow: dict[str, Any] = {f"{__name__}.listed": listed, f"{__name__}.Command": Command}
    with pytest.raises(ForbiddenTypeError, match="members are added to a Command"):
        restricted.loads(memoryview(stream), [], allow, 100)
    assert not vars(listed)


def test_a_stream_gives_no_state_to_an_array() -> None:
    encoded = PickleCodec().encode(np.arange(3))
    stream = bytes(encoded.meta).removesuffix(STOP) + mapping() + BUILD + STOP
    owners = [buffer.flat for buffer in encoded.buffers]
    with pytest.raises(ForbiddenTypeError, match="a ndarray is given a state"):
        restricted.loads(memoryview(stream), owners, {}, 100)
