"""Random programs in which one rank makes a different call, after which all ranks continue.

Every rank draws the same program, but its own pauses before the calls. So the error can reach a
rank anywhere: before a call that others have started, in a synchronous call, or in a work that it
waits for later or drops. Once every rank has raised the error, their next calls match.
"""

import contextlib
import gc
import random
import time
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import objcomm
from objcomm import ObjcommError, Work
from tests.cases import case
from tests.group.helpers import assert_group_works, error_in, tell_all
from tests.group.watched import closely, patiently
from tests.ranks import ranks
from tests.workers import here

PROGRAMS = 12
_LONGEST_PAUSE_S = 0.05


@dataclass(frozen=True)
class Step:
    """One call, which differs between ranks only in ``is_apart``.

    Attributes:
        is_async: whether it returns a work.
        is_dropped: whether that work is never waited for.
        ends_one: whether the oldest work is waited for afterwards.
        is_apart: whether this rank makes a different call.
    """

    is_async: bool
    is_dropped: bool
    ends_one: bool
    is_apart: bool


def draw(chance: random.Random) -> list[Step]:
    """Draw a program in which one rank makes one different call."""
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


def carry_out(program: list[Step], own: random.Random, *, in_block: bool) -> None:
    """Run the steps, and wait for the works they have started."""
    with objcomm.fail_together() if in_block else contextlib.nullcontext():
        works: list[tuple[int, Work[Any]]] = []
        for at, step in enumerate(program):
            if own.random() < 0.5:
                time.sleep(own.uniform(0, _LONGEST_PAUSE_S))
            call: Any = objcomm.all_reduce if step.is_apart else objcomm.all_gather
            got = call(at, async_op=step.is_async)
            if not step.is_async:
                assert got == [at] * here().world_size
            elif not step.is_dropped:
                works.append((at, got))
            if step.ends_one and works:
                end(*works.pop(0))
        for at, work in works:
            end(at, work)
    if not in_block:
        objcomm.barrier()  # in case the differing step's work was dropped


def end(at: int, work: Work[Any]) -> None:
    """Wait for a work that all ranks started in the same step."""
    assert work.wait() == [at] * here().world_size


@ranks(2, 3, long=(4,))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("in_block", [False, True])
def test_every_rank_raises_once_and_continues(*, in_block: bool, seed: int) -> None:
    objcomm.barrier()
    with warnings.catch_warnings(), closely(), patiently():
        warnings.simplefilter("ignore")  # about dropped works, which are intended
        for turn in range(PROGRAMS):
            program = draw(random.Random(f"{seed} {turn}"))
            own = random.Random(f"{seed} {turn} {here().rank}")
            with case(program):
                error_in(ObjcommError, partial(carry_out, program, own, in_block=in_block))
                tell_all(f"all have raised in {turn}", "")
                assert_group_works()
        gc.collect()  # or a dropped work would warn in a later test
