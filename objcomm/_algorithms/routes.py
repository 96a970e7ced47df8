"""Traffic patterns: one to all, all to one, one to each, each to each, and one to one.

Every rank of the group calls each function (only the two ranks involved call ``send`` and
``recv``), and its body reads as the protocol. What a message means is up to the callers.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from objcomm._algorithms import shared_relay, topology
from objcomm._algorithms.device import DevicePath
from objcomm._algorithms.exchange import Exchange
from objcomm._wire.header import Status
from objcomm._wire.message import Message, compose, head_of
from objcomm.errors import WireError

#: The rank through which all ranks' small messages reach all other ranks.
HUB = 0

_PAIR = 2
_FAILURE = int(Status.FAILURE)


def broadcast(
    exchange: Exchange, message: Message | None, root: int, heads_max: int = 1
) -> Message:
    """Send ``root``'s message to every rank.

    Args:
        exchange: the operation's exchange.
        message: the message to send, on ``root``; ignored on other ranks.
        root: the same on every rank.
        heads_max: how many heads it may contain, if it is a bundle.

    Returns:
        The message: on ``root`` its own, on other ranks the received one.
    """
    parent, children, _ = topology.broadcast_tree(exchange.rank, root, exchange.hosts)
    if parent is not None:
        (message,) = exchange.recv_heads([parent], made_by=root, heads_max=heads_max)
    elif message is None:
        raise WireError("the root of a broadcast has no message")  # a bug in the caller
    else:
        exchange.entry.rounds += 1
    if children:
        is_short = message.header.nbytes < topology.whole_below(root, exchange.hosts)
        exchange.send_head(message, children, may_be_whole=is_short)
    if not message.is_all_head:
        exchange.relay_rest(message, root)
        if exchange.device.carries(message):
            meet_before_devices(exchange)
            is_root = parent is None
            exchange.on_devices(lambda path: path.broadcast(message, root, is_root=is_root))
    return message


def relay(exchange: Exchange, flats: Sequence[torch.Tensor], root: int) -> None:
    """Send flat tensors that all ranks agreed on, none empty, from ``root`` to all others."""
    workspace = exchange.workspace(sum(flat.numel() for flat in flats))
    if workspace is None:
        exchange.relay(flats, root)
    else:
        shared_relay.relay(exchange, flats, root, workspace)


def gather_heads(
    exchange: Exchange, message: Message, root: int, *, may_be_whole: bool = False
) -> list[Message] | None:
    """Send every rank's first message to ``root``; it returns them in rank order, others ``None``.

    A rank with other ranks below it in the tree sends their messages bundled with its own, without
    reading them.

    Args:
        exchange: the operation's exchange.
        message: this rank's message.
        root: the same on every rank.
        may_be_whole: whether a message may be sent in full with its head if ``root`` itself
            receives it.
    """
    parent, children, below = topology.tree(exchange.rank, root, exchange.hosts)
    if not children:
        if parent is not None:
            exchange.entry.rounds += 1
            may_be_whole &= parent == root
            exchange.send_head(message, [parent], may_be_whole=may_be_whole)
            return None
        return [message]
    if parent is None and len(children) == exchange.size - 1:  # no child has ranks below it
        gathered = [message] * exchange.size
        for child, each in zip(children, exchange.recv_heads(children), strict=True):
            gathered[child] = each
        return gathered
    ends = [child for child, ranks in zip(children, below, strict=True) if len(ranks) == 1]
    unread = ends if parent is not None else ()
    came = exchange.recv_heads(children, unread=unread, heads_max=[*map(len, below)])
    arriving = zip(children, came, strict=True)
    exchange.recv_rest([(child, each) for child, each in arriving if child not in ends])
    if parent is None:
        messages = {root: message}
        for each, ranks in zip(came, below, strict=True):
            opened = [each] if len(ranks) == 1 else open_bundle(exchange, each, ranks)
            messages.update(zip(ranks, opened, strict=True))
        return [messages[rank] for rank in range(exchange.size)]
    heads = [
        exchange.gate.head_of(each) if len(ranks) == 1 else contents_of(each)
        for each, ranks in zip(came, below, strict=True)
    ]
    bundle = compose_bundle(exchange, [exchange.gate.head_of(message), *heads])
    _send_bundle(exchange, bundle, parent)
    return None


def gather(
    exchange: Exchange, message: Message, root: int, max_nbytes: float = math.inf
) -> list[Message] | None:
    """Send every rank's message to ``root``; it returns them in rank order, others ``None``.

    Args:
        exchange: the operation's exchange.
        message: this rank's message.
        root: the same on every rank, like ``max_nbytes``.
        max_nbytes: of larger messages, only the heads are sent.
    """
    is_wanted = message.header.nbytes <= max_nbytes
    messages = gather_heads(exchange, message, root, may_be_whole=is_wanted)
    if messages is None:
        if not message.is_all_head and is_wanted:
            exchange.send_rest(message, [root])
            _move_on_devices(exchange, DevicePath.send, [(root, message)])
        return None
    arriving = []
    for peer, each in enumerate(messages):
        if not each.is_all_head and peer != root and each.header.nbytes <= max_nbytes:
            arriving.append((peer, each))
    if not arriving:
        return messages
    exchange.recv_rest(arriving)
    _move_on_devices(exchange, DevicePath.recv, arriving)
    return messages


def all_gather(exchange: Exchange, message: Message) -> list[Message]:
    """Send every rank's message to every rank; return them in rank order.

    First, all heads go to all ranks. Large data then goes directly from rank to rank, unpadded, or
    around rings if there are several hosts. If a rank failed, nothing large is sent, because all
    ranks see the failure in the heads.
    """
    messages = all_gather_heads(exchange, message)
    is_over = True
    for each in messages:
        if each.header.status == _FAILURE:
            return messages
        is_over &= each.is_all_head
    if is_over:
        return messages
    others = [peer for peer in range(exchange.size) if peer != exchange.rank]
    if len({each.is_all_head for each in messages}) > 1:
        # Else a rank that sends nothing more would not notice if a rank rejected another's message.
        exchange.confirm(others, others)
    if len(set(exchange.hosts)) > 1:
        _pass_around(exchange, messages)
    else:
        exchange.send_rest(message, others)
        exchange.recv_rest([(peer, messages[peer]) for peer in others])
    if any(map(exchange.device.carries, messages)):
        meet_before_devices(exchange)

        def transfer(path: DevicePath) -> None:
            for peer, each in enumerate(messages):
                path.broadcast(each, peer, is_root=peer == exchange.rank)

        exchange.on_devices(transfer)
    return messages


def _pass_around(exchange: Exchange, messages: Sequence[Message]) -> None:
    """Send what follows every rank's head around rings from host to host, then within each host.

    The first ranks of all hosts form one ring, the second ranks another, and so on. So each network
    card carries everything just once in each direction. If ranks sent to each other directly, a
    card would carry it once per pair of ranks, and streams that reach a card at the same time lose
    packets. Ranks of a host with fewer ranks are members of several rings.
    """
    if all(each.is_all_head for each in messages):
        return
    hosts = list(topology.by_host(exchange.hosts).values())
    beside = next(ranks for ranks in hosts if exchange.rank in ranks)
    carried: dict[int, list[Message]] = {peer: [messages[peer]] for peer in beside}
    others = [peer for peer in beside if peer != exchange.rank]
    exchange.send_rest(messages[exchange.rank], others)
    for place in range(max(map(len, hosts))):
        ring = [ranks[place % len(ranks)] for ranks in hosts]
        theirs = [messages[ranks[place]] if place < len(ranks) else None for ranks in hosts]
        carrier = beside[place % len(beside)]
        far = zip(hosts, theirs, strict=True)
        carried[carrier] += [each for ranks, each in far if ranks != beside and each is not None]
        if carrier == exchange.rank:
            exchange.pass_around(theirs, ring)
    for each in carried[exchange.rank][1:]:
        exchange.send_rest(each, others)
    # One message per peer at a time, in the order in which it sends them.
    for several in itertools.zip_longest(*(carried[peer] for peer in others)):
        pairs = zip(others, several, strict=True)
        exchange.recv_rest([(peer, each) for peer, each in pairs if each is not None])


def all_gather_heads(exchange: Exchange, message: Message) -> list[Message]:
    """Send every rank's first message to every rank; return them in rank order.

    Two ranks swap them. With more, one rank gathers them and sends all of them to all ranks as one
    message. That takes two rounds instead of one, but 6 messages instead of 12 with 4 ranks.
    """
    if exchange.size == _PAIR:
        return _swap_heads(exchange, message)
    messages = gather_heads(exchange, message, HUB)
    if messages is not None:
        heads = [exchange.gate.head_of(each) for each in messages]
        broadcast(exchange, compose_bundle(exchange, heads), HUB)
        return messages
    bundle = broadcast(exchange, None, HUB, heads_max=exchange.size)
    return open_bundle(exchange, bundle, range(exchange.size), message)


def _swap_heads(exchange: Exchange, message: Message) -> list[Message]:
    other = 1 - exchange.rank
    exchange.send_head(message, [other], may_be_whole=True)
    messages = exchange.recv_heads([other])
    messages.insert(exchange.rank, message)
    return messages


def compose_bundle(exchange: Exchange, heads: Sequence[bytes | memoryview]) -> Message:
    """Build one message from several heads, or from the contents of other bundles."""
    return compose(exchange.header, bytearray().join(heads), status=Status.BUNDLE, codec="")


def contents_of(bundle: Message) -> memoryview:
    """Return the heads in a bundle, one after another.

    Raises:
        WireError: it is not a bundle.
    """
    if bundle.header.status != Status.BUNDLE:
        raise WireError(f"{bundle.header.position} sent no bundle")
    bundle.check()
    return bundle.meta


def open_bundle(
    exchange: Exchange, bundle: Message, ranks: Sequence[int], mine: Message | None = None
) -> list[Message]:
    """Return the messages of some ranks from a bundle of their heads.

    Args:
        exchange: the operation's exchange.
        bundle: contains the heads, in the order of ``ranks``.
        ranks: the ranks.
        mine: this rank's own message, used instead of its copy in the bundle.
    """
    rest = contents_of(bundle)
    messages = []
    for rank in ranks:
        is_mine = mine is not None and rank == exchange.rank
        message = mine if mine is not None and is_mine else exchange.open(rest, rank)
        messages.append(message)
        rest = rest[message.header.head_nbytes :]
    return messages


def scatter(exchange: Exchange, messages: Sequence[Message] | None, root: int) -> Message:
    """Send one of ``root``'s messages to each rank; return this rank's.

    ``root`` sends what follows the heads directly to each rank, once all ranks that expect such
    data have signaled that they accept it.
    """
    parent, children, below = topology.tree(exchange.rank, root, exchange.hosts)
    if messages is None:
        if parent is None:
            raise WireError("the root of a scatter has no messages")  # a bug in the caller
        return _recv_scattered(exchange, parent, children, below, root)
    exchange.entry.rounds += 1
    others = [peer for peer in range(exchange.size) if peer != root]
    are_all_ready = exchange.ready_signals_of(
        peer for peer in others if not messages[peer].is_all_head
    )
    for child, ranks in zip(children, below, strict=True):
        if len(ranks) == 1:
            exchange.send_head(messages[child], [child], destination=child)
        else:
            heads = [exchange.gate.head_of(messages[rank], rank) for rank in ranks]
            _send_bundle(exchange, compose_bundle(exchange, heads), child)
    are_all_ready()
    for peer in others:
        exchange.send_rest(messages[peer], [peer])
    _move_on_devices(exchange, DevicePath.send, [(peer, messages[peer]) for peer in others])
    return messages[root]


def _recv_scattered(
    exchange: Exchange,
    parent: int,
    children: Sequence[int],
    below: Sequence[Sequence[int]],
    root: int,
) -> Message:
    """Return this rank's message, after passing on those for ranks below it."""
    if not children:
        return recv(exchange, parent, made_by=root, gives_signal=True)
    heads_max = 1 + sum(map(len, below))
    (bundle,) = _recv_bundles(exchange, [parent], [heads_max])
    rest = contents_of(bundle)
    message = exchange.open(rest, root)
    rest = rest[message.header.head_nbytes :]
    for child, ranks in zip(children, below, strict=True):
        heads, rest = _cut(exchange, rest, [root] * len(ranks))
        if len(ranks) == 1:
            head = exchange.gate.header_in(heads, root)
            exchange.send_head(head_of(heads, head), [child])
        else:
            _send_bundle(exchange, compose_bundle(exchange, [heads]), child)
    return _with_rest(exchange, message, root, gives_signal=True)


