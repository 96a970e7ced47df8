"""The trials: which rank is killed where, in which operation, and which ranks must notice.

Declarations only: ``rank`` is one process of a trial, ``run`` runs and judges it.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch.distributed as dist

import objcomm
from tests.group.operations import FROM_ONE, OPERATIONS, TO_ONE

Call = Callable[..., object]

#: How long a waiting rank may take to notice a death, in seconds.
PROMISE_SECONDS = 2.0
#: Default timeout of a call; only a rank that never notices a death reaches it.
FAR_SECONDS = 60.0

#: Where the operation runs: in the world, in a connected group that leaves out one more rank of the
#: world, or in such a group before its first use.
WORLD, GROUP, FIRST_USE = "world", "group", "first-use"
WHERE = [WORLD, GROUP, FIRST_USE]


class Trial(NamedTuple):
    """One kill.

    Attributes:
        operation: a key of `CALLS`.
        size: number of ranks in the operation.
        victim: the rank that is killed, counted among those ranks.
        busy: the rank that computes until the others have raised, or for longer than was promised;
            -1 if all call at the same time.
        at: the Python call inside the package at which the victim is killed, counted from the start
            of its operation; 0 if it is killed before that.
        all_threads: whether the calls of all the victim's threads count.
        where: one of `WHERE`.
        is_over_gloo: whether objects go over Gloo.
        limit: timeout of the operation, in seconds.
    """

    operation: str
    size: int = 3
    victim: int = 2
    busy: int = 1
    at: int = 0
    all_threads: bool = False
    where: str = WORLD
    is_over_gloo: bool = False
    limit: float = FAR_SECONDS

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.victim]

    @property
    def waiting(self) -> list[int]:
        """List the survivors that make the call immediately."""
        return [rank for rank in self.survivors if rank != self.busy]

    def must_hear(self, rank: int) -> bool:
        """Return whether a rank can't complete the operation without the victim.

        If it waits, it raises within the promised time, even while it waits for the busy rank. It
        may return if the victim is killed in its call after sending all that this rank needs. A
        rank that need not notice may return, and raises in its next call.
        """
        return self.victim in needs(self.operation, rank, self.size)

    @property
    def world_size(self) -> int:
        return self.size if self.where == WORLD else self.size + 1

    def __str__(self) -> str:
        return ",".join(
            f"{name}={value}"
            for name, value in self._asdict().items()
            if value != self._field_defaults.get(name)
        )

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Parse a trial that `str` has written."""
        types: dict[str, Callable[[str], Any]] = {
            "operation": str,
            "where": str,
            "limit": float,
            "all_threads": "True".__eq__,
            "is_over_gloo": "True".__eq__,
        }
        fields = dict(each.split("=") for each in text.split(","))
        return cls(**{name: types.get(name, int)(value) for name, value in fields.items()})


def _with_confirm(call: Call) -> Call:
    return lambda obj, **options: call(obj, confirm=True, **options)


def _async(call: Call) -> Call:
    def wait(obj: Any, **options: Any) -> object:
        work: Any = call(obj, async_op=True, **options)
        return work.wait()

    return wait


def _new_group(_: Any, *, timeout: float, group: Any = None) -> object:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return objcomm.new_group(ranks, timeout=timeout)


def _main_first(_: Any, **options: Any) -> None:
    with objcomm.main_first(**options):
        pass


def _fail_together(_: Any, **options: Any) -> None:
    with objcomm.fail_together(**options):
        pass


_WITHOUT_CONFIRM = {"barrier", "gather_scalar", "all_gather_scalar", "reduce_and_broadcast"}
_OTHERS: dict[str, Call] = {
    "split": lambda _, **options: objcomm.split(0, **options),
    "dup": lambda _, **options: objcomm.dup(**options),
    "node_group": lambda _, **options: objcomm.node_group(**options),
    "leaders": lambda _, **options: objcomm.leaders(**options),
    "new_group": _new_group,
    "main_first": _main_first,
    "fail_together": _fail_together,
    "run_on_main": lambda obj, **options: objcomm.run_on_main(lambda: obj, **options),
    "agree": objcomm.agree,
    "average_metrics": lambda _, **options: objcomm.metrics.average_metrics(
        {"loss": 0.5}, 64, **options
    ),
}
CONFIRM, ASYNC = " with confirm", " async"

#: Each takes an object, ``timeout=`` and ``group=``.
CALLS: dict[str, Call] = {
    **OPERATIONS,
    **{
        f"{name}{CONFIRM}": _with_confirm(call)
        for name, call in OPERATIONS.items()
        if name not in _WITHOUT_CONFIRM
    },
    **{f"{name}{ASYNC}": _async(call) for name, call in OPERATIONS.items()},
    **_OTHERS,
}


def needs(operation: str, rank: int, size: int) -> set[int]:
    """Return the other ranks that a rank needs to complete an operation, with default roots.

    For a small object: a rank that sends one to a single rank does not wait for it.
    """
    others = set(range(size)) - {rank}
    name = operation.removesuffix(ASYNC)
    if name in TO_ONE:
        return others if rank == 0 else set()
    if name in FROM_ONE or name == "run_on_main":
        return {0} - {rank}
    return others


def before_their_calls(operation: str) -> Iterator[Trial]:
    """Yield each operation with any two of three ranks, some with four, in other groups, over Gloo.

    Only if some rank has to notice the death.
    """
    place = list(CALLS).index(operation)
    of_four = list(itertools.permutations(range(4), 2))
    others = [
        Trial(operation, 4, *of_four[place % len(of_four)]),
        Trial(operation, 4, *of_four[(5 * place + 7) % len(of_four)]),
        Trial(operation, 3, 2, 1, is_over_gloo=True),
        Trial(operation, 4, *of_four[(7 * place + 3) % len(of_four)], is_over_gloo=True),
    ]
    if operation != "new_group":
        others += [Trial(operation, where=where) for where in (GROUP, FIRST_USE)]
    of_three = (Trial(operation, 3, *two) for two in itertools.permutations(range(3), 2))
    for trial in (*of_three, *others):
        if any(map(trial.must_hear, trial.waiting)):
            yield trial


MOST_CALLS = 400


def drawn(source: random.Random) -> Trial:
    """Draw any kill."""
    operation = source.choice(list(CALLS))
    size = source.randint(2, 4)
    victim = source.randrange(size)
    others = [rank for rank in range(size) if rank != victim]
    return Trial(
        operation,
        size,
        victim,
        busy=source.choice(others) if size > 2 and source.random() < 0.7 else -1,
        at=source.choice([0, source.randint(1, 60), source.randint(1, MOST_CALLS)]),
        all_threads=source.random() < 0.4,
        where=WORLD if operation == "new_group" else source.choice(WHERE),
        is_over_gloo=source.random() < 0.3,
    )
