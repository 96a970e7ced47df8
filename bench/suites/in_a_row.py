"""Small calls one after another, as in a training loop, without barriers between them.

A rank that has sent continues with the next call, so a figure is the cost of a call, not the time
to wake ranks that sleep. Peers alternate after several calls each.
"""

from collections.abc import Callable
from typing import Any

from bench.case import MANY_RANKS, PROCESSOR_SECONDS, Bind, Target, case
from bench.payloads import MEDIUM, Tally
from bench.peers import Peer

_IN_A_ROW = 30
_SAMPLES = 40
_MEDIUM_IN_A_ROW = 10
_MEDIUM_SAMPLES = 12
_MANY_SAMPLES = 6  # with 64 ranks on two cores torch's slowest call takes 0.5 s
_BESIDE_TORCH = ("objcomm", "torch")


#: Measured 2026-11-28 on an otherwise idle machine.
_PYTHON = (
    "A broadcast takes 26 µs of processor of each of two ranks, where the same call written flat "
    "in Python takes 7. It makes 54 calls of Python functions, none of which takes more than 2 µs "
    "by itself: to begin and conclude a call takes 8.5 µs, to encode 3.8, to lay out a header "
    "1.5, and to check and open a message 4.4. The system's part is 4 µs."
)
#: Measured on 2026-12-01 on an AMD EPYC.
_MEDIUM_OBJECTS = (
    "Lists: pickle takes 0.2 ms to write 100 kB of numbers and 0.3 ms to read them, for torch as "
    "well. Arrays: of 300 kB in eight of them, Python takes 160 µs to encode, check and decode, "
    "and plain pickle 46. Bytes, there and back: two messages, each with the Python of a send and "
    "a receive; see there_and_back."
)
_AS_BROADCASTS = "The Python of each rank; see broadcasts."
#: Measured 2026-11-25 with 64 ranks on two cores, without other peers in between.
_BARRIER_OF_MANY = (
    "The Python of each rank, whose caches are cold when its turn comes: 344 µs of processor for a "
    "barrier, between any two of which all other ranks run, so 12 of the 14 ms. torch's, in C++, "
    "take 590 µs, mostly the system's. Of a broadcast, where a rank does several in a turn, it is "
    "120 µs."
)
_OBJECTS_OF_MANY = (
    "Each rank reads what 63 others sent: 1.19 ms of Python, 13 µs for one, of which pickle's own "
    "part is 1 µs. All of them take 39 of the 42 ms."
)


def _at_most(against: str, by_world: dict[int, float], why_missed: str) -> tuple[Target, ...]:
    return tuple(
        Target(most, against, world=world, why_missed=why_missed)
        for world, most in by_world.items()
    )


def _many_ranks(payload: str, at_most: float, why_missed: str = "") -> Callable[[Bind], Bind]:
    """Declare the case also for many ranks, with targets at the largest world size."""
    return case(
        payload,
        peers=_BESIDE_TORCH,
        worlds=MANY_RANKS,
        in_a_row=_IN_A_ROW,
        samples=_MANY_SAMPLES,
        targets=_at_most("torch", {64: at_most}, why_missed),
    )


def _medium(worlds: tuple[int, ...] = (2, 4, 8)) -> Callable[[Bind], Bind]:
    """Declare the case also for objects of medium size."""
    return case(
        *MEDIUM,
        peers=_BESIDE_TORCH,
        worlds=worlds,
        in_a_row=_MEDIUM_IN_A_ROW,
        samples=_MEDIUM_SAMPLES,
        targets=_at_most("torch", dict.fromkeys(worlds, 0.5), _MEDIUM_OBJECTS),
    )


@_medium()
@_many_ranks("config dict, 1 KiB", 0.20, _AS_BROADCASTS)
@case(
    "config dict, 1 KiB",
    in_a_row=_IN_A_ROW,
    samples=_SAMPLES,
    targets=(
        *_at_most("torch", {2: 0.08, 4: 0.06, 8: 0.06}, _PYTHON),
        *_at_most("raw", {2: 0.60, 4: 0.40, 8: 0.35}, _PYTHON),
        Target(
            60e-6,
            1,
            unit="seconds",
            metric=PROCESSOR_SECONDS,
            world=2,
            why_missed=_PYTHON,
        ),
    ),
)
def broadcasts(peer: Peer, mine: Any) -> Callable[[], object]:
    """Broadcast rank 0's object."""
    return lambda: peer.broadcast(mine)


@_medium()
@_many_ranks("small dict", 0.05)
@case(
    "small dict",
    in_a_row=_IN_A_ROW,
    samples=_SAMPLES,
    targets=_at_most("torch", {2: 0.06, 4: 0.03, 8: 0.03}, _AS_BROADCASTS),
)
def gathers(peer: Peer, mine: Any) -> Callable[[], object]:
    """Gather every rank's object on rank 0."""
    return lambda: peer.gather(mine)


@_medium()
@_many_ranks("small dict", 0.05, _OBJECTS_OF_MANY)
@case(
    "small dict",
    in_a_row=_IN_A_ROW,
    samples=_SAMPLES,
    targets=_at_most("torch", {2: 0.08, 4: 0.04, 8: 0.03}, _AS_BROADCASTS),
)
def all_gathers(peer: Peer, mine: Any) -> Callable[[], object]:
    """Gather every rank's object on every rank."""
    return lambda: peer.all_gather(mine)


@case(
    "small custom object",
    in_a_row=_IN_A_ROW,
    samples=_SAMPLES,
    targets=_at_most("torch", {2: 0.10, 4: 0.06, 8: 0.05}, _AS_BROADCASTS),
)
def all_reduces(peer: Peer, mine: Any) -> Callable[[], object]:
    """Merge every rank's object."""
    return lambda: peer.all_reduce(mine, Tally.merge)


@_many_ranks("nothing", 0.35, _BARRIER_OF_MANY)
@case(
    "nothing",
    peers=("objcomm", "torch", "mpi4py"),
    in_a_row=_IN_A_ROW,
    samples=_SAMPLES,
    targets=_at_most("torch", {2: 0.30, 4: 0.12, 8: 0.12}, _AS_BROADCASTS),
)
def barriers(peer: Peer, _mine: Any) -> Callable[[], object]:
    """Wait for every rank."""
    return peer.barrier


@_medium(worlds=(2,))
@case(
    "small dict",
    worlds=(2,),
    in_a_row=_IN_A_ROW,
    samples=_SAMPLES,
    targets=_at_most("torch", {2: 0.25}, "The Python of each rank; see there_and_back."),
)
def messages_there_and_back(peer: Peer, mine: Any) -> Callable[[], object]:
    """Send rank 0's object to rank 1 and back."""
    return lambda: peer.there_and_back(mine)