def _cut(
    exchange: Exchange, heads: memoryview, senders: Sequence[int]
) -> tuple[memoryview, memoryview]:
    """Split off the first heads, one for each of ``senders``, without opening them."""
    nbytes = 0
    for sender in senders:
        nbytes += exchange.gate.header_in(heads[nbytes:], sender).head_nbytes
    return heads[:nbytes], heads[nbytes:]


def _send_bundle(exchange: Exchange, bundle: Message, peer: int) -> None:
    exchange.send_head(bundle, [peer])
    exchange.send_rest(bundle, [peer])


def all_to_all(exchange: Exchange, messages: Sequence[Message]) -> list[Message]:
    """Send one message from every rank to each rank; return those for this rank, in rank order.

    First, the heads go from each rank to every other; those between two hosts are bundled. A rank
    that failed says so in all of its heads, so all ranks know before large data is sent, unpadded.

    Args:
        exchange: the operation's exchange.
        messages: one for each rank; this rank's own is returned unchanged.
    """
    others = [peer for peer in range(exchange.size) if peer != exchange.rank]
    hosts = [tuple(ranks) for ranks in topology.by_host(exchange.hosts).values()]
    if len(hosts) > 1 and exchange.size > topology.STAR_MAX_SIZE:
        came = _swap_by_host(exchange, messages, hosts)
    else:
        came = _swap_directly(exchange, messages, others)
    for each in came.values():
        exchange.gate.check_addressed(each.header)
    came[exchange.rank] = messages[exchange.rank]
    arrived = [came[peer] for peer in range(exchange.size)]
    if any(each.header.status == Status.FAILURE for each in arrived):
        return arrived
    for peer in others:
        exchange.send_rest(messages[peer], [peer])
    exchange.recv_rest([(peer, arrived[peer]) for peer in others])
    carries = exchange.device.carries
    ready = [peer for peer in others if carries(messages[peer]) or carries(arrived[peer])]
    if ready:
        exchange.swap_signals(ready)

        def transfer(path: DevicePath) -> None:
            for source in range(exchange.size):  # a device link has one order for all ranks
                if source != exchange.rank:
                    path.recv(arrived[source], source)
                    continue
                for peer in others:
                    path.send(messages[peer], peer)

        exchange.on_devices(transfer)
    return arrived


