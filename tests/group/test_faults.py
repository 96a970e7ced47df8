"""Every fault of ``tests.faults`` on every operation: what each survivor sees, and what is left."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults.__main__ import BEGIN, END, GUIDE
from tests.faults.plan import FAULTS, LIMIT_S, OPERATIONS, VICTIM, WORLD_SIZE, cases
from tests.faults.run import Outcome, run_case

Case = tuple[str, str]

# Promised within 2 s, or 1 s of the limit; four cases at once on a loaded machine get more.
_SOON_S = 8.0
_AT_ONCE = 4


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[list[Outcome]]]]:
    """All selected cases, some at a time: most of each is waiting."""
    collected = {item.nodeid for item in request.session.items}
    selected = [
        case for case in cases() if any(f"[{' - '.join(case)}]" in each for each in collected)
    ]
    with ThreadPoolExecutor(_AT_ONCE) as executor:
        yield {case: executor.submit(run_case, *case) for case in selected}


@pytest.mark.parametrize("case", cases(), ids=" - ".join)
def test_every_survivor_raises_and_names_the_culprit(
    case: Case, running: dict[Case, Future[list[Outcome]]]
) -> None:
    about = FAULTS[case[0]]
    outcomes = running[case].result()
    survivors = [outcome for outcome in outcomes if outcome.rank != VICTIM]
    assert len(survivors) == WORLD_SIZE - 1
    for seen in survivors:
        assert seen.error in about.survivors_see, seen.text
        assert VICTIM in seen.named, seen.text
        assert f"rank {VICTIM}" in seen.text
        assert seen.seconds < _SOON_S + LIMIT_S * about.is_limited
        assert seen.left == ()
        if about.breaks:
            assert seen.later == "BrokenGroupError"
            assert seen.anew == "True"
        else:
            assert seen.later == "True", "the group works on"
    if not about.dies and not about.breaks:
        (victim,) = [outcome for outcome in outcomes if outcome.rank == VICTIM]
        assert victim.error in about.survivors_see
        assert victim.later == "True"


def test_the_guides_table_shows_every_case() -> None:
    shown = GUIDE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line.split(" | ")[:2] for line in shown.splitlines() if line.startswith("| ")][1:]
    expected = [[f"| {FAULTS[fault].text}", f"`{operation}`"] for fault, operation in cases()]
    assert rows == expected
    assert {operation for _, operation in cases()} == set(OPERATIONS)
