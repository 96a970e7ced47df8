"""What is counted of an operation's calls: the sum over all of them, and nothing from others."""

import dataclasses

from objcomm._observe.history import CallRecord, Counters, History, OperationStats
from objcomm._wire.header import Header


def test_figures_of_all_calls_are_added_up() -> None:
    counters = Counters()
    for times in (1, 10):
        counters.add("gather", (times, 2 * times, 3 * times), 0.5 * times)
    counters.add("barrier", (1, 0, 0), 0.0)
    assert counters.snapshot() == {
        "gather": OperationStats(2, 11, 22, 33, 5.5),
        "barrier": OperationStats(1, 1, 0, 0, 0.0),
    }
    assert all(type(each) is int for each in dataclasses.astuple(counters.snapshot()["gather"])[:4])
    counters.clear()
    assert not counters.snapshot()


def test_calls_are_listed_in_their_order_whatever_the_clock_says() -> None:
    """The clock may be set back, or be read late on a busy machine."""
    history = History()
    for sequence, began in enumerate([10.0, 12.0, 11.9, 13.0]):
        history.add(_call(sequence, began))
    history.add_meeting(_call(-1, 9.0))
    history.add_meeting(_call(-2, 12.5))
    assert [each["sequence"] for each in history.plain()] == [-1, 0, 1, 2, -2, 3]


def _call(sequence: int, began: float) -> CallRecord:
    record = CallRecord(Header(sequence=sequence), "barrier")
    record.began = began
    return record
