"""A step of an inference engine, in which the scheduler sends every worker its next work.

The measured time starts before rank 0's call and ends when the last of the other ranks has the
object. The unit is a ring in shared memory, as in such engines.
"""

from collections.abc import Callable
from typing import Any

from bench.case import PROCESSOR_SHARE, SECONDS, Bind, Target, case
from bench.measure import Steps
from bench.payloads import STEP
from bench.peers import Peer

_WORLDS = (2, 4, 8)  # one, three and seven workers


_WHY_MISSED = {
    SECONDS: (
        "The ring's readers are awake. objcomm wakes each rank by a socket, and runs the Python of "
        "a call; without the pause a small object takes one reader a fifth of the time."
    ),
    PROCESSOR_SHARE: "What the steps cost, not the waiting; see step_after_second.",
}


def _beside_a_ring(
    at_most: dict[str, float], in_a_row: int = 1, samples: int = 15
) -> Callable[[Bind], Bind]:
    return case(
        STEP,
        "100 kB list of ints",
        peers=("ring", "objcomm", "torch"),
        worlds=_WORLDS,
        samples=samples,
        in_a_row=in_a_row,
        targets=tuple(
            Target(most, "ring", metric=metric, world=world, why_missed=_WHY_MISSED[metric])
            for metric, most in at_most.items()
            for world in _WORLDS
        ),
    )


@_beside_a_ring({SECONDS: 3.0, PROCESSOR_SHARE: 0.1})
def step_after_pause(peer: Peer, mine: Any) -> Callable[[], object]:
    """Broadcast an object 5 ms after every rank has answered the previous one."""
    return Steps(lambda: peer.broadcast(mine), rounds=40, pause=0.005)


@_beside_a_ring({PROCESSOR_SHARE: 0.1}, samples=4)
def step_after_second(peer: Peer, mine: Any) -> Callable[[], object]:
    """Do the same after a second, in which the processors do nothing but wait."""
    return Steps(lambda: peer.broadcast(mine), rounds=2, pause=1.0)


@_beside_a_ring({})
def step_after_answers(peer: Peer, mine: Any) -> Callable[[], object]:
    """Broadcast an object as soon as every rank has answered the previous one."""
    return Steps(lambda: peer.broadcast(mine), rounds=200)


@_beside_a_ring({SECONDS: 1.0}, in_a_row=500)
def steps_in_a_row(peer: Peer, mine: Any) -> Callable[[], object]:
    """Broadcast one object after another; the figure is the total time divided by their number."""
    return Steps(lambda: peer.broadcast(mine), rounds=1)


#: Measured 2026-11-29 on a busy machine, with two ranks.
_STREAM_PYTHON = (
    "Each object is a collective, and every fifth one has a report of the readers besides: 75 µs "
    "of processor on the source, where a broadcast took 42 in the same run and the ring only "
    "pickles and copies. Send small objects in batches: batch=25 takes 0.60 to 0.74 of the ring's "
    "time."
)


#: Measured 2026-11-29 on an idle machine, another one than above.
_STREAM_LISTS = (
    "1.2 to 1.4 times the ring's time. To encode and decode a list took 355 and 511 µs, "
    "where plain pickle takes 265 and 365. The rest is sockets, checksums and Python of a call, "
    "which were not measured one by one."
)

#: Measured in the same run.
_STREAM_IDLE = (
    "0.13 of the ring's processors with three readers and 0.24 with seven; those of "
    "multiprocessing.Queue, which do nothing while they wait, took 0.12 and 0.17. On this virtual "
    "machine the first Python function after a sleep of 0.25 s takes 0.4 ms of processor time, and "
    "the watchdog of each rank wakes up four times a second."
)


def _streams(*peers: str, in_a_row: int, targets: tuple[Target, ...]) -> Callable[[Bind], Bind]:
    payload = STEP if "objcomm batched" in peers else "100 kB list of ints"
    return case(
        payload,
        peers=("ring", *peers, "queue"),
        worlds=_WORLDS,
        samples=9,
        in_a_row=in_a_row,
        targets=targets,
    )


def _as_fast(peer: str, why_missed: str = "") -> tuple[Target, ...]:
    return tuple(
        Target(1.0, "ring", world=world, peer=peer, why_missed=why_missed) for world in _WORLDS
    )


@_streams(
    *("objcomm", "objcomm batched"),
    in_a_row=2000,
    targets=(*_as_fast("objcomm", _STREAM_PYTHON), *_as_fast("objcomm batched")),
)
@_streams("objcomm", in_a_row=100, targets=_as_fast("objcomm", _STREAM_LISTS))
def streamed(peer: Peer, mine: Any) -> Callable[[], object]:
    """Give all ranks one object after another, of which rank 0 may be ten ahead."""
    return Steps(peer.stream(mine), rounds=1)


@case(
    STEP,
    peers=("ring", "objcomm", "queue"),
    worlds=_WORLDS,
    samples=4,
    targets=tuple(
        Target(0.1, "ring", metric=PROCESSOR_SHARE, world=world, why_missed=_STREAM_IDLE)
        for world in _WORLDS
    ),
)
def streamed_after_second(peer: Peer, mine: Any) -> Callable[[], object]:
    """Give all ranks an object of a stream after a second in which they only wait for it."""
    return Steps(peer.stream(mine), rounds=2, pause=1.0)
