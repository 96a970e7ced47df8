"""``python -m tests.kills --minutes 60``: kill at random, and report broken promises.

``--trial`` repeats a trial that was printed, ``--times`` times.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tests.kills.plan import Trial, drawn
from tests.kills.run import carry_out


def main(arguments: list[str]) -> int:
    """Run trials for the given time; return 1 if any promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--beside", type=int, default=2, help="trials side by side")
    parser.add_argument("--trial", help="one that was printed")
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args(arguments)
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    source, until = random.Random(seed), time.monotonic() + options.minutes * 60

    def trials() -> Iterator[Trial]:
        if options.trial:
            yield from [Trial.parsed(options.trial)] * options.times
            return
        print(f"seed {seed}")
        while time.monotonic() < until:
            yield drawn(source)

    tried, failed = Counter[str](), Counter[str]()
    for trial, found in side_by_side(trials(), options.beside):
        tried[trial.operation] += 1
        if found:
            failed[trial.operation] += 1
            print(f"--trial {trial}", *found, sep="\n    ", flush=True)
    for operation, count in sorted(tried.items()):
        print(f"{operation}: {count} trials, {failed[operation]} not as promised")
    print(f"{tried.total()} trials, {failed.total()} not as promised")
    return int(bool(failed))


def side_by_side(trials: Iterator[Trial], count: int) -> Iterator[tuple[Trial, list[str]]]:
    """Yield each trial and what it found, running ``count`` at a time."""
    with ThreadPoolExecutor(count) as executor:
        running: dict[Future[list[str]], Trial] = {}
        is_over = False
        while running or not is_over:
            while len(running) < count and not is_over:
                trial = next(trials, None)
                if trial is None:
                    is_over = True
                else:
                    running[executor.submit(carry_out, trial)] = trial
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
