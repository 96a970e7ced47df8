"""``python -m tests.faults``: run every fault and write the table of docs/guide/faults.md.

With names of operations, as in ``python -m tests.faults stream``, only their rows are written anew.
"""

import sys
from pathlib import Path

from tests.faults.plan import Case
from tests.faults.run import Outcome, carry_out
from tests.faults.table import replaced, summary, table

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "faults.md"


def main() -> None:
    """Run for some ten minutes, or for as long as the chosen operations take."""

    def carry_out_and_print(case: Case) -> Outcome:
        outcome = carry_out(case)
        sys.stderr.write(f"{case.library} {case}: {summary(outcome)}\n")
        return outcome

    page = PAGE.read_text()
    written = table(carry_out_and_print, sys.argv[1:], page)
    PAGE.write_text(replaced(page, written))


if __name__ == "__main__":
    main()
