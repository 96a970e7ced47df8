"""What every implementation of an interface must do, as functions that take a factory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

import objcomm
from objcomm import DecodeError, EncodeError
from objcomm.codecs import decode, encode
from objcomm.codecs.base import Codec
from objcomm.transport.link import Connections, Link, Pending, head_tag, payload_tag, receipt_tag
from objcomm.wire.header import WINDOW_NBYTES
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


# Longer than a test may take: a wait that only the limit ends fails the test.
_LIMIT = timedelta(seconds=100)


def check_transfers(link: Link) -> None:
    """Hold a link against `objcomm.transport.link.Link`; every rank calls this with its own."""
    others = [peer for peer in range(link.size) if peer != link.rank]
    sent = _check_order(link, others) + _check_tags(link, others)
    big = _filled(link.rank, 20_000_000)  # more than any buffer of the system's
    sent += [link.send(big, peer, payload_tag(0, 7)) for peer in others]
    for peer in others:
        room = torch.zeros_like(big)
        link.recv(room, peer, payload_tag(0, 7)).wait(_LIMIT)
        assert (room == peer + 1).all()
    for pending in sent:
        pending.wait(_LIMIT)


def _check_order(link: Link, others: list[int]) -> list[Pending]:
    """What a peer sends with one tag arrives in order; a receive may be longer than a message."""
    lengths, tag = (100, 1, WINDOW_NBYTES), head_tag(0)
    sent = [
        link.send(_filled(link.rank, length), peer, tag) for peer in others for length in lengths
    ]
    for peer in others:
        rooms = [torch.zeros(WINDOW_NBYTES, dtype=torch.uint8) for _ in lengths]
        for pending in [link.recv(room, peer, tag) for room in rooms]:
            pending.wait(_LIMIT)
        for length, room in zip(lengths, rooms, strict=True):
            assert (room[:length] == peer + 1).all()
            assert not room[length:].any()
    return sent


def _check_tags(link: Link, others: list[int]) -> list[Pending]:
    """A message with one tag does not wait for one with another that was posted before."""
    early, late = payload_tag(0, 6), receipt_tag(0, 6)
    sent = []
    for peer in others:
        rooms = torch.zeros(2, 1, dtype=torch.uint8)
        pending = [link.recv(rooms[0], peer, early), link.recv(rooms[1], peer, late)]
        sent.append(link.send(_filled(link.rank, 1), peer, late))
        pending[1].wait(_LIMIT)
        sent.append(link.send(_filled(link.rank, 1), peer, early))
        pending[0].wait(_LIMIT)
        assert rooms.tolist() == [[peer + 1], [peer + 1]]
    return sent


def _meet(link: Link, others: list[int]) -> None:
    tag = payload_tag(0, 9)
    pending = [link.recv(_filled(0, 1), peer, tag) for peer in others]
    pending += [link.send(_filled(0, 1), peer, tag) for peer in others]
    for each in pending:
        each.wait(_LIMIT)


def _filled(rank: int, length: int) -> torch.Tensor:
    return torch.full((length,), rank + 1, dtype=torch.uint8)


def check_ends(link: Connections) -> None:
    """Hold it against `Connections`: rank 0 closes its own, and all who wait for it are woken.

    Every rank calls this with its own link, which is of no use afterwards.
    """
    others = [peer for peer in range(link.size) if peer != link.rank]
    assert list(link.closed()) == []
    _meet(link, others)  # nobody closes before all have looked
    awaited = others if link.rank == 0 else [0]
    pending = [link.recv(_filled(0, 1), peer, payload_tag(0, 8)) for peer in awaited]
    if link.rank == 0:
        for peer in others:
            link.recv(_filled(0, 1), peer, head_tag(0)).wait(_LIMIT)  # it has come so far, too
        threading.Timer(0.1, link.abort).start()  # from another thread than the one that waits
    else:
        link.send(_filled(0, 1), 0, head_tag(0)).wait(_LIMIT)
    for each in pending:
        with pytest.raises(RuntimeError):
            each.wait(_LIMIT)
    assert all(link.is_closed(peer) for peer in awaited)
    assert set(awaited) <= set(link.closed())
    assert (0 in link.closed_by()) is (link.rank != 0)
    with pytest.raises(RuntimeError):
        link.send(_filled(0, 1), awaited[0], payload_tag(0, 9)).wait(_LIMIT)
    link.abort()
