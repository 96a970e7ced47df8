"""The patterns of traffic: one to all, all to one, one to each, each to each, one to one.

Each function is called by every rank of the group (``send`` and ``recv`` by the two concerned) and
reads as the protocol. What a message means is the callers' business.
"""

import math
from collections.abc import Sequence

import torch

from objcomm._algorithms import shared_relay, topology
from objcomm._algorithms.exchange import Exchange
from objcomm._wire.header import Status
from objcomm._wire.message import Message, compose
from objcomm.errors import WireError

#: The rank through which every rank's small messages reach all ranks.
HUB = 0

_PAIR = 2


def broadcast(exchange: Exchange, message: Message | None, root: int) -> Message:
    """``root``'s message to every rank.

    Args:
        exchange: this operation's.
        message: on ``root`` what to send; elsewhere ignored.
        root: the same on every rank.

    Returns:
        The message: ``root``'s own there, what arrived elsewhere.
    """
    parent, children = topology.for_head(exchange.size)(exchange.rank, root, exchange.size)
    if parent is not None:
        (message,) = exchange.recv_heads([parent], made_by=root)
    elif message is None:
        raise WireError("the root of a broadcast has no message")  # a fault of the caller's
    else:
        exchange.rounds += 1
    exchange.send_head(message, children)
    if not message.is_all_head:
        exchange.relay_rest(message, root)
        exchange.accelerators().broadcast(message, root, is_root=parent is None)
    return message


def relay(exchange: Exchange, flats: Sequence[torch.Tensor], root: int) -> None:
    """Bytes that all ranks have agreed on, none empty, from ``root``'s memory into others'."""
    workspace = exchange.workspace(sum(flat.numel() for flat in flats))
    if workspace is None:
        exchange.relay(flats, root)
    else:
        shared_relay.relay(exchange, flats, root, workspace)


def gather_heads(exchange: Exchange, message: Message, root: int) -> list[Message] | None:
    """Every rank's first message to ``root``, which gets them in rank order; ``None`` elsewhere."""
    if exchange.rank != root:
        exchange.send_head(message, [root])
        exchange.rounds += 1
        return None
    others = [peer for peer in range(exchange.size) if peer != root]
    messages = exchange.recv_heads(others)
    messages.insert(root, message)
    return messages


def gather(
    exchange: Exchange, message: Message, root: int, max_nbytes: float = math.inf
) -> list[Message] | None:
    """Every rank's message to ``root``, each at its own size; ``None`` elsewhere.

    Args:
        exchange: this operation's.
        message: this rank's.
        root: the same on every rank, like all that follows.
        max_nbytes: of messages with more than that only the heads move.
    """
    messages = gather_heads(exchange, message, root)
    if messages is None:
        if message.header.nbytes <= max_nbytes:
            exchange.send_rest(message, [root])
            exchange.accelerators().send(message, root)
        return None
    arriving = [
        (peer, each)
        for peer, each in enumerate(messages)
        if peer != root and each.header.nbytes <= max_nbytes
    ]
    exchange.recv_rest(arriving)
    for peer, each in arriving:
        exchange.accelerators().recv(each, peer)
    return messages


def all_gather(exchange: Exchange, message: Message) -> list[Message]:
    """Every rank's message to every rank, in rank order.

    First all heads go to all ranks. What is large then goes from each rank to each, at its own
    size, or around a ring where there are several hosts. Where a rank failed nothing large moves:
    all ranks see the failure in the heads.
    """
    messages = all_gather_heads(exchange, message)
    if any(each.header.status == Status.FAILURE for each in messages):
        return messages
    others = [peer for peer in range(exchange.size) if peer != exchange.rank]
    if len({each.is_all_head for each in messages}) > 1:
        # Who sends nothing more would not hear that another rank refuses some third one's.
        exchange.confirm(others, others)
    if len(set(exchange.hosts)) > 1:
        _pass_around(exchange, messages)
    else:
        exchange.send_rest(message, others)
        exchange.recv_rest([(peer, messages[peer]) for peer in others])
    for peer, each in enumerate(messages):
        exchange.accelerators().broadcast(each, peer, is_root=peer == exchange.rank)
    return messages


def _pass_around(exchange: Exchange, messages: Sequence[Message]) -> None:
    """What follows every rank's head, around a ring of all ranks that goes host by host.

    Each network card carries each message once in either direction. Directly it would carry it once
    for each pair of ranks, and streams that reach a card together lose packets.
    """
    if any(not each.is_all_head for each in messages):
        exchange.pass_around(messages, sorted(range(exchange.size), key=exchange.hosts.__getitem__))


