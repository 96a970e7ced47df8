"""``python -m tests.faults``: run every fault and write the table of docs/guide/faults.md."""

import sys
from pathlib import Path

from tests.faults.plan import Case
from tests.faults.run import Outcome, carry_out
from tests.faults.table import replaced, summary, table

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "faults.md"


def main() -> None:
    """Run for some ten minutes."""

    def told(case: Case) -> Outcome:
        outcome = carry_out(case)
        sys.stderr.write(f"{case.library} {case}: {summary(outcome)}\n")
        return outcome

    written = table(told)
    PAGE.write_text(replaced(PAGE.read_text(), written))


if __name__ == "__main__":
    main()
