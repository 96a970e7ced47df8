"""The command line: ``python -m tests.scale HOSTS RANKS``."""

import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.scale.rank import Heard, faulty
from tests.scale.run import run

_MOST_NAMED = 8
_MOST_SHOWN = 3
_TEXT_MAX = 600


def main(hosts: int, ranks: int) -> None:
    """Run them, and print what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        seen = run(Path(folder), hosts, ranks)
    print(f"{hosts} hosts of {ranks} ranks")
    slowest = max(each.first_seconds for each in seen.values())
    print(f"the first call took {slowest:.2f} s")
    print(f"wrong: {sorted({name for each in seen.values() for name in each.wrong}) or 'nothing'}")
    for name in ("sockets", "descriptors", "threads", "private_nbytes"):
        of_each = [getattr(each, name) for each in seen.values()]
        print(
            f"{name}: rank 0 {of_each[0]}, median {statistics.median(of_each):.0f}, "
            f"most {max(of_each)}"
        )
    for name, rank in faulty(hosts * ranks).items():
        print(f"{name}: rank {rank}")
        _show([each.heard[name] for at, each in seen.items() if at != rank])


def _show(heard: list[Heard]) -> None:
    found = Counter((each.kind, each.ranks) for each in heard).most_common()
    for (kind, named), count in found[:_MOST_SHOWN]:
        alike = [each for each in heard if (each.kind, each.ranks) == (kind, named)]
        seconds = sorted(each.seconds for each in alike)
        shown = named if len(named) <= _MOST_NAMED else f"{len(named)} ranks"
        print(
            f"  {count} ranks: {kind or 'nothing'} naming {shown}, after {seconds[0]:.2f} to "
            f"{seconds[-1]:.2f} s"
        )
        print("   ", alike[0].text[:_TEXT_MAX])
    if found[_MOST_SHOWN:]:
        print(f"  and {len(found) - _MOST_SHOWN} more of one rank or some")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