def all_gather_heads(exchange: Exchange, message: Message) -> list[Message]:
    """Every rank's first message to every rank, in rank order.

    Two ranks swap them. More let one rank gather them and send all of them to all as one: two
    rounds instead of one, but with 4 ranks 6 messages instead of 12.
    """
    if exchange.size == _PAIR:
        return _swap_heads(exchange, message)
    heads = gather_heads(exchange, message, HUB)
    if heads is not None:
        broadcast(exchange, compose_bundle(exchange, heads), HUB)
        return heads
    return open_bundle(exchange, broadcast(exchange, None, HUB), message)


def _swap_heads(exchange: Exchange, message: Message) -> list[Message]:
    other = 1 - exchange.rank
    exchange.send_head(message, [other])
    messages = exchange.recv_heads([other])
    messages.insert(exchange.rank, message)
    return messages


def compose_bundle(exchange: Exchange, messages: Sequence[Message]) -> Message:
    """One message made of the heads of all ranks."""
    meta = bytearray().join([exchange.gate.head_of(message) for message in messages])
    return compose(exchange.header, meta, status=Status.BUNDLE, codec="")


def open_bundle(exchange: Exchange, bundle: Message, mine: Message) -> list[Message]:
    """The heads in a bundle, in rank order, with this rank's own message in its place."""
    if bundle.header.status != Status.BUNDLE:
        raise WireError(f"{bundle.header.position} sent no bundle")
    bundle.check()
    messages = []
    rest = bundle.meta
    for peer in range(exchange.size):
        is_mine = peer == exchange.rank
        message = mine if is_mine else exchange.open(rest, peer)
        messages.append(message)
        rest = rest[message.header.head_nbytes :]
    return messages


def scatter(exchange: Exchange, messages: Sequence[Message] | None, root: int) -> Message:
    """One message of ``root``'s for each rank; returns this rank's.

    What follows the heads moves when all ranks for which there is more have given their word that
    they take theirs.
    """
    if messages is None:
        return _recv(exchange, root, gives_word=True)
    exchange.rounds += 1
    others = [peer for peer in range(exchange.size) if peer != root]
    are_all_ready = exchange.words_of(peer for peer in others if not messages[peer].is_all_head)
    for peer in others:
        exchange.send_head(messages[peer], [peer], destination=peer)
    are_all_ready()
    for peer in others:
        exchange.send_rest(messages[peer], [peer])
        exchange.accelerators().send(messages[peer], peer)
    return messages[root]


def all_to_all(exchange: Exchange, messages: Sequence[Message]) -> list[Message]:
    """One message of every rank's for each rank; returns those for this rank, in rank order.

    First the heads go from each rank to each. A rank that failed says so in all of its heads, so
    all ranks know it before anything large moves, which then goes at its own size.

    Args:
        exchange: this operation's.
        messages: one for each rank; this rank's own comes back as it is.
    """
    others = [peer for peer in range(exchange.size) if peer != exchange.rank]
    for peer in others:
        exchange.send_head(messages[peer], [peer], destination=peer)
    arrived = exchange.recv_heads(others)
    for each in arrived:
        exchange.gate.check_addressed(each.header)
    arrived.insert(exchange.rank, messages[exchange.rank])
    if any(each.header.status == Status.FAILURE for each in arrived):
        return arrived
    for peer in others:
        exchange.send_rest(messages[peer], [peer])
    exchange.recv_rest([(peer, arrived[peer]) for peer in others])
    for source in range(exchange.size):  # a device link has one order for all ranks
        if source != exchange.rank:
            exchange.accelerators().recv(arrived[source], source)
            continue
        for peer in others:
            exchange.accelerators().send(messages[peer], peer)
    return arrived


def send(exchange: Exchange, message: Message, peer: int) -> None:
    """A message to one rank, which calls ``recv``."""
    exchange.rounds += 1
    exchange.send_head(message, [peer], destination=peer)
    exchange.send_rest(message, [peer])
    exchange.accelerators().send(message, peer)


def recv(exchange: Exchange, peer: int) -> Message:
    """The message of one rank, which calls ``send``."""
    return _recv(exchange, peer)


def _recv(exchange: Exchange, peer: int, *, gives_word: bool = False) -> Message:
    (message,) = exchange.recv_heads([peer])
    exchange.gate.check_addressed(message.header)
    if gives_word and not message.is_all_head:
        exchange.make_room(message, peer)
        exchange.give_word(peer)
    exchange.recv_rest([(peer, message)])
    exchange.accelerators().recv(message, peer)
    return message


def all_meet(exchange: Exchange, message: Message) -> None:
    """Return when every rank has called this; ``message`` is any small one."""
    if exchange.size == _PAIR:
        _swap_heads(exchange, message)
        return
    gather_heads(exchange, message, HUB)
    broadcast(exchange, message if exchange.rank == HUB else None, HUB)
