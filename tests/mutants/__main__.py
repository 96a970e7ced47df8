"""The command line: ``python -m tests.mutants``, or the names of some mutants.

Each mutant is the package with one known defect, in a copy of the checkout; the tests that it names
must fail there. Which they are, and what is broken, ``--list`` shows.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.plan import MUTANTS
from tests.mutants.run import WHOLE, Outcome, fits, judge

_ROOT = Path(__file__).parents[2]
_LIMIT_SECONDS = 300.0
_WHOLE_LIMIT_SECONDS = 3600.0


def main(arguments: Sequence[str]) -> int:
    """Judge the chosen mutants, and give the exit status: 1 where one survives or does not fit."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants; all by default")
    parser.add_argument("--list", action="store_true", help="tell what they are, and run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--whole", action="store_true", help="run the whole suite on each")
    parser.add_argument("--trust", action="store_true", help="do not run the tests unmutated first")
    parser.add_argument("--limit", type=float, help="seconds for the tests of one mutant")
    parser.add_argument("--root", type=Path, default=_ROOT, help="another checkout to judge")
    parser.add_argument("--json", type=Path, help="add a line for each mutant to this file")
    options = parser.parse_args(arguments)
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no mutant {', '.join(unknown)}; --list tells which there are")
    chosen = [known[name] for name in options.names] or list(MUTANTS)
    root = options.root.resolve()
    if options.list:
        return _listed(chosen, root)
    limit = options.limit or (_WHOLE_LIMIT_SECONDS if options.whole else _LIMIT_SECONDS)
    if not options.trust:
        files = dict.fromkeys(file for mutant in chosen for file in mutant.tests)
        unmutated = judge(root, None, WHOLE if options.whole else [[*files]], _WHOLE_LIMIT_SECONDS)
        print(f"unmutated: {unmutated.verdict} {unmutated.by} ({unmutated.seconds} s)", flush=True)
        if unmutated.verdict != "passed":
            return 1

    def judged(mutant: Mutant) -> Outcome:
        return judge(root, mutant, WHOLE if options.whole else [mutant.tests], limit)

    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        return _told(pool.map(judged, chosen), options.json)


def _listed(mutants: Sequence[Mutant], root: Path) -> int:
    for mutant in mutants:
        note = "" if fits(root, mutant) else " (does not apply)"
        print(f"{mutant.name}{note}: {mutant.breaks}; {' '.join(mutant.tests)}")
    print(f"{len(mutants)} mutants")
    return int(not all(fits(root, mutant) for mutant in mutants))


def _told(outcomes: Iterable[Outcome], log: Path | None) -> int:
    counts: dict[str, list[str]] = {}
    for outcome in outcomes:
        words = {"passed": "SURVIVED", "failed": f"killed by {outcome.by}"}
        words["timed out"] = f"killed: {outcome.by}"
        text = words.get(outcome.verdict, f"NOT RUN: {outcome.by}")
        print(f"{outcome.name}: {text} ({outcome.seconds} s)", flush=True)
        counts.setdefault(outcome.verdict, []).append(outcome.name)
        if log is not None:
            with log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")
    killed = len(counts.get("failed", [])) + len(counts.get("timed out", []))
    survived, unfit = counts.get("passed", []), counts.get("not run", [])
    print(f"{killed} killed, {len(survived)} survived, {len(unfit)} not run")
    for what, names in (("survived", survived), ("not run", unfit)):
        if names:
            print(f"{what}: {' '.join(names)}")
    return int(bool(survived or unfit))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
