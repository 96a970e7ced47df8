"""Messages that arrive whole with their header, and those that may not."""

from typing import Any

import pytest
import torch

from objcomm._algorithms import routes, topology
from objcomm._codecs.buffers import Buffer, BufferKind, readable
from objcomm._config import Settings, secret_of
from objcomm._transport.link import head_tag
from objcomm._wire.header import HEADER_NBYTES, WINDOW_NBYTES, Flag, Header
from objcomm._wire.message import Message, compose, head_of, open_body
from objcomm.errors import AuthenticationError, WireError
from tests.unit.memory_link import (
    MemoryLink,
    WideLink,
    Wires,
    exchange_on,
    first_bytes,
    header_of,
    linked,
    new_lane,
    sent_to_rank_0,
)
from tests.unit.routed import check_pattern, content_of, message_of, run

MOST_NBYTES = WideLink.head_max_nbytes
KINDS = (BufferKind.TENSOR, BufferKind.MEMORY, BufferKind.BYTES, BufferKind.BYTEARRAY)


def whole(*lengths: int, flags: int = 0, kind: BufferKind | None = None) -> Message:
    """Return a message, whole if allowed, with a buffer of each length."""
    buffers = []
    for at, nbytes in enumerate(lengths):
        flat = torch.full((nbytes,), at, dtype=torch.uint8)
        buffers.append(Buffer(KINDS[at % 4] if kind is None else kind, flat, flat))
    message = compose(header_of(0, flags=flags), b"meta", buffers, device_types="cpu")
    message.make_whole(MOST_NBYTES)
    return message


def opened(raw: bytes) -> Message:
    message = head_of(raw, Header.unpack(raw))
    open_body(message)
    return message


def test_large_and_small_buffers_of_every_kind_come_with_the_header() -> None:
    lengths = (100_000, 7, 0, 40_000, WINDOW_NBYTES, WINDOW_NBYTES + 1, 5)
    sent = whole(*lengths)
    assert sent.is_all_head
    raw = first_bytes(sent)
    assert len(raw) == HEADER_NBYTES + sent.header.nbytes == sent.header.head_nbytes
    got = opened(raw + b"what lies behind it")
    assert got.is_all_head
    assert got.header.is_inline
    assert content_of(got) == content_of(sent)
    assert [each.kind for each in got.buffers] == [KINDS[at % 4] for at in range(len(lengths))]
    assert list(got.content()) == [sent.body, *[bytes([at]) * lengths[at] for at in (0, 3, 5)]]


@pytest.mark.parametrize("missing", [1, 40_000, 100_000])
def test_a_message_that_was_cut_off_is_refused(missing: int) -> None:
    raw = first_bytes(whole(100_000))
    with pytest.raises(WireError, match="cut off"):
        opened(raw[:-missing])


def test_a_message_too_long_for_the_link_is_not_sent_whole() -> None:
    assert whole(MOST_NBYTES - 1000).is_all_head
    assert not whole(MOST_NBYTES).is_all_head
    assert len(first_bytes(whole(MOST_NBYTES))) < WINDOW_NBYTES


@pytest.mark.parametrize("flag", [Flag.STAGED, Flag.PACED, Flag.OFFERED, Flag.ON_DEVICE])
def test_a_message_with_another_route_is_not_sent_whole(flag: Flag) -> None:
    assert not whole(100_000, flags=flag).is_all_head
    assert not whole(100_000, kind=BufferKind.DEVICE).is_all_head


_PATTERNS = ["broadcast", "gather", "all_gather"]


def on_wide_links(size: int, pattern: str, shape: str, *hosts: int) -> list[MemoryLink]:
    """Carry out one operation, and return the links that it used."""
    links = linked(size, hosts, kind=WideLink)
    check_pattern(pattern, links, 1, shape)
    return links


@pytest.mark.parametrize("shape", ["inline", "body", "buffers", "both"])
@pytest.mark.parametrize(
    ("size", "pattern"),
    [*[(size, each) for size in (2, 3, 4) for each in _PATTERNS[:2]], (2, "all_gather")],
)
def test_few_ranks_send_only_whole_messages(size: int, pattern: str, shape: str) -> None:
    sent = [each for link in on_wide_links(size, pattern, shape) for each in link.sent]
    assert {tag for _, tag in sent} == {head_tag(0)}
    assert len(sent) == (size - 1) * (size if pattern == "all_gather" else 1)


@pytest.mark.parametrize("pattern", _PATTERNS)
@pytest.mark.parametrize(("size", "hosts"), [(9, ()), (20, ()), (4, (0, 0, 1, 1)), (3, (0, 1, 2))])
def test_many_ranks_and_many_hosts_get_the_same(size: int, hosts: Any, pattern: str) -> None:
    on_wide_links(size, pattern, "both", *hosts)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2), (0, 1, 1, 0)])
def test_no_message_is_sent_to_a_host_twice(hosts: tuple[int, ...]) -> None:
    nbytes = message_of(1, "both").header.nbytes
    links = on_wide_links(len(hosts), "broadcast", "both", *hosts)
    crossed = sum(link.crossed_nbytes for link in links)
    assert crossed < (len(set(hosts)) - 1) * nbytes + 10_000
    is_whole = {tag for link in links for _, tag in link.sent} == {head_tag(0)}
    assert is_whole == (nbytes < topology.whole_below(1, hosts))


def test_a_gather_that_wants_only_heads_sends_only_these() -> None:
    links = linked(2, kind=WideLink)
    run(links, lambda at: routes.gather(at, message_of(at.rank, "both"), 0, max_nbytes=1000))
    assert [nbytes for link in links for nbytes, _ in link.sent] == [HEADER_NBYTES]


def test_a_message_that_exceeds_a_limit_is_refused_by_its_reader() -> None:
    sent = {1: message_of(1, "both")}
    mine = sent_to_rank_0(sent, kind=WideLink, chosen=Settings(max_nbytes=100_000))
    (message,) = mine.recv_heads([1])
    assert not message.buffers
    with pytest.raises(WireError, match="more than the limit of 100000"):
        message.check()


def test_the_whole_message_is_signed() -> None:
    keyed = Settings(secret=secret_of("correct horse battery staple"))
    sending, receiving, later = (
        exchange_on(WideLink(Wires(2), rank), new_lane(), chosen=keyed) for rank in (1, 0, 0)
    )
    message = message_of(1, "buffers")
    message.make_whole(MOST_NBYTES)
    raw = bytearray(sending.gate.head_of(message, 0))
    receiving.open(bytes(raw), 1).check()
    raw[-1] ^= 1
    with pytest.raises(AuthenticationError, match="not what was signed"):
        later.open(bytes(raw), 1).check()


def test_a_received_message_has_its_own_memory() -> None:
    raw = first_bytes(whole(100_000, 50_000, kind=BufferKind.TENSOR))
    first, second = opened(raw), opened(raw)
    first.buffers[0].flat.zero_()
    first.buffers[1].flat.zero_()
    assert bytes(readable(second.buffers[1].flat)) == b"\1" * 50_000
