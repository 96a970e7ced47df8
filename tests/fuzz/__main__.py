"""The command line: ``python -m tests.fuzz --minutes 60``; prints counts and the rate.

Each batch runs in a child process with limits on memory and processor time, which a defect may end:
its input is kept, and the next child continues.
"""

import argparse
import faulthandler
import json
import os
import random
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.mutate import seeds, variant
from tests.fuzz.targets import TARGETS, attempt

_BATCH = 500
_BATCH_CPU_SECONDS = 60
_BATCH_SECONDS = 1200  # on a machine that is used otherwise, too

# Limits of processor time and memory for one input: a base, and in proportion to its bytes.
_FREE_SECONDS, _SECONDS_PER_BYTE = 0.5, 1e-5
_FREE_NBYTES, _NBYTES_PER_BYTE = 64 << 20, 256
_ADDRESS_SPACE_NBYTES = 1 << 30

# Per hundred messages. Decoding a tensor or a pickle costs five times as much as the rest.
_SHARES = {"header": 13, "message": 20, "plain": 30, "restricted_pickle": 15, "failure": 7}
_SMALL_SHARE = 2.5


def _trial(name: str, raw: bytes, highest: int) -> tuple[bool, str]:
    """Return whether the bytes were accepted as valid, and what was wrong with that.

    Args:
        name: the target's name.
        raw: its input.
        highest: the process's peak memory so far, in bytes.
    """
    began = time.process_time()
    try:
        accepted, wrong = attempt(name, raw), ""
    except Exception as error:  # noqa: BLE001  # any other exception is a defect
        where = traceback.extract_tb(error.__traceback__)[-1]
        accepted, wrong = False, f"{type(error).__name__} at {where.name}:{where.lineno}"
    seconds = time.process_time() - began
    if seconds > _FREE_SECONDS + _SECONDS_PER_BYTE * len(raw):
        wrong = wrong or "took too long"
    if _highest_nbytes() - highest > _FREE_NBYTES + _NBYTES_PER_BYTE * len(raw):
        wrong = wrong or "took too much memory"
    return accepted, wrong


def _highest_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Campaign:
    """Drawn and mutated messages, tried on every target, one target after the other.

    Attributes:
        tried: inputs so far, by target.
        accepted: how many of them were accepted as valid.
        found: kinds of defects, with the first input of each.
    """

    def __init__(self, targets: Sequence[str], seed: int, out: Path) -> None:
        self.tried: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.found: dict[str, Path] = {}
        self._right = {name: seeds(name) for name in targets}
        for name, right in self._right.items():
            for raw in right:  # loads what torch imports on first use before there is a child
                attempt(name, raw)
        self._chance = random.Random(seed)
        self._out = out
        # Written before each attempt, so that a crash leaves its input behind.
        self._current = out / "current"

    def run_batch(self, name: str) -> None:
        """Try some inputs on one target in a child process."""
        seed = self._chance.getrandbits(64)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            self._be_child(name, seed, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as results:
            ended = [json.loads(line) for line in results]
        _, status = os.waitpid(child, 0)
        for accepted, wrong, raw in ended:
            self.accepted[name] += accepted
            if wrong:
                self._keep(name, wrong, bytes.fromhex(raw))
        self.tried[name] += len(ended)
        if status:
            code = os.waitstatus_to_exitcode(status)
            self._keep(name, f"ended the process with {code}", self._current.read_bytes())

    def _be_child(self, name: str, seed: int, writing: int) -> None:
        try:
            _limit(resource.RLIMIT_AS, _address_space_nbytes() + _ADDRESS_SPACE_NBYTES)
            _limit(resource.RLIMIT_CPU, _BATCH_CPU_SECONDS)
            faulthandler.dump_traceback_later(_BATCH_SECONDS, exit=True)
            chance = random.Random(seed)
            with os.fdopen(writing, "wb", 0) as results, self._current.open("wb", 0) as kept:
                for _ in range(_BATCH):
                    try:
                        raw = variant(chance, name, chance.choice(self._right[name]))
                    except MemoryError:  # too large for this child to draw: nothing was tried
                        continue
                    kept.seek(0)
                    kept.truncate()
                    kept.write(raw)
                    accepted, wrong = _trial(name, raw, _highest_nbytes())
                    line = json.dumps([accepted, wrong, raw.hex() if wrong else ""])
                    results.write(line.encode() + b"\n")
        except BaseException:  # noqa: BLE001  # the parent sees the status
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _keep(self, name: str, what: str, raw: bytes) -> None:
        key = f"{name}: {what}"
        if key not in self.found:
            place = self._out / f"{name}-{len(self.found)}"
            place.write_bytes(raw)
            self.found[key] = place
            print(f"{key}: {place}", flush=True)


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _address_space_nbytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> int:
    """Run a campaign and return its exit status: 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--out", type=Path, default=Path("fuzz-out"), help="where inputs are kept")
    options: Any = parser.parse_args(arguments)
    options.out.mkdir(exist_ok=True)
    warnings.simplefilter("ignore")  # torch and numpy warn about odd sizes and dtypes
    torch.set_num_threads(1)  # a forked child has no other threads
    campaign = Campaign(options.targets, options.seed, options.out)
    began = time.monotonic()
    shares = {name: _SHARES.get(name, _SMALL_SHARE) for name in options.targets}
    while time.monotonic() - began < 60 * options.minutes:
        # The target that is furthest behind its share.
        campaign.run_batch(min(shares, key=lambda name: campaign.tried[name] / shares[name]))
    seconds = time.monotonic() - began
    for name in options.targets:
        print(f"{name:18} {campaign.tried[name]:10} tried {campaign.accepted[name]:9} accepted")
    total = campaign.tried.total()
    kinds = len(campaign.found)
    print(f"{total} messages in {seconds:.0f} s, {total / seconds:.0f}/s; {kinds} kinds of defects")
    return int(bool(campaign.found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
