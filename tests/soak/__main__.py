"""The command line: ``python -m tests.soak --minutes 10``, or ``--broadcasts 100000``."""

import argparse
import sys

from tests.soak import launch
from tests.soak.measure import MEBIBYTE, Figures

_COLUMNS = (
    "seconds    turns  raised  groups  MiB of each rank            blocks  threads  fds  keys    µs"
)

# The first figures precede the first operation, and in the next the allocator is still warming up.
_WARM_UP = 2
_CHECKPOINT_SECONDS = 60.0

_BROADCASTS_PER_SECOND = 300  # on a slow machine


def main(arguments: list[str]) -> int:
    """Run one of the two forms and return its exit status: 1 if anything failed or grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--checkpoint", type=float, default=_CHECKPOINT_SECONDS, help="seconds")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--broadcasts", type=int, help="make this many, and nothing else")
    options = parser.parse_args(arguments)
    print(_COLUMNS)
    if options.broadcasts:
        seconds = options.broadcasts / _BROADCASTS_PER_SECOND
        function, given = "broadcasts.broadcasts", {"count": options.broadcasts}
    else:
        seconds = options.minutes * 60
        function, given = "run.soak", {"seed": options.seed, "seconds": seconds}
        given["checkpoint"] = options.checkpoint
    shown = 0

    def show(figures: list[list[Figures]]) -> None:
        """Print a line as soon as every rank has written its figures."""
        nonlocal shown
        ready = min(map(len, figures), default=0)
        for at in range(shown, ready):
            print(_line([of_rank[at] for of_rank in figures]), flush=True)
        shown = max(shown, ready)

    return _judge(launch.run_on_ranks(options.world, function, given, seconds=seconds, watch=show))


def _judge(outcome: launch.Outcome) -> int:
    found = [f"rank {each.rank} {each.outcome}:\n{each.text}" for each in outcome.failures]
    shortest = min(map(len, outcome.figures), default=0)
    if not found and shortest <= _WARM_UP:
        print("every result was right; too few checkpoints to judge growth")
        return 0
    if not found:
        for name in launch.JUDGED:
            found += launch.complaints(name, outcome.figures, _WARM_UP)
    print("\n".join(found) or "every result was right, nothing grew")
    return int(bool(found))


def _line(ranks: list[Figures]) -> str:
    first = ranks[0]
    resident = " ".join(f"{each.resident_nbytes / MEBIBYTE:.1f}" for each in ranks)
    turns, errors = sum(each.turns for each in ranks), sum(each.errors for each in ranks)
    return (
        f"{first.seconds:7.1f} {turns:8} {errors:7} {first.groups:7}  {resident:26} "
        f"{max(each.blocks for each in ranks):7} {max(each.threads for each in ranks):8} "
        f"{max(each.descriptors for each in ranks):4} {first.keys:5} {first.microseconds:5.0f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
