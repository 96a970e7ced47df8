"""No program ends as if all was well whose ranks made different calls, and every other one does."""

import itertools
import random
from collections.abc import Iterator

import pytest

from tests.endings import BEGIN, Ending, Program, run_to_the_end

_EACH = {
    "nothing": "pass",
    "barrier": "objcomm.barrier()",
    "named barrier": "objcomm.barrier('epoch')",
    "all_gather": "objcomm.all_gather(rank)",
    "all_reduce": "objcomm.all_reduce(rank)",
    "all_reduce of the largest": "objcomm.all_reduce(rank, 'max')",
    "all_to_all": "objcomm.all_to_all([rank] * world)",
    "scan": "objcomm.scan(rank)",
    "exscan": "objcomm.exscan(rank)",
    "reduce_scatter": "objcomm.reduce_scatter([rank] * world)",
    "any_rank": "objcomm.any_rank(False)",
    "agree": "objcomm.agree('same')",
    "shared_seed": "objcomm.shared_seed()",
    "reduce_and_broadcast": "objcomm.reduce_and_broadcast(lambda: 1, sum)",
}
_WITH_ROOT = {
    "broadcast": "objcomm.broadcast('x', src={root})",
    "large broadcast": "objcomm.broadcast(bytes(1 << 20), src={root})",
    "gather": "objcomm.gather(rank, dst={root})",
    "scatter": "objcomm.scatter([1] * world, src={root})",
    "reduce": "objcomm.reduce(rank, dst={root})",
    "run_on_main": "objcomm.run_on_main(int, rank={root})",
}


def _calls(world: int) -> dict[str, str]:
    with_root = {
        f"{name} {root}": text.format(root=root)
        for name, text in _WITH_ROOT.items()
        for root in range(world)
    }
    return {**_EACH, **with_root}


def _differing(world: int) -> Iterator[tuple[str, list[str]]]:
    """Every pair of calls, one of them made by each rank in turn and the other by all others."""
    calls = _calls(world)
    for (one, own), (other, theirs) in itertools.permutations(calls.items(), 2):
        for rank in range(world):
            if world == 2 and rank:  # the same as another pair  # noqa: PLR2004
                continue
            bodies = [own if each == rank else theirs for each in range(world)]
            yield f"rank {rank} of {world}: {one}, others: {other}", bodies


def _check_bad(cases: list[tuple[str, list[str]]]) -> None:
    endings = run_to_the_end([Program(bodies) for _, bodies in cases])
    told = list(zip([name for name, _ in cases], endings, strict=True))
    assert not [name for name, ranks in told if not any(_all(ranks))]
    hung = [name for name, ranks in told if -9 in _all(ranks)]  # noqa: PLR2004  # SIGKILL
    assert not hung


def _all(ranks: list[Ending]) -> list[int]:
    return [each.status for each in ranks]


def test_ranks_that_made_different_last_calls_do_not_all_end_well() -> None:
    chosen = random.Random(46)  # noqa: S311  # any will do
    cases = [each for world in (2, 3) for each in chosen.sample(list(_differing(world)), 12)]
    _check_bad(cases)


@pytest.mark.long
@pytest.mark.lasting
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_pair_of_last_calls(world: int) -> None:
    cases = list(_differing(world))
    if world > 2:  # noqa: PLR2004  # some hundreds of those are enough
        cases = random.Random(world).sample(cases, 400)  # noqa: S311  # any will do
    _check_bad(cases)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_made_the_same_calls_end_well(world: int) -> None:
    late = "if rank == {late}: time.sleep(1.5)\n"
    bodies = [
        *_calls(world).values(),
        late.format(late=world - 1) + "objcomm.broadcast('x')",
        late.format(late=0) + "objcomm.broadcast('x', src=1)",
        late.format(late=0) + "objcomm.gather(rank)",
        "objcomm.broadcast('x')\nobjcomm.shutdown()",
        "objcomm.broadcast('x')\ndist.destroy_process_group()",
        "for i in range(50): objcomm.broadcast(i)",
        "objcomm.broadcast('x', async_op=True).wait()",
        "half = objcomm.split(rank % 2)\nif rank % 2: objcomm.barrier(group=half)",
        "import atexit\natexit.register(lambda: objcomm.broadcast('x'))",
        "if rank: objcomm.send('x', 0)",
    ]
    endings = run_to_the_end([Program([body] * world) for body in bodies])
    for body, ranks in zip(bodies, endings, strict=True):
        assert _all(ranks) == [0] * world, (body, [each.said for each in ranks])
