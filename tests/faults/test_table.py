"""The documentation's table has every declared fault in every operation."""

from tests.faults.__main__ import PAGE
from tests.faults.table import in_short, listed, planned


def test_the_page_lists_every_fault_and_every_operation() -> None:
    assert listed(PAGE.read_text()) == planned()


def test_the_page_begins_with_a_summary_of_its_tables() -> None:
    page = PAGE.read_text()
    assert in_short(page).strip() in page


def test_the_short_table_has_the_errors_of_waiting_ranks_and_the_range_of_seconds() -> None:
    tables = (
        "## Rank 1: killed, in the payload\n\n| operation | objcomm | torch |\n|---|---|---|\n"
        "| gather | `TransportError` naming 1, 0.3–0.5 s | hangs (over 60 s) |\n"
        "| send | 0: `TransportError` naming 1, 0.1 s; 1: `KeyboardInterrupt`, 0.0 s; "
        "2: returns, 7.0 s |  |\n"
    )
    assert in_short(tables).splitlines()[-1] == (
        "| [Rank 1: killed, in the payload](#rank-1-killed-in-the-payload) "
        "| `TransportError`, 0.1–0.5 s | hangs (over 60 s) |"
    )
