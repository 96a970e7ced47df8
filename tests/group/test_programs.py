"""Random programs: any sequence of operations, sizes, roots, codecs and failures stays in step."""

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

import objcomm
from objcomm import CollectiveError
from tests.group.contributions import SIZES, content, same
from tests.group.helpers import assert_group_works, subgroup
from tests.ranks import ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def run_turn(turn: int, chance: random.Random, group: Any) -> None:
    """Run one random operation; all ranks draw the same numbers."""
    rank, size = objcomm.rank(group), objcomm.world_size(group)
    wants = [content(i, chance.choice(SIZES), turn) for i in range(size)]
    root = chance.randrange(size)
    options: dict[str, Any] = {"group": group, "codec": chance.choice(["pickle", "msgpack"])}
    failing: Any = chance.choice([None, None, None, *range(size)])
    mine: Any = threading.Lock() if rank == failing else wants[rank]

    def gather() -> None:
        got = objcomm.gather(mine, group_dst=root, **options)
        assert (got is None) == (rank != root)
        assert got is None or all(map(same, got, wants))

    def broadcast() -> None:
        assert same(objcomm.broadcast(mine, group_src=root, **options), wants[root])

    def all_gather() -> None:
        assert all(map(same, objcomm.all_gather(mine, **options), wants))

    def scatter() -> None:
        chunks: list[Any] = [*wants]
        if failing not in {None, root}:  # the source never encodes its own object
            chunks[failing] = threading.Lock()
        got = objcomm.scatter(chunks if rank == root else None, group_src=root, **options)
        assert same(got, wants[rank])

    def all_reduce() -> None:
        got = objcomm.all_reduce([mine], lambda a, b: a + b, **options)
        assert all(map(same, got, wants))

    def reduce() -> None:
        got = objcomm.reduce([mine], lambda a, b: a + b, group_dst=root, **options)
        assert got is None or all(map(same, got, wants))

    steps: list[Callable[[], None]] = [gather, broadcast, all_gather, scatter, all_reduce, reduce]
    try:
        chance.choice(steps)()
    except CollectiveError as error:
        told = error.failures
        assert set(told) <= {failing, root}
        assert "lock" in next(iter(told.values())).message
    if chance.random() < 0.3:
        objcomm.barrier(f"after {turn}", group=group)


@ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(2))
def test_any_program_stays_in_step(seed: int) -> None:
    chance = random.Random(10 * objcomm.world_size() + seed)  # six programs
    for turn in range(40):
        run_turn(turn, chance, None)
    assert_group_works()


@ranks(4)
@pytest.mark.parametrize("seed", range(2))
def test_any_program_on_two_groups_at_once_stays_in_step(seed: int) -> None:
    chance = random.Random(seed)
    with subgroup(1, 2, 3) as upper:
        for turn in range(30):
            if chance.random() < 0.5:
                run_turn(turn, random.Random(turn), None)
            elif objcomm.rank() > 0:
                run_turn(turn, random.Random(turn), upper)
    assert_group_works()
