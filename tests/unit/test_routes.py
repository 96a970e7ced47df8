"""Every pattern of traffic at world sizes that no test machine has, over a link between threads."""

from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest
import torch

from objcomm._algorithms import routes, topology
from objcomm._algorithms.exchange import Exchange
from objcomm._codecs.buffers import Buffer, BufferKind
from objcomm._config import Settings
from objcomm._transport.link import head_tag, receipt_tag
from objcomm._wire.header import HEADER_NBYTES, WINDOW_NBYTES, Flag, Status
from objcomm._wire.message import Message, compose
from objcomm.errors import DesyncError, TransportTimeout, WireError
from tests.contracts import check_link
from tests.unit.memory_link import (
    MemoryDeviceLink,
    MemoryLink,
    Wires,
    exchange_on,
    first_bytes,
    header_of,
    new_lane,
    on_every_rank,
)
from tests.unit.routed import content_of, expected, message_of, run

SHAPES = ["inline", "body", "buffers", "both"]
# Each shape where ranks send one by one and where they bundle, each size with little and with much.
WORLDS = [
    *[(3, shape) for shape in SHAPES],
    *[(9, shape) for shape in SHAPES],
    *[(size, shape) for size in (2, 8, 13) for shape in ("inline", "both")],
    (25, "body"),
]
# Of 90 on one host some are three hops away.
MANY = [*WORLDS, (90, "inline")]
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


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("size", "shape"), WORLDS)
def test_a_broadcast_reaches_every_rank_whole(size: int, shape: str, hosts: str) -> None:
    for root in {0, 1, size - 1}:

        def body(exchange: Exchange, root: int = root) -> Message:
            mine = message_of(root, shape) if exchange.rank == root else None
            return routes.broadcast(exchange, mine, root)

        for message in run(size, body, HOSTS[hosts](size)):
            assert content_of(message) == expected(root, shape)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("size", "shape"), MANY)
def test_a_gather_brings_every_message_to_its_root(size: int, shape: str, hosts: str) -> None:
    root = size - 1
    results = run(
        size,
        lambda exchange: routes.gather(exchange, message_of(exchange.rank, shape), root),
        HOSTS[hosts](size),
    )
    assert results[:-1] == [None] * (size - 1)
    assert [content_of(each) for each in results[root]] == [
        expected(rank, shape) for rank in range(size)
    ]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("size", "shape"), WORLDS)
def test_an_all_gather_brings_every_message_to_every_rank(
    size: int, shape: str, hosts: str
) -> None:
    results = run(
        size,
        lambda exchange: routes.all_gather(exchange, message_of(exchange.rank, shape)),
        HOSTS[hosts](size),
    )
    for messages in results:
        assert [content_of(each) for each in messages] == [
            expected(rank, shape) for rank in range(size)
        ]


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1, 0, 2], [0, 1, 2]])
@pytest.mark.parametrize("sharing", [(), (0, 1, 2)])
def test_an_all_gather_carries_each_message_to_each_host_once(
    hosts: list[int], sharing: Collection[int]
) -> None:
    size, nbytes = len(hosts), 3 << 20
    wires = Wires(size, hosts, sharing)
    links = [MemoryLink(wires, rank) for rank in range(size)]

    def on_rank(rank: int) -> None:
        exchange = exchange_on(links[rank], new_lane())
        flat = torch.full((nbytes,), rank, dtype=torch.uint8)
        mine = compose(header_of(rank), b"", [Buffer(BufferKind.TENSOR, flat, flat)])
        for peer, each in enumerate(routes.all_gather(exchange, mine)):
            (buffer,) = each.buffers
            assert buffer.flat.numel() == nbytes
            assert bool((buffer.flat == peer).all())
        exchange.finish()

    on_every_rank(size, on_rank)
    for host in set(hosts):
        beside = [rank for rank in range(size) if hosts[rank] == host]
        left = sum(links[rank].crossed_nbytes for rank in beside)
        # All but what the next host has itself passes through this host's card, once.
        following = (host + 1) % len(set(hosts))
        wanted = nbytes * (size - hosts.count(following))
        assert wanted <= left < wanted + 10_000


class Counting:
    """A meter that remembers."""

    def __init__(self) -> None:
        self.expected = 0
        self.pieces: list[int] = []

    def expect(self, nbytes: int) -> None:
        self.expected += nbytes

    def moved(self, nbytes: int) -> None:
        self.pieces.append(nbytes)


PACED: dict[str, Callable[[Exchange, Message], object]] = {
    "broadcast": lambda exchange, mine: routes.broadcast(
        exchange, mine if exchange.rank == 1 else None, 1
    ),
    "gather": lambda exchange, mine: routes.gather(exchange, mine, 1),
    "all_gather": routes.all_gather,
}


