"""Every pattern of traffic at world sizes that no test machine has, over a link between threads."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any
from unittest import mock

import pytest

from objcomm._algorithms import routes, topology
from objcomm._algorithms.exchange import Exchange
from objcomm._codecs.buffers import BufferKind
from objcomm._config import Settings
from objcomm._transport.link import head_tag, receipt_tag
from objcomm._wire.header import HEADER_NBYTES, WINDOW_NBYTES, Flag, Status
from objcomm._wire.message import Message, compose
from objcomm.errors import DesyncError, TransportTimeout, WireError
from tests.contracts import check_link
from tests.unit.memory_link import (
    MemoryDeviceLink,
    MemoryLink,
    WideLink,
    Wires,
    exchange_on,
    first_bytes,
    header_of,
    linked,
    new_lane,
    on_every_rank,
    sent_to_rank_0,
)
from tests.unit.routed import (
    LARGE_NBYTES,
    brought,
    check_pattern,
    content_of,
    expected,
    message_of,
    run,
    to_be_brought,
)

SHAPES = ["inline", "body", "buffers", "both"]
# Each shape with separate and with bundled sends; each size with short and with long messages.
WORLDS = [
    *[(3, shape) for shape in SHAPES],
    *[(9, shape) for shape in SHAPES],
    *[(size, shape) for size in (2, 8, 13) for shape in ("inline", "both")],
    (25, "body"),
]
HOSTS: dict[str, Callable[[int], list[int]]] = {
    "one host": lambda size: [0] * size,
    "hosts in turns": lambda size: [rank % 3 for rank in range(size)],
    "hosts of two": lambda size: [rank // 2 for rank in range(size)],
}


def test_the_link_between_threads_keeps_the_contract_of_links() -> None:
    class Link(MemoryLink):
        may_send_nothing = True

    wires = [Wires(3) for _ in range(5)]

    def check(rank: int) -> None:
        links = [Link(each, rank) for each in wires]
        check_link(lambda _: links.pop(0), rank, 3)

    on_every_rank(3, check)
    assert wires[0].left_over() == 0


PATTERNS = ["broadcast", "gather", "all_gather", "scatter", "all_to_all"]
# Patterns that use a tree run with many ranks, those that send from each to each with few.
CASES = [
    *[(pattern, size, shape) for pattern in PATTERNS[:4] for size, shape in WORLDS],
    *[(PATTERNS[4], size, shape) for size, shape in WORLDS if size <= 16],
    *[(pattern, 90, "inline") for pattern in ("gather", "scatter")],  # some are three hops away
]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("pattern", "size", "shape"), CASES)
def test_every_message_arrives_whole(pattern: str, size: int, shape: str, hosts: str) -> None:
    for root in {0, 1, size - 1} if pattern == "broadcast" else {size - 1}:
        check_pattern(pattern, size, root, shape, HOSTS[hosts](size))


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1, 0, 2], [0, 1, 2]])
@pytest.mark.parametrize("sharing", [(), (0, 1, 2)])
def test_an_all_gather_carries_each_message_to_each_host_once(
    hosts: list[int], sharing: Collection[int]
) -> None:
    size, nbytes = len(hosts), LARGE_NBYTES
    links = linked(size, hosts, sharing)
    check_pattern("all_gather", links, 0, "buffers")
    for host in set(hosts):
        beside = [rank for rank in range(size) if hosts[rank] == host]
        left = sum(links[rank].crossed_nbytes for rank in beside)
        # All messages except the next host's own pass this host's network card, once.
        following = (host + 1) % len(set(hosts))
        wanted = nbytes * (size - hosts.count(following))
        assert wanted <= left < wanted * 1.05 + 10_000


def counted(call: mock.Mock) -> int:
    """Return the sum of the numbers with which a meter's method was called."""
    return sum(each.args[0] for each in call.call_args_list)


