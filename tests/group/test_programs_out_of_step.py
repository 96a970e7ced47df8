"""Random programs in which one rank makes another call than the rest, and then all go on.

Every rank draws the same program; for how long it computes before a call, each draws for itself. So
the error reaches a rank anywhere: before it has begun a call that others have begun, in a
synchronous call, in a work that it waits for later, or drops. Once every rank has raised it, the
next call of all is the same.
"""

import gc
import random
import time
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

import objcomm
from objcomm import ObjcommError, Work
from tests.group.helpers import assert_group_works, tell_all
from tests.group.watched import closely, patiently
from tests.ranks import ranks
from tests.workers import here

PROGRAMS = 12
_LONGEST_PAUSE_S = 0.05


@dataclass(frozen=True)
class Step:
    """One call, the same on all ranks.

    Attributes:
        is_async: whether it gives a work.
        is_dropped: whether nobody ever asks that.
        ends_one: whether the oldest work is waited for afterwards.
        is_apart: whether this rank calls something else.
    """

    is_async: bool
    is_dropped: bool
    ends_one: bool
    is_apart: bool


def draw(chance: random.Random) -> list[Step]:
    """A program; in one of its steps one of the ranks is out of step."""
    count = chance.randint(2, 8)
    apart, culprit = chance.randrange(count), chance.randrange(here().world_size)
    return [
        Step(
            is_async=chance.random() < 0.7,
            is_dropped=chance.random() < 0.15,
            ends_one=chance.random() < 0.4,
            is_apart=at == apart and here().rank == culprit,
        )
        for at in range(count)
    ]


def carry_out(program: list[Step], own: random.Random) -> None:
    """Take its steps, and wait for what they have begun."""
    works: list[tuple[int, Work[Any]]] = []
    for at, step in enumerate(program):
        if own.random() < 0.5:
            time.sleep(own.uniform(0, _LONGEST_PAUSE_S))
        if step.is_apart:
            got: Any = objcomm.all_reduce(at, async_op=step.is_async)
        else:
            got = objcomm.all_gather(at, async_op=step.is_async)
        if not step.is_async:
            assert got == [at] * here().world_size
        elif not step.is_dropped:
            works.append((at, got))
        if step.ends_one and works:
            end(*works.pop(0))
    while works:
        end(*works.pop(0))


def end(at: int, work: Work[Any]) -> None:
    """Wait for a work that all ranks have begun in the same step."""
    assert work.wait() == [at] * here().world_size


@ranks(2, 3, long=(4,))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("in_block", [False, True])
def test_every_rank_hears_of_it_once_and_goes_on(*, in_block: bool, seed: int) -> None:
    objcomm.barrier()
    with warnings.catch_warnings(), closely(), patiently():
        warnings.simplefilter("ignore")  # of works that nobody waits for, which is intended
        for turn in range(PROGRAMS):
            program = draw(random.Random(f"{seed} {turn}"))
            own = random.Random(f"{seed} {turn} {here().rank}")
            try:
                if in_block:
                    with objcomm.fail_together():
                        carry_out(program, own)
                else:
                    carry_out(program, own)
                    objcomm.barrier()  # if the work of the step in question was dropped
            except ObjcommError:
                pass
            else:
                raise AssertionError(f"{program} has raised nothing")
            tell_all(f"all have heard in {turn}", "")
            assert_group_works()
        gc.collect()  # or a work that was dropped warns in a later test
