"""What the ranks of a host hand over to each other, in groups on one host and on several."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from objcomm._transport.share import Share
from tests.unit.memory_link import MemoryLink
from tests.unit.routed import LARGE_NBYTES, check_pattern

#: The host of each rank, and the hosts whose ranks share memory.
SPREADS: dict[str, tuple[list[int], set[int]]] = {
    "one host": ([0] * 4, {0}),
    "two hosts": ([0, 0, 1, 1, 1], {0, 1}),
    "in turns": ([0, 1, 0, 1, 0, 1, 0], {0, 1}),
    "only the second": ([0, 0, 1, 1], {1}),
    "only the first": ([0, 0, 0, 1, 1, 1], {0}),
    "three, and one has one rank": ([0, 0, 1, 2, 2], {0, 2}),
    "six": ([rank // 2 for rank in range(12)], set(range(6))),
}


@pytest.mark.parametrize("shape", ["inline", "buffers", "both"])
@pytest.mark.parametrize("spread", SPREADS)
def test_a_broadcast_reaches_every_rank_whole(spread: str, shape: str) -> None:
    hosts, sharing = SPREADS[spread]
    for root in {0, 1, len(hosts) - 1}:
        check_pattern("broadcast", len(hosts), root, shape, hosts, sharing=sharing)


@pytest.mark.parametrize("refused", ["of", "with_room", "seal"])
@pytest.mark.parametrize("spread", SPREADS)
def test_a_broadcast_works_without_memory_to_share(spread: str, refused: str) -> None:
    hosts, sharing = SPREADS[spread]
    with mock.patch.object(Share, refused, side_effect=OSError("no memory")):
        check_pattern("broadcast", len(hosts), 1, "both", hosts, sharing=sharing)


@pytest.mark.parametrize("spread", SPREADS)
def test_a_large_member_is_sent_once_to_each_host_and_shared_within_it(spread: str) -> None:
    hosts, sharing = SPREADS[spread]
    sent: Counter[tuple[int, int]] = Counter()
    send = MemoryLink.send

    def counting(link: MemoryLink, flat: Any, peer: int, tag: int = -1) -> Any:
        nbytes = flat.numel() if isinstance(flat, torch.Tensor) else len(flat)
        sent[hosts[link.rank], hosts[peer]] += nbytes * (nbytes > 100_000)
        return send(link, flat, peer, tag)

    with mock.patch.object(MemoryLink, "send", counting):
        check_pattern("broadcast", len(hosts), 0, "buffers", hosts, sharing=sharing)
    for host in set(hosts):
        copies = 0 if host in sharing else hosts.count(host) - 1
        assert sent[host, host] == pytest.approx(copies * LARGE_NBYTES, rel=0.01)
        came = sum(nbytes for (_, to), nbytes in sent.items() if to == host) - copies * LARGE_NBYTES
        assert came == pytest.approx((host != hosts[0]) * LARGE_NBYTES, abs=0.01 * LARGE_NBYTES)


@pytest.mark.parametrize("pattern", ["gather", "all_gather", "scatter", "all_to_all"])
@pytest.mark.parametrize("spread", SPREADS)
def test_every_other_pattern_works_as_well(spread: str, pattern: str) -> None:
    hosts, sharing = SPREADS[spread]
    shape = "buffers" if pattern == "all_to_all" else "both"
    check_pattern(pattern, len(hosts), 1, shape, hosts, sharing=sharing)