@pytest.mark.parametrize("shape", ["body", "both"])
@pytest.mark.parametrize("operation", PATTERNS[:3])
@pytest.mark.parametrize("size", [2, 3, 9])
def test_paced_messages_arrive_whole_and_are_counted(size: int, operation: str, shape: str) -> None:
    meters, links = [mock.Mock() for _ in range(size)], linked(size)

    def on_rank(rank: int) -> Sequence[Message]:
        exchange = exchange_on(links[rank], new_lane(), meter=meters[rank])
        got = brought(operation, exchange, 1, lambda at: message_of(at, shape, flags=Flag.PACED))
        exchange.finish()
        return got

    results = on_every_rank(size, on_rank)
    assert links[0].wires.left_over() == 0
    headers = [message_of(rank, shape).header for rank in range(size)]
    rest = [each.body_nbytes + each.payload_nbytes for each in headers]
    for rank, meter in enumerate(meters):
        wanted = [expected(peer, shape) for peer in to_be_brought(operation, rank, size, 1)]
        assert [content_of(each) for each in results[rank]] == wanted
        announced = counted(meter.expect)
        assert counted(meter.moved) == announced
        if operation == "all_gather":
            assert announced >= sum(rest)  # with nine ranks, the bundle of heads counts too
        elif operation == "broadcast":
            assert announced == rest[1]
        else:
            assert announced == (sum(rest) - rest[1] if rank == 1 else rest[rank])


def test_a_limit_applies_to_each_message_and_not_to_a_bundle() -> None:
    size, nbytes = 25, 20_000

    def body(exchange: Exchange) -> None:
        rank = exchange.rank
        mine = compose(header_of(rank), bytes([rank]) * nbytes)
        each = [compose(header_of(rank), bytes([peer]) * nbytes) for peer in range(size)]
        wanted = [bytes([peer]) * nbytes for peer in range(size)]
        for root in (0, 3):
            gathered = routes.gather(exchange, mine, root)
            if gathered is not None:
                assert [bytes(one.meta) for one in gathered] == wanted
            scattered = routes.scatter(exchange, each if rank == root else None, root)
            assert bytes(scattered.meta) == wanted[rank]
        assert [bytes(one.meta) for one in routes.all_gather(exchange, mine)] == wanted
        swapped = routes.all_to_all(exchange, each)
        assert [bytes(one.meta) for one in swapped] == [wanted[rank]] * size

    run(size, body, HOSTS["hosts of two"](size), chosen=Settings(max_nbytes=nbytes))


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("size", [3, 9, 90])
def test_no_rank_returns_from_a_meeting_before_all_have_come(size: int, hosts: str) -> None:
    come: list[int] = []

    def body(exchange: Exchange) -> int:
        come.append(exchange.rank)
        routes.all_meet(exchange, compose(exchange.header, b""))
        return len(come)

    assert run(size, body, HOSTS[hosts](size)) == [size] * size


def test_a_rank_that_forwards_messages_does_not_check_them() -> None:
    size, root = 25, 0
    wires = Wires(size)
    branches = [topology.tree(rank, root, wires.hosts) for rank in range(size)]
    chosen = Settings(accept=frozenset({"msgpack"}), max_nbytes=1 << 20)

    def on_rank(rank: int) -> list[Message] | None:
        is_between = rank > 0 and bool(branches[rank].children)
        own = chosen if is_between else None
        exchange = exchange_on(MemoryLink(wires, rank), new_lane(), chosen=own)
        messages = routes.gather(exchange, message_of(rank, "both"), root)
        exchange.finish()
        return messages

    assert sum(bool(each.children) for each in branches) > 2
    gathered = [content_of(each) for each in on_every_rank(size, on_rank)[root]]
    assert gathered == [expected(rank, "both") for rank in range(size)]


@pytest.mark.parametrize("route", ["gather", "scatter"])
def test_a_rank_that_forwards_a_head_allocates_nothing_for_the_rest(route: str) -> None:
    size, rooms = 13, list[int]()  # some ranks have others below them

    def room(nbytes: int) -> bytearray:
        rooms.append(nbytes)
        return bytearray(nbytes)

    with mock.patch("objcomm._wire.admission.room", room):
        check_pattern(route, size, 0, "body")
    # One buffer for the content of each other rank.
    assert rooms.count(len(message_of(0, "body").body)) == size - 1


