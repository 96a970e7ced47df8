"""The documentation's table has every fault that is declared, in every operation."""

from tests.faults.__main__ import PAGE
from tests.faults.table import listed, planned


def test_the_page_lists_every_fault_and_every_operation() -> None:
    assert listed(PAGE.read_text()) == planned()
