"""Large tensors combined by all ranks, over a link between threads, and the arithmetic on them."""

import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objcomm._algorithms import tensor_reduction
from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.parts import Part, Piece, batches
from objcomm._collectives.reduction import operators
from objcomm._transport.link import result_tag
from objcomm._transport.share import Share
from tests.unit.memory_link import exchange_on, linked, new_lane, on_every_rank
from tests.unit.routed import run

NUMELS = [0, 1, 5, 20_000, 40_000, 200_001, 3, 700_000]


def as_made(rank: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32) % 1000 * (rank + 1) + rank


operand = functools.cache(as_made)  # what a rank gives; cached, so it must not be changed


def in_order(
    operands: Sequence[torch.Tensor],
    into: torch.Tensor,
    *,
    total: torch.Tensor | None = None,
    count: int = 0,
    is_over: bool = True,
) -> None:
    """Combine so that the result depends on the order of the operands and on their number."""
    so_far = [] if total is None else [total]
    found = functools.reduce(lambda left, right: 31 * left + right, [*so_far, *operands])
    into.copy_(found + (count or len(operands)) * is_over)


def combined(present: Sequence[int], numel: int) -> torch.Tensor:
    """Return what all ranks should have."""
    into = torch.empty(numel, dtype=torch.int32)
    in_order([operand(rank, numel) for rank in present], into)
    return into


def part(rank: int, numel: int, present: tuple[int, ...], *, is_taker: bool) -> Part:
    mine = operand(rank, numel) if rank in present else None
    result = torch.full((numel,), -1, dtype=torch.int32) if is_taker else None
    kind = "int32", present
    dtypes = torch.int32, torch.int32, torch.int32
    return Part(mine, result, *dtypes, numel, present, in_order, kind)


@pytest.mark.parametrize(
    ("size", "root"),
    [(2, None), (2, 0), (2, 1), (3, None), (3, 1), (8, 0), (8, None), (13, None), (13, 1)],
)
@pytest.mark.parametrize("sharing", [(), (0,)], ids=["sent", "in a workspace"])
def test_every_part_is_combined_from_the_ranks_that_have_it(
    size: int, root: int | None, sharing: tuple[int, ...]
) -> None:
    check_parts(size, root, sharing=sharing)


@pytest.mark.parametrize(
    "hosts",
    [
        (0, 0, 1, 1),
        (0, 1, 1, 1, 2),
        (0, 0, 0, 1, 2, 2),
        (0, 1, 0, 1),  # not in the order of ranks
        (*[0] * 5, *[1] * 4, *[2] * 4),
    ],
)
@pytest.mark.parametrize("root", [None, 0, 1, 3])
def test_totals_go_from_host_to_host(hosts: tuple[int, ...], root: int | None) -> None:
    check_parts(len(hosts), root, hosts=hosts)


def check_parts(size: int, root: int | None, **options: Any) -> None:
    everyone = tuple(range(size))
    presents = [everyone, (size - 1,), everyone[::2], (0,), everyone]

    def body(exchange: Exchange) -> list[Part]:
        is_taker = root in {None, exchange.rank}
        parts = [
            part(exchange.rank, numel, presents[at % 5], is_taker=is_taker)
            for at, numel in enumerate(NUMELS)
        ]
        tensor_reduction.reduce_tensors(exchange, parts, root)
        return parts

    on_ranks = run(size, body, **options)
    for at, numel in enumerate(NUMELS):
        present = presents[at % 5]
        want = combined(present, numel)
        for rank, parts in enumerate(on_ranks):
            if parts[at].result is not None:
                assert torch.equal(parts[at].result, want), (rank, numel)
            if parts[at].operand is not None:
                assert torch.equal(parts[at].operand, as_made(rank, numel))


def reduced(numel: int, exchange: Exchange) -> Part:
    """Return one rank's part of a tensor that all ranks combine."""
    mine = part(exchange.rank, numel, tuple(range(exchange.size)), is_taker=True)
    tensor_reduction.reduce_tensors(exchange, [mine], None)
    return mine


