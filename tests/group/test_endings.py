"""A program exits with an error if its ranks made different calls, and only then."""

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm._calls.group import resolve
from tests import ranks as on
from tests.endings import BEGIN, HUNG, Ending, Program, run_to_the_end

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

# A thread that has ended before its program does.
_IN_A_THREAD = """
import threading
thread = threading.Thread(target=lambda: objcomm.broadcast('x', src=rank))
thread.start()
thread.join()
"""

LINKS: dict[str, Mapping[str, str]] = {"streams": {}, "Gloo": on.OVER_GLOO}


def _calls(world: int) -> dict[str, str]:
    with_root = {
        f"{name} {root}": text.format(root=root)
        for name, text in _WITH_ROOT.items()
        for root in range(world)
    }
    return {**_EACH, **with_root}


def _differing(world: int) -> Iterator[tuple[str, list[str]]]:
    """Every pair of calls, one made by a single rank and the other by the rest."""
    calls = _calls(world)
    for (one, own), (other, theirs) in itertools.permutations(calls.items(), 2):
        if one.removeprefix("large ") == other.removeprefix("large "):
            continue  # only the root decides what is sent
        for rank in range(world):
            if world == 2 and rank:  # the same as another pair
                continue
            bodies = [own if each == rank else theirs for each in range(world)]
            yield f"rank {rank} of {world}: {one}, others: {other}", bodies


def _check_bad(cases: list[tuple[str, list[str]]], drawn: str = "") -> None:
    endings = run_to_the_end([Program(bodies) for _, bodies in cases])
    named = list(zip([name for name, _ in cases], endings, strict=True))
    assert not [name for name, ranks in named if not any(_all(ranks))], drawn
    hung = {name: [each.said for each in ranks] for name, ranks in named if HUNG in _all(ranks)}
    assert not hung, drawn


def _all(ranks: list[Ending]) -> list[int]:
    return [each.status for each in ranks]


def test_ranks_that_made_different_last_calls_do_not_all_end_well() -> None:
    chosen = random.Random(46)  # any seed will do
    cases = [each for world in (2, 3) for each in chosen.sample(list(_differing(world)), 5)]
    idle = "import threading\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    bodies = [
        "objcomm.broadcast('x', src=rank)",
        "if rank == 0: objcomm.broadcast('x')",
        "if rank == 1: objcomm.broadcast('x', src=1)",
        "objcomm.broadcast('x') if objcomm.is_main() else objcomm.barrier('epoch 3')",
        "objcomm.barrier()\nif rank == 0: objcomm.broadcast('x')\nobjcomm.shutdown()",
        "objcomm.barrier()\nif rank: objcomm.gather(1)\ndist.destroy_process_group()",
        "half = objcomm.dup()\nobjcomm.broadcast('x', src=rank, group=half)",
        f"{idle}\nif rank == 0: objcomm.broadcast('x')\nelse: time.sleep(0.5)",
        f"{_IN_A_THREAD}\ntime.sleep(1)",
        "try:\n  objcomm.broadcast('x', src=rank)\n  raise SystemExit\nfinally: objcomm.shutdown()",
    ]
    # While the program keeps its destroyed group, only the watchdog closes the connections.
    keeping = (
        "kept = dist.group.WORLD\nobjcomm.barrier()\ndist.destroy_process_group()\ntime.sleep(1)"
    )
    vanishing = "objcomm.barrier()\nobjcomm.gather(1)\nos._exit(0)"  # compares nothing
    cases.append(("a call in a destroyed group that is kept", [keeping, vanishing]))
    _check_bad([*cases, *((body, [body, body]) for body in bodies)])


@pytest.mark.parametrize(
    "end", ["", "dist.destroy_process_group()", "del groups\ndist.destroy_process_group()"]
)
def test_calls_on_many_groups_are_compared(end: str) -> None:
    body = """
groups = [objcomm.dup() for _ in range(17)]
pids = [objcomm.all_gather(os.getpid(), group=each) for each in groups][0]
"""
    # Rank 0, whose store it is, ends last, so that it sees what the other has published.
    last = "while rank == 0 and os.path.exists(f'/proc/{pids[1]}'): time.sleep(0.05)"
    same, other = (
        f"{body}\n{call}\n{last}\n{end}"
        for call in ("objcomm.barrier()", "objcomm.broadcast(1, src=rank, group=groups[0])")
    )
    well, badly = run_to_the_end([Program([each] * 2, on.OVER_GLOO) for each in (same, other)])
    assert _all(well) == [0, 0]
    assert _all(badly) == [120, 0]


