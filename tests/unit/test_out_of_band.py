"""Buffers that objects pickle out of band arrive aligned, writable and with their own memory."""

import ctypes
import pickle
from typing import Any

import pytest

import objcomm


class Block:
    """Hands its memory to the pickler, as array classes do."""

    def __init__(self, content: Any) -> None:
        self.content = memoryview(content)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return Block, (pickle.PickleBuffer(self.content),)


@pytest.mark.parametrize("nbytes", [1, 1000, 100_000])
def test_out_of_band_buffers_are_writable_and_aligned(nbytes: int) -> None:
    sent = Block(bytearray(b"a" * nbytes))
    got = objcomm.from_tensor(objcomm.to_tensor(sent)).content
    assert got == sent.content
    assert ctypes.addressof(ctypes.c_char.from_buffer(got)) % 64 == 0
    got[-1] = 0
    assert sent.content[-1] == ord("a")
