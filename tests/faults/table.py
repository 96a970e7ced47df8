"""The table of the documentation: every fault in every operation, and what each rank saw."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby

from tests.faults.plan import LARGE_NBYTES, LIMIT_SECONDS, Case, in_torch, tabled
from tests.faults.rank import TORCHS_LIMIT_SECONDS, Seen
from tests.faults.run import HANG_SECONDS, Outcome

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"

_HEAD = f"""
## How it was tried

Three ranks ran on one machine, and each contributed {LARGE_NBYTES >> 20} MiB. In a broadcast or
scatter the fault happens to the source; the destination of a gather or reduce is rank 0. What
several ranks saw alike is listed once; "naming" lists the ranks in the error's attributes, and
seconds count from the fault. Where only a time limit can end the wait, objcomm's calls have a limit
of {LIMIT_SECONDS:g} s. Torch's calls take no limit, so their group has one of
{TORCHS_LIMIT_SECONDS:g} s. When a rank is interrupted, the others make their call afterwards.

In the rows from `send` to `probe`, two ranks exchange a message: the one to which the fault
happens, and the lowest other one, which makes the call in the first column. The third waits for a
message that the second sends after its own call. `probe` is followed by a `recv`, and `sendrecv`
passes messages around a ring of all three. If the sockets between two ranks close, neither can tell
which of them closed them. In a `stream`, the fault happens to the source of one object.

Calls that create groups have no payload, so the fault happens before the header instead, as it does
in a barrier, and for "in the payload" while torch connects the new group. `new_group` gets a list
of all three ranks, which meet separately from the world; afterwards the survivors create a group of
themselves in the same way. `survivors` returns a group without the dead rank. It waits for one that
was interrupted, because that rank may call it again.

Torch has connected before any call, and has no error that a group survives, so two of the tables
have nothing for it.
"""


_IN_SHORT = """
## In short

What the ranks that waited for the affected rank saw, in all operations together, and how long after
the fault. Each fault links to its table. An empty cell means that torch was not tried.
"""

_OF_A_WAIT = re.compile(
    r"(?P<heard>`\w+`|returns|hangs \([^)]*\))([^;]*?, (?P<seconds>[\d.]+(–[\d.]+)?) s)?"
)


def title(case: Case) -> str:
    """Return the table heading of a case."""
    first, rest = case.fault.value[0], case.fault.value[1:]
    return f"Rank {case.victim}: {first}{rest}, {case.asked_phase.value}"


def rows() -> Iterator[tuple[str, list[Case]]]:
    """Yield the cases of each fault, with its title."""
    for name, cases in groupby(tabled(), title):
        yield name, list(cases)


def table(
    carry_out: Callable[[Case], Outcome], chosen: Collection[str] = (), page: str = ""
) -> str:
    """Run all cases and write the table.

    Args:
        carry_out: runs a case.
        chosen: the only operations to run; empty for all.
        page: the page from which the rows of the others are kept.
    """
    written = page.partition(BEGIN)[2].partition(END)[0]
    kept = {(name, call): (ours, theirs) for name, call, ours, theirs in _cells(written)}
    parts = []
    for name, cases in rows():
        lines = [f"\n## {name}\n", "| operation | objcomm | torch |", "|---|---|---|"]
        for case in cases:
            if chosen and case.operation not in chosen:
                ours, theirs = kept[name, case.operation]
                lines.append(f"| {case.operation} | {ours} | {theirs} |")
                continue
            other = in_torch(case)
            theirs = "" if other is None else f"{summary(carry_out(other))}"
            lines.append(f"| {case.operation} | {summary(carry_out(case))} | {theirs} |")
        parts.append("\n".join(lines) + "\n")
    found = "".join(parts)
    return f"{in_short(found)}{_HEAD}{found}"


def in_short(found: str) -> str:
    """Summarize the tables, in one line for each fault."""
    lines = [_IN_SHORT, "| what happens | objcomm | torch |", "|---|---|---|"]
    for name, cells in groupby(_cells(found), lambda each: each[0]):
        _, _, ours, theirs = zip(*cells, strict=True)
        lines.append(f"| [{name}](#{_anchor(name)}) | {_heard(ours)} | {_heard(theirs)} |")
    return "\n".join(lines) + "\n"


def _anchor(heading: str) -> str:
    """Return the anchor that MkDocs creates."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _heard(cells: Sequence[str]) -> str:
    """Return the errors that ranks saw, or that all returned, and the range of seconds."""
    spans: dict[str, list[float]] = defaultdict(list)
    for each in (found for cell in cells for found in _OF_A_WAIT.finditer(cell)):
        spans[each["heard"]] += map(float, re.findall(r"[\d.]+", each["seconds"] or ""))
    spans.pop("`KeyboardInterrupt`", None)  # on the interrupted rank itself
    if len(spans) > 1:
        spans.pop("returns", None)  # the third rank, which waits for no failed rank
    return "; ".join(
        f"{heard}, {_span(seconds)}" if seconds else heard
        for heard, seconds in sorted(spans.items())
    )


def _cells(page: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the tables, each with its fault."""
    name = ""
    for line in page.splitlines():
        if line.startswith("## "):
            name = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if name.startswith("Rank ") and cells and cells[0] not in {"operation", "---"}:
            yield name, cells[0], cells[1], cells[2]


def summary(outcome: Outcome) -> str:
    """Return what each rank saw, in one line."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank in outcome.case.living:
        alike[_in_words(outcome, rank)].append(rank)
    everybody = len(alike) == 1
    parts = []
    for words, ranks in alike.items():
        seconds = [outcome.seconds(rank) for rank in ranks if rank in outcome.seen]
        when = f", {_span(seconds)}" if seconds else ""
        who = "" if everybody else f"{', '.join(map(str, ranks))}: "
        parts.append(f"{who}{words}{when}")
    return "; ".join(parts)


def _in_words(outcome: Outcome, rank: int) -> str:
    seen = outcome.seen.get(rank)
    if seen is None:
        code = outcome.exits.get(rank)
        return f"hangs (over {HANG_SECONDS:g} s)" if not code else f"ends with exit code {code}"
    if seen.error == "returned":
        return "returns" if seen.call == 0 else "returns, and so does its next call"
    return f"`{seen.error}`{_naming(seen)}{' in its next call' if seen.call else ''}"


def _naming(seen: Seen) -> str:
    named = f" naming {', '.join(map(str, seen.ranks))}" if seen.ranks else ""
    return named + ', "store: no answer"' * seen.is_store_silent


def _span(seconds: list[float]) -> str:
    low, high = f"{min(seconds):.1f}", f"{max(seconds):.1f}"
    return f"{low} s" if low == high else f"{low}–{high} s"


def replaced(page: str, written: str) -> str:
    """Return a page with the table between its markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{written}\n{END}{after}"


def listed(page: str) -> list[tuple[str, str, str]]:
    """Return the rows of a page's table: title, operation, and whether torch's is there, too."""
    written = page.partition(BEGIN)[2].partition(END)[0]
    return [(name, call, "torch" if torch else "") for name, call, _, torch in _cells(written)]


def planned() -> list[tuple[str, str, str]]:
    """Return the rows that a page's table must have."""
    return [
        (name, case.operation, "" if in_torch(case) is None else "torch")
        for name, cases in rows()
        for case in cases
    ]
