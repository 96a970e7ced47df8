"""What every implementation of an interface must do, as functions that take a factory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import objcomm
from objcomm import DecodeError, EncodeError
from objcomm.codecs import decode, encode
from objcomm.codecs.base import Codec
from tests.same import assert_same


def check_codec(make: Callable[[], Codec], values: Callable[[], list[Any]], refused: Any) -> None:
    """Hold a codec against `objcomm.codecs.base.Codec`.

    Args:
        make: gives the codec.
        values: gives objects that it carries, new ones on each call.
        refused: an object that it refuses.
    """
    codec = make()
    assert isinstance(codec, Codec)
    assert codec.name.isascii()
    assert 0 < len(codec.name) <= 16
    for value, same in zip(values(), values(), strict=True):
        assert_same(_carried(codec, value), same, sharing=False)
        assert_same(value, same)  # encoding changes nothing
    _check_splitting(codec, values())
    _check_damage(codec, values())
    _check_threads(codec, values)
    with pytest.raises(EncodeError) as caught:
        encode(codec, refused)
    assert caught.value.codec == codec.name
    assert caught.value.path.startswith("obj")
    assert_same(_carried(codec, values()[0]), values()[0], sharing=False)


def _carried(codec: Codec, value: Any) -> Any:
    """What arrives on a receiver that has memory of its own for each buffer."""
    return objcomm.from_tensor(objcomm.to_tensor(value, codec=codec.name))


def _check_splitting(codec: Codec, values: list[Any]) -> None:
    for value in values:
        encoded = codec.encode(value)
        assert isinstance(encoded.meta, (bytes, bytearray))
        for buffer in encoded.buffers:
            assert buffer.flat.dtype is torch.uint8
            assert buffer.flat.dim() == 1
            assert buffer.flat.device.type == "cpu"


def _check_damage(codec: Codec, values: list[Any]) -> None:
    """Decoding what was cut short fails as a DecodeError, or gives some value; nothing else."""
    for value in values:
        meta = bytes(codec.encode(value).meta)
        for length in range(0, len(meta), 1 + len(meta) // 50):
            try:
                decode(codec.name, memoryview(meta[:length]), [])
            except DecodeError as error:
                assert error.codec == codec.name  # noqa: PT017  # decoding may also succeed


def _check_threads(codec: Codec, values: Callable[[], list[Any]]) -> None:
    def carry_all(_: int) -> None:
        for value, same in zip(values(), values(), strict=True):
            assert_same(_carried(codec, value), same, sharing=False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(carry_all, range(8)))
