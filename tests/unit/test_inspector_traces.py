"""How the inspector aligns the ranks' clocks, and the traces that it draws."""

import json
from collections import defaultdict

import pytest

from objcomm._observe.inspect.command import inspect
from objcomm._observe.inspect.rows import corrected, estimate, match
from objcomm._observe.inspect.trace import trace
from tests.unit.dumps import T0, Raw, alike, dump, entry, group


@pytest.mark.parametrize("ahead", [0.0, 2.5, -40.0])
def test_clocks_of_two_hosts_are_brought_together(ahead: float) -> None:
    def shifted(at: int, began: float) -> Raw:
        return entry(at, "barrier", began=T0 + at + began + ahead, ms=4.0 - began * 1e3)

    dumps = [
        dump(0, group(*(entry(at, "barrier", ms=4.0) for at in range(5)))),
        dump(1, group(*(shifted(at, 0.003) for at in range(5))), host="node-b"),
        dump(2, group(*(shifted(at, 0.001) for at in range(5))), host="node-b"),
    ]
    clocks = estimate(match(dumps), dumps)
    assert clocks["node-a"].ahead_seconds == 0
    assert abs(clocks["node-b"].ahead_seconds - ahead) <= clocks["node-b"].margin_seconds < 0.003
    assert clocks["node-b"].count == 5
    assert all(row.skew_seconds < 0.006 for row in match(corrected(dumps, clocks)))
    report = inspect(dumps, 20)
    word = "agrees with" if not ahead else "ahead of" if ahead > 0 else "behind"
    assert f"{word} 'node-a'" in report.replace("'s,", "',")


@pytest.mark.parametrize(
    ("operation", "count_bounds"),
    [("broadcast", 1), ("gather", 1), ("gather_object", 1), ("barrier", 2)],
)
def test_one_way_calls_bound_a_clock_from_one_side_only(operation: str, count_bounds: int) -> None:
    dumps = alike(entry(0, operation, root=-1 if operation == "barrier" else 0))
    dumps[1] = dump(
        1, group(*[entry(0, operation, root=dumps[0].groups[0].calls[0].root)]), host="b"
    )
    (clock,) = [clock for host, clock in estimate(match(dumps), dumps).items() if host == "b"]
    assert (clock.margin_seconds < 1) == (count_bounds == 2)


def test_a_host_that_shares_no_call_is_taken_as_it_is() -> None:
    dumps = [dump(0, group(entry(0), ranks=[0])), dump(1, group(entry(0), ranks=[1]), host="b")]
    assert "host 'b': no calls compare its clock" in inspect(dumps, 20)


def test_a_trace_has_what_perfetto_needs() -> None:
    under_way = entry(2, "barrier", outcome="under way", ms=None)
    lane = entry(0, lane=5, lane_name="eval", began=T0 + 0.5)
    dumps = [
        dump(rank, group(entry(0, began=T0 + rank * 0.001, ms=2.5), entry(1), lane, under_way))
        for rank in range(3)
    ]
    rows = match(dumps)
    drawn = json.loads(json.dumps(trace(rows, dumps, estimate(rows, dumps)), allow_nan=False))
    events = drawn["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 12
    for event in slices:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert {"name", "cat", "pid", "tid", "args"} <= set(event)
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    assert {event["dur"] for event in slices if event["name"] == "barrier"} == {98e6}
    names = {(event["pid"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert (1, "rank 1 (node-a, pid 1001)") in names
    assert (2, "group '0' (ranks 0-2), lane 'eval'") in names


def test_arrows_lead_from_the_last_rank_to_those_that_waited() -> None:
    dumps = [dump(rank, group(entry(0, began=T0 + rank * 0.001, ms=5.0))) for rank in range(3)]
    rows = match(dumps)
    events = trace(rows, dumps, estimate(rows, dumps))["traceEvents"]
    arrows: dict[int, list[Raw]] = defaultdict(list)
    for event in events:
        if event["ph"] in {"s", "f"}:
            arrows[event["id"]].append(event)
    ends = [tuple(event["pid"] for event in pair) for pair in arrows.values()]
    assert sorted(ends) == [(2, 0), (2, 1)]
    for begin, end in arrows.values():
        assert (begin["ph"], end["ph"]) == ("s", "f")
        assert begin["ts"] <= end["ts"]
        assert {"name", "cat", "tid"} <= set(begin)


def test_slices_of_one_thread_never_overlap_in_part() -> None:
    calls = [entry(0, began=T0, ms=10.0), entry(1, began=T0 + 0.009), entry(2, began=T0 + 0.0095)]
    dumps = alike(*calls)
    rows = match(dumps)
    events = trace(rows, dumps, estimate(rows, dumps))["traceEvents"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 0]
    for begin, end in spans:
        for other_begin, other_end in spans:
            assert not begin < other_begin < end < other_end