def _swap_directly(
    exchange: Exchange, messages: Sequence[Message], peers: Sequence[int]
) -> dict[int, Message]:
    """Send some ranks the heads for them, and return those from them, by rank."""
    for peer in peers:
        exchange.send_head(messages[peer], [peer], destination=peer)
    return dict(zip(peers, exchange.recv_heads(peers), strict=True)) if peers else {}


def _swap_by_host(
    exchange: Exchange, messages: Sequence[Message], hosts: Sequence[tuple[int, ...]]
) -> dict[int, Message]:
    """Swap heads with all ranks, bundling all heads between two hosts into one message.

    Args:
        exchange: the operation's exchange.
        messages: one for each rank.
        hosts: the ranks of each host.
    """
    beside = next(ranks for ranks in hosts if exchange.rank in ranks)
    far = [ranks for ranks in hosts if ranks != beside]
    first, *others = beside
    came = _swap_directly(exchange, messages, [peer for peer in beside if peer != exchange.rank])
    heads = [exchange.gate.head_of(messages[peer], peer) for ranks in far for peer in ranks]
    if exchange.rank != first:
        _send_bundle(exchange, compose_bundle(exchange, heads), first)
        (bundle,) = _recv_bundles(exchange, [first], [exchange.size - len(beside)])
        sources = [peer for ranks in far for peer in ranks]
        return came | dict(zip(sources, open_bundle(exchange, bundle, sources), strict=True))
    handed = _recv_bundles(exchange, others, [exchange.size - len(beside)] * len(others))
    rest = [memoryview(bytearray().join(heads)), *map(contents_of, handed)]
    for ranks in far:
        parts = []
        for at, source in enumerate(beside):
            part, rest[at] = _cut(exchange, rest[at], [source] * len(ranks))
            parts.append(part)
        _send_bundle(exchange, compose_bundle(exchange, parts), ranks[0])
    bundles = _recv_bundles(
        exchange, [ranks[0] for ranks in far], [len(ranks) * len(beside) for ranks in far]
    )
    for_each: dict[int, list[memoryview]] = {peer: [] for peer in beside}
    for ranks, bundle in zip(far, bundles, strict=True):
        heads_left = contents_of(bundle)
        for source in ranks:
            for peer in beside:
                head, heads_left = _cut(exchange, heads_left, [source])
                for_each[peer].append(head)
                if peer == first:
                    came[source] = exchange.open(head, source)
    for peer in others:
        _send_bundle(exchange, compose_bundle(exchange, for_each[peer]), peer)
    return came