@pytest.mark.parametrize("shape", ["body", "both"])
@pytest.mark.parametrize("operation", PACED)
@pytest.mark.parametrize("size", [2, 3, 9])
def test_what_is_paced_arrives_whole_and_is_counted_once(
    size: int, operation: str, shape: str
) -> None:
    meters = [Counting() for _ in range(size)]
    wires = Wires(size)

    def on_rank(rank: int) -> object:
        exchange = exchange_on(MemoryLink(wires, rank), new_lane(), meter=meters[rank])
        result = PACED[operation](exchange, message_of(rank, shape, flags=Flag.PACED))
        exchange.finish()
        return result

    results = on_every_rank(size, on_rank)
    assert wires.left_over() == 0
    rest = [each.header.body_nbytes + each.header.payload_nbytes for each in sizes_of(size, shape)]
    for rank, meter in enumerate(meters):
        assert sum(meter.pieces) == meter.expected
        if operation == "broadcast":
            assert content_of(results[rank]) == expected(1, shape)
            assert meter.expected == rest[1]
        elif operation == "gather":
            assert meter.expected == (sum(rest) - rest[1] if rank == 1 else rest[rank])
        else:
            assert meter.expected >= sum(rest)  # with nine ranks the bundle of heads is counted
            assert [content_of(each) for each in results[rank]] == [
                expected(peer, shape) for peer in range(size)
            ]


def sizes_of(size: int, shape: str) -> list[Message]:
    return [message_of(rank, shape) for rank in range(size)]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("size", "shape"), MANY)
def test_a_scatter_gives_each_rank_its_own(size: int, shape: str, hosts: str) -> None:
    def body(exchange: Exchange) -> Message:
        is_root = exchange.rank == 1
        # Each message is the root's, whatever its content.
        messages = [
            Message(header_of(1)._replace(**_sizes(each)), each.body, each.buffers, each.large)
            for each in (message_of(rank, shape) for rank in range(size))
        ]
        return routes.scatter(exchange, messages if is_root else None, 1)

    for rank, message in enumerate(run(size, body, HOSTS[hosts](size))):
        assert content_of(message) == expected(rank, shape)


def test_a_limit_holds_for_each_message_and_not_for_several_that_travel_as_one() -> None:
    size, nbytes = 25, 20_000
    wires = Wires(size, HOSTS["hosts of two"](size))
    chosen = Settings(max_nbytes=nbytes)

    def on_rank(rank: int) -> None:
        exchange = exchange_on(MemoryLink(wires, rank), new_lane(), chosen=chosen)
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
        exchange.finish()

    on_every_rank(size, on_rank)
    assert wires.left_over() == 0


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("size", [3, 9, 90])
def test_nobody_returns_from_a_meeting_before_all_have_come(size: int, hosts: str) -> None:
    come: list[int] = []

    def body(exchange: Exchange) -> int:
        come.append(exchange.rank)
        routes.all_meet(exchange, compose(exchange.header, b""))
        return len(come)

    assert run(size, body, HOSTS[hosts](size)) == [size] * size


def test_who_only_passes_messages_on_does_not_judge_them() -> None:
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
    gathered = on_every_rank(size, on_rank)[root]
    assert [content_of(each) for each in gathered] == [
        expected(rank, "both") for rank in range(size)
    ]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("size", "shape"), [each for each in WORLDS if each[0] <= 16])
def test_an_all_to_all_gives_each_rank_its_own_of_every_rank(
    size: int, shape: str, hosts: str
) -> None:
    def body(exchange: Exchange) -> list[Message]:
        messages = [
            Message(exchange.header._replace(**_sizes(each)), each.body, each.buffers, each.large)
            for each in (message_of(exchange.rank * 16 + to, shape) for to in range(size))
        ]
        return routes.all_to_all(exchange, messages)

    for rank, messages in enumerate(run(size, body, HOSTS[hosts](size))):
        assert [content_of(message) for message in messages] == [
            expected(peer * 16 + rank, shape) for peer in range(size)
        ]


def _sizes(message: Message) -> dict[str, Any]:
    names = ("buffer_count", "meta_nbytes", "body_nbytes", "payload_nbytes", "body_checksum")
    return {name: getattr(message.header, name) for name in names}


@pytest.mark.parametrize("route", ["gather", "scatter"])
def test_who_only_passes_a_head_on_has_no_memory_for_the_rest(route: str) -> None:
    size = 13  # some have ranks below them
    made, rooms = [message_of(rank, "body") for rank in range(size)], []

    def room(nbytes: int) -> bytearray:
        rooms.append(nbytes)
        return bytearray(nbytes)

    def body(exchange: Exchange) -> None:
        if route == "gather":
            routes.gather(exchange, made[exchange.rank], 0)
        else:
            mine = [message_of(0, "body") for _ in range(size)]
            routes.scatter(exchange, mine if exchange.rank == 0 else None, 0)

    with mock.patch("objcomm._wire.admission.room", room):
        run(size, body)
    assert rooms.count(len(made[0].body)) == size - 1  # what each other rank's content needs, once