def test_calls_on_a_destroyed_group_that_is_kept_are_compared() -> None:
    body = """
kept = objcomm.dup()
pids = objcomm.all_gather(os.getpid(), group=kept)
objcomm.broadcast(1, src=rank, group=kept)
while rank == 0 and os.path.exists(f'/proc/{pids[1]}'): time.sleep(0.05)
dist.destroy_process_group(kept)
dist.destroy_process_group()
"""
    (ranks,) = run_to_the_end([Program([body] * 2, on.OVER_GLOO)])
    assert _all(ranks) == [120, 0]


def _check_named(ranks: list[Ending]) -> None:
    """Check that the ranks end with an error that names both lines.

    A rank that is slow inside the call raises there, and torch's barrier fails on the other.
    """
    assert _all(ranks) in ([120, 120], [1, 1])
    lines = ("DesyncError", "with root 0 at program.py", "with root 1 at program.py")
    named = [all(each in rank.said for each in lines) for rank in ranks]
    assert all(named) if ranks[0].status == 120 else any(named)


def test_both_lines_are_named_and_a_ranks_own_error_stays() -> None:
    both = "objcomm.broadcast('x', src=rank)\ndist.barrier()"  # torch's: neither rank exits earlier
    failing = "if rank == 0: objcomm.broadcast('x')\nelse: raise ValueError('its own')"
    differing, failed = run_to_the_end([Program([both] * 2), Program([failing] * 2)])
    _check_named(differing)
    assert failed[1].status == 1
    assert failed[1].said.rstrip().endswith("ValueError: its own")


def test_a_rank_that_leaves_because_of_an_error_is_not_out_of_step() -> None:
    """Its own error matters, not the call that it has not made: no mismatch is recorded."""
    body = """
from objcomm._calls.group import resolve
kept = dist.group.WORLD  # so that only the watchdog closes the connections
objcomm.barrier()
if rank == 0: objcomm.barrier()
mesh = resolve(None)._whole.mesh
while not mesh.link.unread(): time.sleep(0.05)
try: raise ValueError
except ValueError:
    objcomm.shutdown()
    {inside}
{after}
"""
    wait = "while mesh.verdict is None: time.sleep(0.05)"
    ways = [{"inside": wait, "after": ""}, {"inside": "pass", "after": wait}]
    programs = [Program([body.format(**each)] * 2) for each in ways]
    for program, ranks in zip(programs, run_to_the_end(programs), strict=True):
        assert _all(ranks) == [1, 0], (program, ranks)
        assert "DesyncError" not in ranks[1].said, program


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rank_that_left_before_a_call_is_named_with_its_last_line(world: int) -> None:
    """The error names the last call, not the closed connections that revealed the exit."""
    fewer = f"for _ in range(1 + (rank != {world - 1})):\n    objcomm.all_gather(0)"
    last = "objcomm.barrier()\nif rank == 0: objcomm.gather(0)\nelse:\n    objcomm.shutdown()"
    used_nothing = "if rank == 0: objcomm.barrier()\nelse: objcomm.shutdown()"
    uneven, left, unused = run_to_the_end(
        [Program([body] * world) for body in (fewer, last, used_nothing)]
    )
    made = "its program has ended after 1 call, the last all_gather (call 0) at program.py"
    for each in uneven[:-1]:
        assert f"to rank {world - 1} ended: {made}" in each.said
        assert each.said.endswith("; this is call 1\n")
    # The ranks that have left by then; the last one may leave a moment later.
    has_left = r"(it has|they have) left \(objcomm\.shutdown at program\.py"
    others = rf"to ranks? [1-{world - 1}, -]+ ended: {has_left}"
    for ranks, before in (
        (left, "after 1 call, the last barrier"),
        (unused, "before (its|their) first"),
    ):
        assert ranks[0].status == 1
        assert re.search(others, ranks[0].said)
        said = ranks[0].said.replace("barrier (call 0)", "barrier call")
        assert re.search(f"{before} call", said)
        assert said.endswith(f"; this is call {int(ranks is left)}\n")


_UNDER_RUN = f"""{BEGIN}
from objcomm.compat import program
program.begin(is_first=False, has_report=False)
"""


def test_under_run_each_rank_raises_where_torch_would() -> None:
    bodies = [
        "dist.broadcast_object_list([rank], src=rank)",
        "dist.gather_object(rank, [0] * world, dst=rank)",
        "dist.scatter_object_list([0], [0] * world, src=rank)",
    ]
    checked = [f"{body}\nprint('returned')" for body in bodies]
    programs = [Program([each] * 2, begin=_UNDER_RUN) for each in checked]
    for body, ranks in zip(bodies, run_to_the_end(programs), strict=True):
        assert _all(ranks) == [1, 1], body
        assert not [each.said for each in ranks if "returned" in each.said]
    unchecked = Program([f"{checked[0]}\ndist.barrier()"] * 2, {"OBJCOMM_CHECK": "0"}, _UNDER_RUN)
    (ranks,) = run_to_the_end([unchecked])
    _check_named(ranks)
    for each in ranks:
        raised = each.status == 1 and "DesyncError" in each.said
        assert raised or "returned" in each.said