def test_the_work_is_divided_and_no_byte_is_sent_twice() -> None:
    size, nbytes = 4, 4_000_000
    links = linked(size)
    run(links, functools.partial(reduced, nbytes // 4))
    for link in links:
        sent = sum(count for count, _ in link.sent)
        results = sum(count for count, tag in link.sent if tag == result_tag(0, 0))
        assert sent <= nbytes * 2 * (size - 1) / size * 1.01 + 100
        assert results == pytest.approx(nbytes / size * (size - 1), rel=0.01)


@pytest.mark.parametrize(
    ("hosts", "times"),
    [((0, 0, 1, 1), 1), ((0,) * 6 + (1,) * 6, 1), ((0, 0, 1, 1, 2, 2), 2), ((0, 1, 2, 3), 1.5)],
)
def test_a_card_carries_a_tensor_twice_at_most(hosts: tuple[int, ...], times: float) -> None:
    nbytes = 4_000_000
    links = linked(len(hosts), hosts)
    run(links, functools.partial(reduced, nbytes // 4))
    for host in set(hosts):
        crossed = sum(link.crossed_nbytes for link in links if link.hosts[link.rank] == host)
        assert crossed <= times * nbytes + 4000  # and some heads


def test_ranks_of_one_host_send_each_other_single_bytes_only() -> None:
    size = 3
    links = linked(size, sharing=(0,))

    def on_rank(rank: int) -> tuple[int, int]:
        lane = new_lane()
        for _ in range(2):
            exchange = exchange_on(links[rank], lane)
            reduced(1_000_000, exchange)
            exchange.finish()
        return exchange.entry.sent_nbytes, exchange.entry.received_nbytes

    costs = on_every_rank(size, on_rank)
    assert all(count == 1 for link in links for count, _ in link.sent)
    assert sum(sent for sent, _ in costs) > 4_000_000 * (size - 1)  # counts bytes that others read
    assert links[0].wires.left_over() == 0


@pytest.mark.parametrize("step", ["fixed", "common"])
def test_if_one_rank_can_share_or_map_no_memory_all_send(step: str) -> None:
    links = linked(3, sharing=(0,))
    original, calls = getattr(Share, step), itertools.count()

    def refused(*given: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise OSError("refused")
        return original(*given, **options)

    with mock.patch.object(Share, step, refused):
        on_ranks = run(links, functools.partial(reduced, 1_000_000))
    want = combined(range(3), 1_000_000)
    assert all(each.result is not None and torch.equal(each.result, want) for each in on_ranks)
    assert sum(count for count, _ in links[0].sent) > 1_000_000


@pytest.mark.parametrize(
    ("size", "options", "numels"),
    [
        (2, {"sharing": (0,)}, [300_000]),
        (4, {"hosts": (0, 0, 1, 1)}, [5_000, 6_000, 300_000]),  # the first two are packed together
    ],
    ids=["in a workspace", "between hosts"],
)
def test_no_rank_continues_before_all_have_their_results(
    size: int, options: dict[str, Any], numels: list[int]
) -> None:
    """The next call overwrites a workspace, and a failure must not reach it."""
    links = linked(size, **options)
    has_gone_on, unpack = threading.Event(), Piece.unpack

    def slowly(piece: Piece, packed: torch.Tensor) -> None:
        if threading.current_thread().name == "slow":
            assert not has_gone_on.wait(0.2)
        unpack(piece, packed)

    def on_rank(rank: int) -> None:
        threading.current_thread().name = "fast" if rank else "slow"
        exchange = exchange_on(links[rank], new_lane())
        parts = [part(rank, each, tuple(range(size)), is_taker=True) for each in numels]
        tensor_reduction.reduce_tensors(exchange, parts, None)
        exchange.finish()
        if rank:
            has_gone_on.set()

    with mock.patch.object(Piece, "unpack", slowly):
        on_every_rank(size, on_rank)
    assert has_gone_on.is_set()


_ITEMS = st.tuples(
    st.sampled_from([(torch.int8, torch.float64), (torch.float32,) * 2, (torch.bool,) * 2]),
    st.integers(0, 300_000),
)


@given(
    items=st.lists(_ITEMS, max_size=12),
    size=st.integers(1, 9),
    most=st.integers(1, 1 << 14).map((64).__mul__),
)
def test_batches_have_every_element_once_and_room_for_their_pieces(
    items: list[tuple[tuple[torch.dtype, torch.dtype], int]], size: int, most: int
) -> None:
    parts = [
        Part(None, None, *dtypes, dtypes[1], numel, (0,), lambda *_, **__: None, dtypes)
        for dtypes, numel in items
    ]
    cut = batches(parts, size, most)
    assert [batch.owner for batch in cut] == [at % size for at in range(len(cut))]
    assert all(sum(piece.room_nbytes for piece in batch.pieces) <= most for batch in cut)
    spans: dict[int, list[tuple[int, int]]] = {}
    for batch in cut:
        for piece in batch.pieces:
            assert piece.numel == sum(stop - start for _, start, stop in piece.spans)
            assert len({each.kind for each, _, _ in piece.spans}) == 1
            for each, start, stop in piece.spans:
                spans.setdefault(id(each), []).append((start, stop))
    for each in parts:
        found = sorted(span for span in spans.get(id(each), []) if span[0] < span[1])
        ends = [0, *(stop for _, stop in found)]
        assert [start for start, _ in found] == ends[:-1]
        assert ends[-1] == each.numel


def test_an_empty_tensor_costs_no_message() -> None:
    links = linked(2)
    run(links, functools.partial(reduced, 0))
    assert [link.sent for link in links] == [[], []]


MODELS: dict[str, Any] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "any": torch.logical_or,
    "all": torch.logical_and,
}


@pytest.mark.parametrize("dtype", sorted(operators.DTYPES, key=str), ids=str)
@pytest.mark.parametrize("op", MODELS)
def test_a_tensor_is_combined_piece_by_piece(op: str, dtype: torch.dtype) -> None:
    if dtype.is_complex and op in ("min", "max"):
        pytest.skip("no order")
    generator = torch.Generator().manual_seed(7)
    operand_dtype = operators.operand_dtype(op, dtype)
    drawn = [torch.randint(0, 3, (70_000,), generator=generator) for _ in range(3)]
    operands = [each.to(dtype).to(operand_dtype) for each in drawn]
    kept = [each.clone() for each in operands]
    wide = operators.wide_dtype(op, dtype, None)
    into = torch.empty(70_000, dtype=operators.result_dtype(op, dtype))
    operators.combine_tensors(op, operands, into, wide)
    want = functools.reduce(MODELS[op], [each.to(wide) for each in operands])
    if op == "mean":
        want = want / 3
    assert torch.equal(into, want.to(into.dtype))
    total = torch.empty(70_000, dtype=wide)
    operators.combine_tensors(op, operands[:2], total, wide, count=3, is_over=False)
    again = torch.empty_like(into)
    operators.combine_tensors(op, operands[2:], again, wide, total=total, count=3)
    assert torch.equal(again, into)
    assert all(torch.equal(*pair) for pair in zip(operands, kept, strict=True))


def test_dtypes_of_results_and_sums() -> None:
    assert operators.result_dtype("mean", torch.int8) is torch.float64
    assert operators.result_dtype("mean", torch.float16) is torch.float16
    assert operators.result_dtype("any", torch.float32) is torch.bool
    assert operators.wide_dtype("sum", torch.bfloat16, None) is torch.float32
    assert operators.wide_dtype("sum", torch.float64, torch.float32) is torch.float64
    assert operators.wide_dtype("sum", torch.int32, torch.float64) is torch.int32
    assert operators.wide_dtype("mean", torch.float32, torch.float32) is torch.float32
    assert operators.wide_dtype("max", torch.float16, None) is torch.float16
