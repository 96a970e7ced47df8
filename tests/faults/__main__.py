"""``python -m tests.faults``: try everything, and write what each rank saw into the guide.

Takes some minutes. Torch's collectives get the same faults where they can be done to them, in a
Gloo group whose own limit is ``run.TORCH_LIMIT_S`` instead of half an hour.
"""

import sys
from pathlib import Path

from tests.faults.plan import FAULTS, LARGE_NBYTES, OPERATIONS, VICTIM, WORLD_SIZE, cases
from tests.faults.run import TORCH_LIMIT_S, Outcome, run_case

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guide" / "failures.md"
BEGIN, END = "<!-- faults -->", "<!-- /faults -->"


def main() -> int:
    """Run all cases and rewrite the table."""
    lines = [_row(fault, operation) for fault, operation in cases()]
    text = GUIDE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    GUIDE.write_text(before + BEGIN + "\n" + table(lines) + "\n" + END + after, encoding="utf-8")
    return 0


def table(lines: list[str]) -> str:
    """The rows under their heading."""
    others = [rank for rank in range(WORLD_SIZE) if rank != VICTIM]
    heads = [
        f"rank {VICTIM}",
        "operation",
        *(f"rank {rank} saw" for rank in others),
        *(f"rank {rank} of torch's" for rank in others),
    ]
    rule = "|".join(["---"] * len(heads))
    note = (
        f"Three ranks; `src` is rank {VICTIM}, `dst` rank 0. Where a payload is struck it has "
        f"{LARGE_NBYTES >> 20} MiB. Torch's object collectives ran in a Gloo group with a limit of "
        f"{TORCH_LIMIT_S:g} s; an empty cell means that the same can't be done to them, or that "
        "there is no counterpart. Seconds are counted from the fault. *Next*: the rank's part was "
        "to send, its call returned, and its next one raised.\n"
    )
    return "\n".join([note, f"| {' | '.join(heads)} |", f"|{rule}|", *lines])


def _row(fault: str, operation: str) -> str:
    cells = _cells(run_case(fault, operation))
    has_peer = FAULTS[fault].torch_too and OPERATIONS[operation].torch_call is not None
    torchs = _cells(run_case(fault, operation, of_torch=True)) if has_peer else ["", ""]
    row = f"| {FAULTS[fault].text} | `{operation}` | {' | '.join([*cells, *torchs])} |"
    sys.stdout.write(f"{row}\n")
    return row


def _cells(outcomes: list[Outcome]) -> list[str]:
    return [_cell(each) for each in outcomes if each.rank != VICTIM]


def _cell(outcome: Outcome) -> str:
    if outcome.error == "returned":
        return "returned"
    named = f", names {', '.join(map(str, outcome.named))}" if outcome.named else ""
    following = ", next" if outcome.was_next else ""
    return f"`{outcome.error}`{named}, {outcome.seconds:.1f} s{following}"


if __name__ == "__main__":
    sys.exit(main())
