"""`@ranks(1, 2, 3)` runs a test's body on every rank of worlds of these sizes; `@solo` on none.

The pool of a world size lives for the whole test run, so a test costs a message and not a spawn. A
pool in which a test failed is ended, and the next test gets a new one. A test that kills, exits or
breaks its ranks passes `disposable=True` and gets its own processes.
"""

import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pytest

from tests.workers import Order, Pool, Report

__all__ = ["OVER_GLOO", "close_pools", "ranks", "run_on_fresh_ranks", "run_on_ranks", "solo"]

Body = Callable[..., None]

#: The ``environment`` of tests of behavior that is specific to Gloo's link.
OVER_GLOO = {"OBJCOMM_TRANSPORT": "gloo"}

DEADLINE_S = 300.0  # only a hang takes this long, even while two other suites run

_pools: dict[int, Pool] = {}


def ranks(
    *world_sizes: int,
    long: Collection[int] = (),
    deadline: float = DEADLINE_S,
    disposable: bool = False,
    joined: bool = True,
    expect_dead: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Callable[[Body], Body]:
    """Run the test's body on every rank of each world.

    Args:
        world_sizes: the world sizes; the test is parametrized over them.
        long: more world sizes, for the long tests.
        deadline: seconds after which every rank's stacks are reported and its process is killed.
        disposable: use fresh processes that end with the test.
        joined: whether the ranks join a process group first; if not, the body does.
        expect_dead: ranks whose processes the body ends; implies ``disposable``.
        environment: variables to set; implies ``disposable``.
    """
    fresh = disposable or bool(expect_dead) or not joined or environment is not None

    def decorate(body: Body) -> Body:
        def run(world_size: int, **arguments: object) -> None:
            order = Order(body.__module__, body.__name__, arguments)
            if fresh:
                pool = Pool(world_size, joined=joined, environment=environment)
                reports = _run_once(pool, order, deadline)
            else:
                reports = _run_in_pool(world_size, order, deadline)
            _judge(reports, expect_dead)

        _dress(run, body, ("world_size",))
        sizes = [*world_sizes, *(pytest.param(size, marks=pytest.mark.long) for size in long)]
        return pytest.mark.parametrize("world_size", sizes, ids="world{}".format)(run)

    return decorate


def solo(
    *, environment: Mapping[str, str] | None = None, deadline: float = DEADLINE_S
) -> Callable[[Body], Body]:
    """Run the test's body in one fresh process that has not initialized torch.distributed."""

    def decorate(body: Body) -> Body:
        def run(**arguments: object) -> None:
            pool = Pool(1, joined=False, environment=environment)
            order = Order(body.__module__, body.__name__, arguments)
            _judge(_run_once(pool, order, deadline), ())

        _dress(run, body, ())
        return run

    return decorate


def run_on_ranks(
    world_size: int, function: Body, deadline: float = DEADLINE_S, **arguments: object
) -> None:
    """Call an importable function on every rank of the pool, like a test's body."""
    order = Order(function.__module__, function.__name__, arguments)
    _judge(_run_in_pool(world_size, order, deadline), ())


def run_on_fresh_ranks(
    world_size: int, function: Body, deadline: float = DEADLINE_S, **arguments: object
) -> None:
    """Do the same in new processes that have joined no group; size 0 means one process."""
    order = Order(function.__module__, function.__name__, arguments)
    _judge(_run_once(Pool(max(1, world_size), joined=False), order, deadline), ())


def close_pools() -> list[str]:
    """End all pools; list the ranks that did not end when asked to."""
    stubborn = [
        f"rank {rank} of {world_size}"
        for world_size, pool in _pools.items()
        for rank in pool.close()
    ]
    _pools.clear()
    return stubborn


def _dress(run: Body, body: Body, added: tuple[str, ...]) -> None:
    """Give `run` the body's name and parameters, so that fixtures and `parametrize` find them."""
    inherited = list(inspect.signature(body).parameters.values())
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in added]
    run.__name__, run.__qualname__ = body.__name__, body.__qualname__
    run.__module__, run.__doc__ = body.__module__, body.__doc__
    run.__dict__.update(
        body.__dict__, body=body, __signature__=inspect.Signature([*inherited, *own])
    )


def _run_in_pool(world_size: int, order: Order, deadline: float) -> list[Report]:
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    pool = _pools[world_size]
    reports = pool.run(order, deadline)
    if pool.ruined:
        _pools.pop(world_size).close()
    return reports


def _run_once(pool: Pool, order: Order, deadline: float) -> list[Report]:
    try:
        return pool.run(replace(order, is_last=True), deadline)
    finally:
        pool.ruined = True  # its ranks may be in any state: kill them
        pool.close()


def _judge(reports: list[Report], expect_dead: Collection[int]) -> None:
    __tracebackhide__ = True
    wanted = {report.rank: "died" if report.rank in expect_dead else "passed" for report in reports}
    skipped = [report.text for report in reports if report.outcome == "skipped"]
    if len(skipped) == len(reports):
        pytest.skip(skipped[0])
    failed = [report for report in reports if report.outcome != wanted[report.rank]]
    if failed:
        texts = [
            textwrap.indent(
                f"{report.outcome}, {wanted[report.rank]} was expected\n{report.text}",
                f"[rank {report.rank}] ",
            )
            for report in failed
        ]
        pytest.fail("\n".join(texts), pytrace=False)