@pytest.mark.long
@pytest.mark.lasting
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_pair_of_last_calls(world: int) -> None:
    seed = random.randrange(1 << 32)
    cases = random.Random(seed).sample(list(_differing(world)), 20)  # there are thousands
    _check_bad(cases, f"seed {seed}")


_LATE = "if rank == {late}: time.sleep(1.5)\n"
_WELL = [
    _LATE.format(late=1) + "objcomm.broadcast('x')",
    _LATE.format(late=0) + "objcomm.broadcast('x', src=1)",
    _LATE.format(late=0) + "objcomm.gather(rank)",
    "objcomm.broadcast('x')\nobjcomm.shutdown()",
    "objcomm.broadcast('x')\ndist.destroy_process_group()",
    "kept = dist.group.WORLD\nobjcomm.broadcast('x')\ndist.destroy_process_group()",
    "for i in range(50): objcomm.broadcast(i)",
    "objcomm.broadcast('x', async_op=True).wait()",
    "half = objcomm.split(rank % 2)\nif rank % 2: objcomm.barrier(group=half)",
    "import atexit\natexit.register(lambda: objcomm.broadcast('x'))",
    "objcomm.send('x', 0) if rank else [objcomm.recv() for _ in range(1, world)]",
    # Kept until the interpreter ends.
    "kept = objcomm.broadcast('x', async_op=True)\nwhile not kept.done(): time.sleep(0.01)",
    "sent = objcomm.isend(1, (rank + 1) % world)\nkept = objcomm.mprobe()\nsent.wait()",
    "kept = objcomm.stream(range(10) if rank == 0 else None)\nnext(iter(kept))",
]


def _check_well(programs: list[Program]) -> None:
    for program, ranks in zip(programs, run_to_the_end(programs), strict=True):
        said = [each.said for each in ranks]
        assert not any(_all(ranks)), (program, said)
        assert not [each for each in said if "Exception ignored" in each], program


def test_ranks_that_made_the_same_calls_end_well() -> None:
    _check_well([Program([body] * 2) for body in _WELL])


def test_a_rank_that_has_contributed_may_end_long_before_another_comes() -> None:
    """It has exited normally and is not dead; the root still awaits the third rank's object."""
    bodies = ["objcomm.gather(rank)", "objcomm.reduce('x', lambda a, b: a + b)"]
    late = _LATE.format(late=1).replace("1.5", "3")
    _check_well([Program([late + body] * 3, link) for body in bodies for link in LINKS.values()])


def test_an_exit_handler_from_before_the_import_may_call() -> None:
    # The parent of all these programs has imported objcomm.
    does = "unregister", "register", "register"
    order = "objcomm._end", "lambda: last()", "objcomm._end"
    steps = [f"atexit.{do}({what})" for do, what in zip(does, order, strict=True)]
    begin = "\n".join(["import atexit, objcomm", *steps, BEGIN])
    body = "def last(): print(objcomm.all_gather(rank, timeout=300))\nobjcomm.barrier()"
    (ranks,) = run_to_the_end([Program([body] * 2, begin=begin)])
    assert [(each.status, each.said) for each in ranks] == [(0, "[0, 1]\n")] * 2


@pytest.mark.parametrize("link", LINKS)
def test_a_rank_that_computes_names_the_dead_rank_though_another_has_ended(link: str) -> None:
    """Rank 0 exits with its error, and the store goes with it."""
    body = """
objcomm.barrier()
if rank == 2: os.kill(os.getpid(), 9)
if rank == 1: time.sleep(5)
try: objcomm.barrier()
except objcomm.TransportError as error: print(error.peers)
"""
    (ranks,) = run_to_the_end([Program([body] * 3, LINKS[link])])
    # torch may also print something if the store is gone.
    named = [[line for line in each.said.splitlines() if line.startswith("(")] for each in ranks]
    assert named == [["(2,)"], ["(2,)"], []], ranks


@on.ranks(2, disposable=True)
def test_what_a_rank_publishes_of_destroyed_groups_is_bounded() -> None:
    for _ in range(20):
        group: Any = objcomm.dup()
        objcomm.all_gather(1, group=group)
        dist.destroy_process_group(group)
    mesh = resolve(None)._whole.mesh  # noqa: SLF001  # nothing public has it
    assert mesh is not None
    calls = mesh.board_thread.call(lambda _: mesh.board_thread.processes.own.calls, 20)
    assert len(calls) == 16


@pytest.mark.long
@pytest.mark.lasting
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_last_call_that_all_ranks_make_ends_well(world: int) -> None:
    bodies = [*_WELL, *_calls(world).values()]
    chosen = bodies if world == 2 else random.sample(bodies, 10)
    _check_well([Program([body] * world) for body in chosen])
