"""The command line: ``python -m tests.fuzz --messages 10000000``; prints counts and the rate."""

import argparse
import contextlib
import faulthandler
import math
import random
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from tests.fuzz.mutate import seeds, variant
from tests.fuzz.targets import LIMIT_NBYTES, TARGETS, attempt

_BATCH = 1000
_HANG_SECONDS = 1.0
_STUCK_SECONDS = 60

# What one input may make the process grow: the limit itself, and what torch loads at its first use.
_GROWTH_MAX_NBYTES = 64 * LIMIT_NBYTES
_ADDRESS_SPACE_NBYTES = 8 << 30

# Of a hundred messages. Decoding a tensor or a pickle costs five times as much as the rest.
_SHARES = {"header": 18, "message": 30, "plain": 30, "failure": 12, "bundle": 5}
_SMALL_SHARE = 2.5


class Campaign:
    """Mutated messages, tried in turn on every target.

    Attributes:
        tried: inputs so far, by target.
        accepted: those of them that were taken for right ones.
        found: kinds of defects with the first input of each.
    """

    def __init__(self, seed: int, out: Path) -> None:
        self.tried: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.found: dict[str, Path] = {}
        self._chance = random.Random(seed)
        self._out = out
        self._highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        # Written before each attempt, so that a crash leaves its input behind.
        self._current = (out / "current").open("wb", buffering=0)

    def run(self, name: str, count: int) -> None:
        """Try ``count`` inputs on one target."""
        right = seeds(name)
        for _ in range(count // _BATCH):
            faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True)
            for _ in range(_BATCH):
                self._try(name, variant(self._chance, name, self._chance.choice(right)))
            self.tried[name] += _BATCH

    def _try(self, name: str, raw: bytes) -> None:
        self._current.seek(0)
        self._current.truncate()
        self._current.write(raw)
        began = time.perf_counter()
        try:
            self.accepted[name] += attempt(name, raw)
        except BaseException as error:  # anything that comes out is a defect
            if isinstance(error, KeyboardInterrupt):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._keep(name, f"{type(error).__name__} at {where.name}:{where.lineno}", raw)
        if time.perf_counter() - began > _HANG_SECONDS:
            self._keep(name, "took too long", raw)
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if highest - self._highest > _GROWTH_MAX_NBYTES:
            self._keep(name, f"took {(highest - self._highest) >> 20} MiB", raw)
        self._highest = highest

    def _keep(self, name: str, what: str, raw: bytes) -> None:
        key = f"{name}: {what}"
        if key not in self.found:
            place = self._out / f"{name}-{len(self.found)}"
            place.write_bytes(raw)
            self.found[key] = place
            print(f"{key}: {place}", flush=True)


def main(arguments: list[str]) -> int:
    """Run a campaign and give its exit status: 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--out", type=Path, default=Path("fuzz-out"), help="where inputs are kept")
    options = parser.parse_args(arguments)
    options.out.mkdir(exist_ok=True)
    faulthandler.enable()
    with contextlib.suppress(ValueError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_NBYTES,) * 2)
    warnings.simplefilter("ignore")  # torch and numpy warn of odd sizes and dtypes
    campaign = Campaign(options.seed, options.out)
    began = time.perf_counter()
    shares = {name: _SHARES.get(name, _SMALL_SHARE) for name in options.targets}
    for name in options.targets:
        started = time.perf_counter()
        share = options.messages * shares[name] / sum(shares.values())
        campaign.run(name, math.ceil(share / _BATCH) * _BATCH)
        rate = campaign.tried[name] / (time.perf_counter() - started)
        tried, accepted = campaign.tried[name], campaign.accepted[name]
        print(f"{name:18} {tried:10} tried {accepted:9} accepted {rate:9.0f}/s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    total = campaign.tried.total()
    seconds = time.perf_counter() - began
    rate, kinds = total / seconds, len(campaign.found)
    print(f"{total} messages in {seconds:.0f} s, {rate:.0f}/s; {kinds} kinds of defects")
    return int(bool(campaign.found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
