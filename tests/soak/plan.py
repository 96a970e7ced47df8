"""The work of each round: the same on every rank, because it follows from seed and number."""

import random
from typing import NamedTuple

from tests.soak import payloads
from tests.soak.faults import with_fault
from tests.soak.operations import OPERATIONS
from tests.soak.turn import Subgroup, Turn

TURNS_PER_ROUND = 60

_STANDING_MAX = 3
_TRANSIENT_EVERY = 20
_FAULT_SHARE = 0.2
_CONFIRM_SHARE = 0.15


class Round(NamedTuple):
    """The work of one round.

    Attributes:
        standing: subgroups that are alive throughout; some exist before it, some will after it.
        main: turns of the main thread. A group that is neither the world nor standing is created
            for its turns and destroyed after them.
        side: turns of the second thread, in a separate lane.
    """

    standing: tuple[Subgroup, ...]
    main: tuple[Turn, ...]
    side: tuple[Turn, ...]


def round_of(seed: int, number: int, world_size: int) -> Round:
    """Return the work of the round of that number."""
    standing = tuple(_standing(seed, number, world_size))
    chance = random.Random(f"{seed} {number}")
    world = Subgroup(0, tuple(range(world_size)))
    groups = (world, world, *standing)
    main, side = ([_turn(chance, groups) for _ in range(TURNS_PER_ROUND)] for _ in range(2))
    for at in range(_TRANSIENT_EVERY, TURNS_PER_ROUND, _TRANSIENT_EVERY):
        transient = Subgroup(-(number * TURNS_PER_ROUND + at), _members(chance, world_size))
        main[at : at + 2] = [_turn(chance, (transient,)) for _ in range(2)]
    return Round(standing, tuple(main), tuple(side))


def _standing(seed: int, number: int, world_size: int) -> list[Subgroup]:
    """List the subgroups of a round; each is created in some round and lives for the next few."""
    alive = []
    for born in range(max(0, number - _STANDING_MAX), number + 1):
        chance = random.Random(f"group {seed} {born}")
        members = _members(chance, world_size)
        if number < born + chance.randint(1, _STANDING_MAX):
            alive.append(Subgroup(born + 1, members))
    return alive


def _members(chance: random.Random, world_size: int) -> tuple[int, ...]:
    return tuple(sorted(chance.sample(range(world_size), chance.randint(2, world_size))))


def _turn(chance: random.Random, groups: tuple[Subgroup, ...]) -> Turn:
    group = chance.choice(groups)
    size = len(group.members)
    name, operation = chance.choice(list(OPERATIONS.items()))
    turn = Turn(
        operation=name,
        group=group,
        root=chance.randrange(size),
        seed=chance.randrange(2**40),
        codecs=tuple(chance.choice(("pickle", "msgpack")) for _ in range(size)),
        sizes=tuple(payloads.size_drawn(chance) for _ in range(size)),
        confirm=operation.can_confirm and chance.random() < _CONFIRM_SHARE,
    )
    faults = operation.faults
    if faults and chance.random() < _FAULT_SHARE:
        return with_fault(turn, chance.choice(faults), chance)
    return turn