def _recv_bundles(
    exchange: Exchange, peers: Sequence[int], heads_max: Sequence[int]
) -> list[Message]:
    bundles = exchange.recv_heads(peers, heads_max=heads_max) if peers else []
    exchange.recv_rest(list(zip(peers, bundles, strict=True)))
    return bundles


def send(exchange: Exchange, message: Message, peer: int) -> None:
    """Send a message to one rank, which calls ``recv``."""
    exchange.entry.rounds += 1
    exchange.send_head(message, [peer], destination=peer, may_be_whole=True)
    exchange.send_rest(message, [peer])
    _move_on_devices(exchange, DevicePath.send, [(peer, message)])


def _move_on_devices(
    exchange: Exchange,
    move: Callable[[DevicePath, Message, int], None],
    messages: Sequence[tuple[int, Message]],
) -> None:
    """Send or receive the parts of some messages that are sent over device links.

    Args:
        exchange: the operation's exchange.
        move: ``DevicePath.send`` or ``DevicePath.recv``.
        messages: each with the rank that receives or sends it.
    """
    carried = [(peer, each) for peer, each in messages if exchange.device.carries(each)]
    if not carried:
        return
    exchange.swap_signals([peer for peer, _ in carried])

    def transfer(path: DevicePath) -> None:
        for peer, each in carried:
            move(path, each, peer)

    exchange.on_devices(transfer)