def test_if_one_rank_failed_nothing_large_is_sent() -> None:
    links = linked(3)

    def body(exchange: Exchange) -> list[Message]:
        mine = message_of(exchange.rank, "buffers")
        if exchange.rank == 1:
            mine = compose(header_of(1, status=Status.FAILURE), b"")
        return routes.all_gather(exchange, mine)

    for messages in run(links, body):
        assert messages[1].header.status == Status.FAILURE
    assert {tag for link in links for _, tag in link.sent} == {head_tag(0)}


def test_every_first_message_fits_into_the_posted_receive() -> None:
    for nbytes in (0, 1, WINDOW_NBYTES - HEADER_NBYTES, WINDOW_NBYTES - HEADER_NBYTES + 1, 1 << 20):
        head = first_bytes(compose(header_of(0), bytes(nbytes)))
        assert len(head) <= WINDOW_NBYTES


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("route", PATTERNS)
@pytest.mark.parametrize(
    ("hosts", "link"),
    [
        ((0, 0, 0), MemoryLink),
        ((0, 0, 0), WideLink),
        ((0, 0, 1, 1), WideLink),  # rank 2 passes the head on
        ((0,) * 12, WideLink),
    ],
)
def test_members_on_the_device_go_over_the_device_link(
    hosts: tuple[int, ...], link: type[MemoryLink], route: str, *, is_staged: bool
) -> None:
    # The "device" is the CPU: the test covers which rank moves what, in which order.
    size = len(hosts)
    kind = BufferKind.TENSOR if is_staged else BufferKind.DEVICE
    flags = Flag.STAGED if is_staged else 0
    host_wires, device_wires = Wires(size, hosts), Wires(size, hosts)
    links = [link(host_wires, rank) for rank in range(size)]
    device_links = [MemoryDeviceLink(device_wires, rank) for rank in range(size)]

    def body(rank: int) -> Any:
        exchange = exchange_on(links[rank], new_lane(), device_link=device_links[rank])
        make = functools.partial(message_of, shape="buffers", kind=kind, flags=flags)
        return brought(route, exchange, 0, make)

    for rank, messages in enumerate(on_every_rank(size, body)):
        wanted = to_be_brought(route, rank, size, 0)
        assert [content_of(each) for each in messages] == [expected(at, "buffers") for at in wanted]
    assert sum(each.carried for each in device_links) > 0
    tags = {tag for each in links for _, tag in each.sent}
    assert tags <= {head_tag(0), receipt_tag(0, 0)}
    assert host_wires.left_over() == device_wires.left_over() == 0


@pytest.mark.parametrize(
    "field", [{"operation": 3}, {"sequence": 1}, {"root": 2}, {"fingerprint": 9}]
)
def test_a_header_of_another_call_is_a_desync_that_names_both_sides(field: dict[str, Any]) -> None:
    theirs = header_of(1, call_site="b.py:9", **field)
    mine = sent_to_rank_0({1: compose(theirs, b"")})
    with pytest.raises(DesyncError) as caught:
        mine.recv_heads([1])
    assert caught.value.positions == {0: mine.header.position, 1: theirs.position}
    for part in ("rank 0", "train.py:1", "rank 1", "b.py:9"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("field", "error"),
    [
        *[({name: 1}, "another group or lane") for name in ("group", "lane", "epoch")],
        ({"sender": 5}, "a message from rank 1, got one from rank 5"),
    ],
)
def test_a_header_of_another_group_or_sender_is_refused(field: dict[str, int], error: str) -> None:
    with pytest.raises(WireError, match=error) as caught:
        sent_to_rank_0({1: compose(header_of(1, **field), b"")}).recv_heads([1])
    assert not isinstance(caught.value, DesyncError)


def test_a_timeout_names_all_ranks_that_are_missing_and_no_other() -> None:
    waiting = sent_to_rank_0({2: message_of(2, "inline")}, 4, seconds=0.05)
    with pytest.raises(TransportTimeout) as caught:
        waiting.recv_heads([1, 2, 3])
    assert caught.value.missing == (1, 3)
