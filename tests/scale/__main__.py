"""The command line: ``python -m tests.scale HOSTS RANKS``."""

import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.scale.rank import Heard, faulty
from tests.scale.run import run

_TEXT_MAX = 600


def main(hosts: int, ranks: int) -> None:
    """Run the ranks, and print the results."""
    with tempfile.TemporaryDirectory() as folder:
        seen = run(Path(folder), hosts, ranks)
    print(f"{hosts} hosts of {ranks} ranks")
    slowest = max(each.first_seconds for each in seen.values())
    print(f"the first call took {slowest:.2f} s")
    print(f"wrong: {sorted({name for each in seen.values() for name in each.wrong}) or 'nothing'}")
    for name in next(iter(seen.values())).more:
        of_each = [each.more[name] for each in seen.values()]
        median = statistics.median(of_each)
        print(f"{name}: rank 0 {of_each[0]}, median {median:.0f}, most {max(of_each)}")
    for name, rank in faulty(hosts * ranks).items():
        print(f"{name}: rank {rank}")
        _show([each.heard[name] for at, each in seen.items() if at != rank], rank)


def _show(heard: list[Heard], culprit: int) -> None:
    """Print the ranks' errors, by class and by whether they name the culprit."""
    found = Counter((each.kind, culprit in each.ranks) for each in heard)
    for (kind, is_named), count in found.most_common():
        alike = [each for each in heard if (each.kind, culprit in each.ranks) == (kind, is_named)]
        seconds = sorted(each.seconds for each in alike)
        named = f"naming {culprit}" if is_named else f"not naming {culprit}"
        print(
            f"  {count} ranks: {kind or 'nothing'} {named}, after {seconds[0]:.2f} to "
            f"{seconds[-1]:.2f} s"
        )
        print("   ", alike[0].text[:_TEXT_MAX])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
