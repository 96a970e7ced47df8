"""Copy bytes from one rank to all other ranks on its host, one piece at a time.

The root copies a piece into memory that all ranks can read and signals them. Each rank copies it to
its destination and signals back. So each rank copies every byte once, and the shared memory only
has to hold a few pieces.
"""

from collections.abc import Iterator, Sequence

import torch

from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.parts import copy
from objcomm._algorithms.transfers import Arriving
from objcomm._codecs.buffers import empty
from objcomm._transport.workspace import TURNS, Workspace

#: Adjacent bytes: tensors, each with its position in the workspace.
Piece = list[tuple[torch.Tensor, slice]]


def relay(
    exchange: Exchange, flats: Sequence[torch.Tensor], root: int, workspace: Workspace
) -> None:
    """Copy ``root``'s bytes to all ranks; all call this with the same total size, or none does.

    Args:
        exchange: the operation's exchange.
        flats: ``uint8``; the bytes on the root, memory for them on other ranks.
        root: the rank that has the bytes.
        workspace: the lane's workspace.
    """
    others = [peer for peer in range(exchange.size) if peer != exchange.rank]
    peers = others if exchange.rank == root else [root]
    taken: list[list[tuple[int, Arriving]]] = []
    for turn, piece in enumerate(_pieces(flats, workspace.turn_nbytes)):
        place = workspace.turn(turn, root)
        coming = [(peer, exchange.arriving(empty(1), peer, is_ended=False)) for peer in peers]
        if exchange.rank == root:
            taken.append(coming)
            if turn >= TURNS:
                _await(taken[turn - TURNS])
            for flat, span in piece:
                copy(flat, place[span])
        else:
            _await(coming)
            for flat, span in piece:
                copy(place[span], flat)
        nbytes = sum(flat.nbytes for flat, _ in piece)
        exchange.entry.sent_nbytes += nbytes * len(peers) * (exchange.rank == root)
        exchange.entry.received_nbytes += nbytes * (exchange.rank != root)
        for peer in peers:
            exchange.send_flat(empty(1), peer, is_ended=False)
    for coming in taken[-TURNS:]:
        _await(coming)


def _await(coming: Sequence[tuple[int, Arriving]]) -> None:
    for peer, arriving in coming:
        arriving.wait(peer)


def _pieces(flats: Sequence[torch.Tensor], nbytes: int) -> Iterator[Piece]:
    """Cut the tensors into pieces of ``nbytes`` bytes; the last may be shorter."""
    piece: Piece = []
    filled = 0
    for flat in flats:
        start = 0
        while start < flat.numel():
            some = flat[start : start + nbytes - filled]
            piece.append((some, slice(filled, filled + some.numel())))
            start += some.numel()
            filled += some.numel()
            if filled == nbytes:
                yield piece
                piece, filled = [], 0
    if piece:
        yield piece
