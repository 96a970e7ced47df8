"""Tensors of all ranks on their accelerators, combined there: what ``reduction`` is for CPU memory.

All ranks send each rank one part of every tensor, which it combines in rank order and sends to all
(all-to-all, then all-gather, both over the device link). NCCL's own all-reduce would add up halves
as halves, in another order than the ranks', and knows fewer dtypes and operators: a result would
depend on where a tensor lies. As many bytes move.
"""

from collections.abc import Iterable, Iterator

import torch

from objcomm.message import compose
from objcomm.transport import routes
from objcomm.transport.exchange import Exchange
from objcomm.transport.reduction import Part

# What travels together, so that small parts cost no transfer of their own; packed memory is
# about three times as large.
_BAG_MAX_NBYTES = 64 << 20

# Torch takes memory from the device in blocks of 2 MiB or more, and has so much at hand.
_SURELY_THERE_NBYTES = 1 << 20


def reduce_on_device(exchange: Exchange, parts: Iterable[Part]) -> None:
    """Fill in the results of all parts; every rank calls this with parts that agree.

    Args:
        exchange: this operation's, which has a device link on every rank.
        parts: in the same order on all ranks, in memory of the link's device; every rank has an
            operand of each.
    """
    for bag in _bags(parts):
        _reduce(exchange, bag)


def _bags(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts of one kind together, up to a limit."""
    by_kind: dict[object, list[Part]] = {}
    for part in parts:
        if part.numel:
            by_kind.setdefault(part.kind, []).append(part)
    for alike in by_kind.values():
        bag: list[Part] = []
        nbytes = 0
        for part in alike:
            nbytes += part.numel * part.dtype.itemsize
            if bag and nbytes > _BAG_MAX_NBYTES:
                yield bag
                bag, nbytes = [], part.numel * part.dtype.itemsize
            bag.append(part)
        yield bag


def _reduce(exchange: Exchange, bag: list[Part]) -> None:
    about = bag[0]
    numel = sum(part.numel for part in bag)
    share = -(-numel // exchange.size)
    operand = _packed(bag, share * exchange.size)
    arrived = torch.empty_like(operand)
    mine = torch.empty(share, dtype=about.result_dtype, device=operand.device)
    whole = torch.empty(share * exchange.size, dtype=about.result_dtype, device=operand.device)
    if operand.nbytes > _SURELY_THERE_NBYTES:
        # A device without room raises here, and so on all ranks: nothing would wake those that
        # wait for it in the device link.
        routes.all_meet(exchange, compose(exchange.header, b""))
    exchange.device.all_to_all(operand.view(torch.uint8), arrived.view(torch.uint8))
    about.combine(arrived.split(share), mine)
    exchange.device.all_gather(mine.view(torch.uint8), whole.view(torch.uint8))
    results = [part.result for part in bag if part.result is not None]
    if results:
        sizes = [part.numel for part in bag]
        torch.split_with_sizes_copy(whole[:numel], sizes, out=results)


def _packed(bag: list[Part], numel: int) -> torch.Tensor:
    """This rank's operands one after another, and zeros up to ``numel``."""
    operands = [part.operand for part in bag if part.operand is not None]
    if len(operands) == 1 and operands[0].numel() == numel:
        return operands[0]
    missing = numel - sum(each.numel() for each in operands)
    return torch.cat([*operands, operands[0].new_zeros(missing)])
