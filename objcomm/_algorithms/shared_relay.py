"""Bytes of one rank into the memory of all others on its host, a piece at a time.

The root copies a piece to where all read it and tells them; each copies it to where it belongs and
says that it has. So every byte is copied once on each rank, and no more memory is needed than that
of some pieces.
"""

from collections.abc import Iterator, Sequence

import torch

from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.parts import copy
from objcomm._algorithms.transfers import Arriving
from objcomm._codecs.buffers import empty
from objcomm._transport.workspace import TURNS, Workspace

#: Some neighbouring bytes: a tensor of them, and where they lie in the workspace.
Piece = list[tuple[torch.Tensor, slice]]


def relay(
    exchange: Exchange, flats: Sequence[torch.Tensor], root: int, workspace: Workspace
) -> None:
    """Copy ``root``'s bytes to all ranks; every rank calls this with as many, or none does.

    Args:
        exchange: this operation's.
        flats: ``uint8``, on the root the bytes and elsewhere room for them.
        root: whose bytes they are.
        workspace: the lane's.
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
    """The flats cut so that each piece but the last one has so many bytes."""
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