def recv(
    exchange: Exchange, peer: int, *, made_by: int | None = None, gives_signal: bool = False
) -> Message:
    """Receive a message from one rank, which calls ``send`` or passes on another rank's message.

    Args:
        exchange: the call's exchange.
        peer: the rank that sends its head.
        made_by: the rank that created it and sends the rest; ``peer`` if None.
        gives_signal: whether the sender of the rest waits for a signal that there is memory for it.
    """
    (message,) = exchange.recv_heads([peer], made_by=made_by)
    source = peer if made_by is None else made_by
    return _with_rest(exchange, message, source, gives_signal=gives_signal)


def _with_rest(exchange: Exchange, message: Message, peer: int, *, gives_signal: bool) -> Message:
    """Receive the rest of a message for this rank alone from ``peer``, and return the message."""
    exchange.gate.check_addressed(message.header)
    if gives_signal and not message.is_all_head:
        exchange.make_room(message, peer)
        exchange.give_signal(peer)
    exchange.recv_rest([(peer, message)])
    _move_on_devices(exchange, DevicePath.recv, [(peer, message)])
    return message


def all_meet(exchange: Exchange, message: Message) -> None:
    """Return once every rank has called this; ``message`` is any small message."""
    if exchange.size == _PAIR:
        _swap_heads(exchange, message)
        return
    parent, children, _ = topology.tree(exchange.rank, HUB, exchange.hosts)
    if children:
        exchange.recv_heads(children)
    if parent is not None:
        exchange.send_head(message, [parent])
    broadcast(exchange, message if parent is None else None, HUB)


def meet_before_devices(exchange: Exchange) -> None:
    """Return once every rank is ready for what follows on the devices.

    Only a verdict ends a wait there, and it ends the communicator, too. So if a rank has no memory
    for the data, or rejects a message, all ranks must raise before any of them waits there.
    """
    all_meet(exchange, compose(exchange.header, b""))
