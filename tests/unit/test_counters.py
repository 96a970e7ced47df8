"""What is counted of an operation's calls: the sum of all, and nothing of others."""

import dataclasses

from objcomm.observe.history import Counters, OperationStats


def test_figures_of_all_calls_are_added_up() -> None:
    counters = Counters()
    for times in (1, 10):
        counters.add(
            "gather",
            exchanges=times,
            sent_nbytes=2 * times,
            received_nbytes=3 * times,
            seconds=0.5 * times,
        )
    counters.add("barrier", exchanges=1, sent_nbytes=0, received_nbytes=0, seconds=0.0)
    assert counters.snapshot() == {
        "gather": OperationStats(2, 11, 22, 33, 5.5),
        "barrier": OperationStats(1, 1, 0, 0, 0.0),
    }
    assert all(type(each) is int for each in dataclasses.astuple(counters.snapshot()["gather"])[:4])
    counters.clear()
    assert not counters.snapshot()