def test_where_one_rank_failed_nothing_large_moves() -> None:
    wires = Wires(3)
    links = [MemoryLink(wires, rank) for rank in range(3)]

    def body(rank: int) -> list[Message]:
        exchange = exchange_on(links[rank], new_lane())
        mine = message_of(rank, "buffers")
        if rank == 1:
            mine = compose(header_of(rank, status=Status.FAILURE), b"")
        return routes.all_gather(exchange, mine)

    for messages in on_every_rank(3, body):
        assert messages[1].header.status == Status.FAILURE
    assert {tag for link in links for _, tag in link.sent} == {head_tag(0)}


def test_every_first_message_fits_into_the_posted_receive() -> None:
    wires = Wires(2)
    for nbytes in (0, 1, WINDOW_NBYTES - HEADER_NBYTES, WINDOW_NBYTES - HEADER_NBYTES + 1, 1 << 20):
        head = first_bytes(compose(header_of(0), bytes(nbytes)))
        assert len(head) <= WINDOW_NBYTES
    assert wires.left_over() == 0


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("route", ["broadcast", "gather", "all_gather", "scatter", "all_to_all"])
def test_members_on_the_device_go_over_the_device_link(route: str, *, is_staged: bool) -> None:
    # The "device" is the CPU: what is under test is who moves what, in which order.
    kind = BufferKind.TENSOR if is_staged else BufferKind.DEVICE
    flags = Flag.STAGED if is_staged else 0
    host_wires, device_wires = Wires(3), Wires(3)
    links = [MemoryLink(host_wires, rank) for rank in range(3)]
    device_links = [MemoryDeviceLink(device_wires, rank) for rank in range(3)]

    def body(rank: int) -> Any:
        exchange = exchange_on(links[rank], new_lane(), device_link=device_links[rank])
        mine = message_of(rank, "buffers", kind, flags)
        if route == "broadcast":
            return [routes.broadcast(exchange, mine if rank == 0 else None, 0)]
        if route == "gather":
            return routes.gather(exchange, mine, 0)
        if route == "all_gather":
            return routes.all_gather(exchange, mine)
        if route == "all_to_all":
            return routes.all_to_all(exchange, [mine] * 3)
        copies = [message_of(0, "buffers", kind, flags) for _ in range(3)]
        return [routes.scatter(exchange, copies if rank == 0 else None, 0)]

    for messages in on_every_rank(3, body):
        for message in messages or []:
            sender = message.header.sender
            assert content_of(message) == content_of(message_of(sender, "buffers", kind))
    assert sum(link.carried for link in device_links) > 0
    tags = {tag for link in links for _, tag in link.sent}
    assert tags <= {head_tag(0), receipt_tag(0, 0)}
    assert host_wires.left_over() == device_wires.left_over() == 0


@pytest.mark.parametrize(
    "field", [{"operation": 3}, {"sequence": 1}, {"root": 2}, {"fingerprint": 9}]
)
def test_a_header_of_another_call_is_a_desync_that_names_both_sides(field: dict[str, Any]) -> None:
    wires = Wires(2)
    other = exchange_on(MemoryLink(wires, 1), new_lane(), **field)
    other.send_head(compose(other.header, b""), [0])
    mine = exchange_on(MemoryLink(wires, 0), new_lane())
    with pytest.raises(DesyncError) as caught:
        mine.recv_heads([1])
    assert caught.value.positions == {0: mine.header.position, 1: other.header.position}
    assert "train.py:1" in str(caught.value)


@pytest.mark.parametrize("field", [{"group": 1}, {"lane": 1}, {"epoch": 1}])
def test_a_header_of_another_group_lane_or_sender_is_refused(field: dict[str, int]) -> None:
    wires = Wires(2)
    stranger = compose(header_of(1, **field), b"")
    link = MemoryLink(wires, 1)
    exchange_on(link, new_lane()).send_head(stranger, [0])
    with pytest.raises(WireError, match="another group or lane"):
        exchange_on(MemoryLink(wires, 0), new_lane()).recv_heads([1])


def test_a_header_that_announces_too_much_allocates_nothing() -> None:
    wires = Wires(2)
    huge = compose(header_of(1), b"")
    huge.header = huge.header._replace(payload_nbytes=1 << 60, buffer_count=0)
    exchange_on(MemoryLink(wires, 1), new_lane()).send_head(huge, [0])
    with pytest.raises(WireError, match="limit"):
        exchange_on(MemoryLink(wires, 0), new_lane()).recv_heads([1])


def test_a_timeout_names_all_ranks_that_are_missing_and_no_other() -> None:
    wires = Wires(4)
    exchange_on(MemoryLink(wires, 2), new_lane()).send_head(message_of(2, "inline"), [0])
    waiting = exchange_on(MemoryLink(wires, 0), new_lane(), seconds=0.05)
    with pytest.raises(TransportTimeout) as caught:
        waiting.recv_heads([1, 2, 3])
    assert caught.value.missing == (1, 3)


def test_a_message_that_another_rank_made_is_refused() -> None:
    wires = Wires(2)
    link = MemoryLink(wires, 1)
    exchange_on(link, new_lane()).send_head(compose(header_of(5), b""), [0])
    with pytest.raises(WireError, match="a message from rank 1, got one from rank 5"):
        exchange_on(MemoryLink(wires, 0), new_lane()).recv_heads([1])
