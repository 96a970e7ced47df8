"""What `python -m objcomm inspect` says about ranks' calls and messages, and what it draws."""

import itertools
import json
from collections import defaultdict
from typing import Any

import pytest

from objcomm._observe.inspect.command import inspect
from objcomm._observe.inspect.dumps import Dump
from objcomm._observe.inspect.rows import Absence, corrected, estimate, match
from objcomm._observe.inspect.trace import trace
from tests.unit.dumps import T0, Raw, alike, by_rank, dump, entry, group, said


def test_ranks_that_made_the_same_calls_do_not_diverge() -> None:
    calls = [entry(0), entry(1), entry(2, "barrier")]
    dumps = by_rank(calls, calls, [*calls[:2], entry(2, "barrier", began=T0 + 5.1)])
    assert said(dumps).startswith("The ranks do not diverge: 3 calls match.")
    assert "call 2" in said(dumps)
    assert "rank 2 came last, 3.10 s after the first" in said(dumps)
    assert ">" not in inspect(dumps, 20)


def test_a_rank_that_never_made_a_call_is_named_with_its_last_one() -> None:
    lost = entry(17, "all_gather", outcome="TransportTimeout", ms=900.0)
    before = entry(16, "barrier", call_site="/job/src/train.py:88", began=T0 + 13.898)
    line = said(by_rank([before, lost], [before, lost], [before]))
    assert "rank 2 never made call 17 (all_gather at train.py:10 on ranks 0-1)" in line
    assert "its last was barrier (call 16) at train.py:88, over 3.10 s before the others" in line


def test_different_operations_are_reported_with_their_ranks_and_places() -> None:
    most = [entry(0), entry(1, "barrier")]
    other = entry(1, "broadcast", root=2, call_site="/job/lib/b.py:7")
    line = said(by_rank(most, [entry(0), other], most))
    assert "the ranks diverge in call 1" in line
    assert "ranks 0, 2 made barrier at src/train.py:10" in line
    assert "rank 1 made broadcast with root 2 at lib/b.py:7" in line
    assert "The last that all made: all_gather at src/train.py:10 (call 0)" in line


@pytest.mark.parametrize("field", ["root", "fingerprint"])
def test_different_roots_or_names_are_reported(field: str) -> None:
    line = said(by_rank([entry(0)], [entry(0)], [entry(0) | {field: 1}]))
    assert "the ranks diverge in call 0" in line
    assert ("[00000001]" in line) == (field == "fingerprint")


def test_a_summary_says_why_ranks_wrote_their_dumps() -> None:
    error = {"type": "TransportTimeout", "text": "barrier: rank 2 is late; rank 0 is in barrier"}
    dumps = [dump(rank, group(entry(0)), error=error) for rank in range(3)]
    assert "\nranks 0-2 wrote on TransportTimeout: barrier: rank 2 is late\n" in inspect(dumps, 20)


def test_only_the_first_difference_is_reported() -> None:
    desync: Raw = {"outcome": "DesyncError"}
    ours = [entry(0), entry(1, "barrier", **desync), entry(0, mesh=78, began=T0 + 9)]
    theirs = [entry(0), entry(1, **desync), entry(0, "scatter", mesh=78, began=T0 + 9)]
    dumps = by_rank(ours, theirs, theirs)
    assert "the ranks diverge in call 1" in said(dumps)
    marked = [line for line in inspect(dumps, 20).splitlines() if line.startswith(">")]
    assert len(marked) == 4


def test_calls_that_a_recorder_has_forgotten_are_not_missing() -> None:
    dumps = [
        dump(0, group(*(entry(at) for at in range(10)))),
        dump(1, group(*(entry(at) for at in range(6, 10)), length=4)),
        dump(2, group(entry(9, mesh=78), length=1)),
    ]
    by_sequence = {row.key.sequence: row for row in match(dumps) if row.key.mesh == 77}
    assert by_sequence[5].absent == {1: Absence.FORGOTTEN, 2: Absence.FORGOTTEN}
    assert by_sequence[6].absent == {2: Absence.FORGOTTEN}
    assert all(row.parting is None for row in by_sequence.values())


def test_an_early_dump_says_nothing_about_later_calls() -> None:
    dumps = alike(entry(0), entry(1))
    dumps[1] = dump(1, group(entry(0)), at=T0 + 0.5)
    assert "do not diverge" in said(dumps)
    assert "had not reached it when its dump was taken" in inspect(dumps, 20)


def test_a_rank_without_a_dump_is_named_as_the_place_to_look() -> None:
    lost = entry(1, "barrier", outcome="TransportError")
    dumps = [dump(rank, group(entry(0), lost)) for rank in (0, 2)]
    assert "TransportError on ranks 0, 2; there is no dump of rank 1" in said(dumps)
    assert "no dump of rank 1" in inspect(dumps, 20).splitlines()


def test_a_dump_without_a_group_says_nothing_about_it() -> None:
    dumps = alike(entry(0))
    dumps[2] = dump(2, is_whole=False)
    assert match(dumps)[0].absent == {2: Absence.NO_DUMP}


def test_a_call_under_way_is_reported_with_the_rank_it_waits_for() -> None:
    waits: Raw = {"outcome": "under way", "ms": None}
    waiting = entry(0, "gather", root=0, awaits=2, **waits)
    late = entry(0, "gather", root=0, began=T0 + 3, **waits)
    line = said(by_rank([waiting], [entry(0, "gather", root=0)], [late]))
    assert "under way on ranks 0, 2; rank 2 was waited for; rank 2 came last" in line


def test_a_rank_that_did_not_come_to_the_first_use_is_named() -> None:
    lost = entry(-1, "broadcast", mesh=0, outcome="TransportTimeout", began=T0)
    dumps = [dump(0, group(lost)), dump(1, group(lost)), dump(2)]
    assert "rank 2 never came to the first use (broadcast at train.py:10" in said(dumps)


def test_it_does_not_matter_which_lane_made_the_ranks_connect() -> None:
    first, second = entry(0), entry(0, lane=5, lane_name="eval")
    met = entry(-1, began=T0)
    met_on_second = met | {"lane": 5, "lane_name": "eval"}
    dumps = by_rank([met, first, second], [met_on_second, first, entry(0, lane=5)], [first, second])
    assert "do not diverge: 2 calls match" in said(dumps)


def test_lanes_groups_and_meshes_are_kept_apart() -> None:
    on_lane = entry(0, began=T0 + 2, lane=5, lane_name="eval")
    pair = group(entry(0, mesh=3), ranks=(0, 2), name="7", description="mesh_dp")
    calls = [entry(0), on_lane, entry(0, mesh=78, began=T0 + 3)]
    dumps = [dump(rank, group(*calls), *[pair] * (rank != 1)) for rank in range(3)]
    assert len(match(dumps)) == 4
    titles = [line for line in inspect(dumps, 20).splitlines() if line.startswith("group")]
    assert titles == [
        "group '0' (ranks 0-2)",
        "group 'mesh_dp' (ranks 0, 2)",
        "group '0' (ranks 0-2), lane 'eval'",
    ]
    assert "do not diverge: 4 calls" in said(dumps)


def test_only_the_last_calls_and_marked_ones_are_shown() -> None:
    calls = [entry(at) for at in range(30)]
    report = inspect(by_rank([*calls[:3], entry(3, "barrier"), *calls[4:]], calls, calls), 5)
    shown = [line for line in report.splitlines() if "call " in line[:12]]
    assert len(shown) == 6
    assert shown[0].startswith(">  call 3 ")
    assert "(24 earlier; --last 30 shows them)" in report


def test_a_dump_cannot_move_the_readers_cursor() -> None:
    report = inspect(alike(entry(0, "\x1b[2Jall_gather\n", call_site="\x9b2K")), 20)
    assert not {"\x1b", "\x9b"} & {*report}


# Messages between two ranks, in which no third rank takes part.


def message(sequence: int, operation: str, peer: int, **fields: Any) -> Raw:
    """One rank's side of a message to or from ``peer``, over the connection of the two."""
    return entry(sequence, operation, root=peer, **{"mesh": 90, **fields})


@pytest.mark.parametrize("send", ["send", "ssend", "issend", "send_object_list"])
def test_messages_are_matched_by_pair_and_direction(send: str) -> None:
    recv = "recv_object_list" if send == "send_object_list" else "recv"
    dumps = by_rank(
        [entry(0), message(0, send, 1), message(0, recv, 1), entry(1)],
        [entry(0), message(0, send, 0), message(0, recv, 0), entry(1)],
        [entry(0), message(0, send, 2, mesh=0), entry(1)],
    )
    assert "do not diverge: 4 calls match" in said(dumps)
    report = inspect(dumps, 20)
    assert ">" not in report
    assert f"message 0  rank 0     {send} to 1" in report
    assert f"rank 0     {recv} from 1" in report
    assert f"{send} to 2" in report
    pairs = {row.key.pair: sorted(row.calls) for row in match(dumps) if row.key.pair}
    assert pairs == {(0, 1): [0, 1], (1, 0): [0, 1], (2, 2): [2]}


def test_a_message_that_no_rank_took_is_not_a_divergence() -> None:
    dumps = by_rank([entry(0), message(3, "send", 1)], [entry(0)], [entry(0)])
    assert "do not diverge" in said(dumps)
    assert "rank 1     has not taken it" in inspect(dumps, 20)


def test_a_receive_that_waited_in_vain_is_reported_with_the_place_of_the_other_rank() -> None:
    lost = message(0, "recv", 1, mesh=0, outcome="TransportTimeout", ms=900.0, began=T0 + 9)
    sent = message(0, "send", 2, call_site="/job/src/train.py:44", began=T0 + 1)
    dumps = by_rank([entry(0), lost], [entry(0), sent], [entry(0)])
    line = said(dumps)
    last = "its last was send to 2 (message 0) at train.py:44, over 8.00 s"
    assert "the message did not end well: recv from 1 at train.py:10 on rank 0" in line
    assert f"rank 1 was waited for; {last}" in line
    assert "rank 1     sent nothing that it takes" in inspect(dumps, 20)
    del dumps[1]
    assert "there is no dump of rank 1, so look there first" in said(dumps)


@pytest.mark.parametrize("name", ["probe", "mprobe"])
def test_a_probe_that_found_a_message_misses_no_sender(name: str) -> None:
    found = message(0, name, 1, mesh=0, began=T0 + 9)
    lost = message(0, name, 1, mesh=0, outcome="TransportTimeout", began=T0 + 9)
    reports = [inspect(by_rank([entry(0), each], [entry(0)]), 20) for each in (found, lost)]
    assert ["sent nothing that it takes" in each for each in reports] == [False, True]


def test_a_receive_from_any_rank_misses_no_rank() -> None:
    waits = message(0, "recv", -1, mesh=0, outcome="under way", ms=None)
    report = inspect([dump(0, group(waits)), dump(1), dump(2)], 20)
    assert "recv from any at train.py:10 on rank 0: under way." in report


def test_two_unserved_calls_of_two_ranks_are_not_one_message() -> None:
    waits: Raw = {"mesh": 0, "outcome": "under way", "ms": None}
    dumps = by_rank([message(0, "recv", 1, **waits)], [message(0, "send", 0, **waits)])
    assert [len(row.calls) for row in match(dumps)] == [1, 1]


def test_a_rank_that_misses_a_collective_because_it_waits_for_a_message_is_reported_so() -> None:
    lost = entry(1, outcome="TransportTimeout", began=T0 + 9)
    waits = message(0, "recv", 1, mesh=0, outcome="under way", ms=None, began=T0 + 2)
    line = said(by_rank([entry(0), lost], [entry(0), lost], [entry(0), waits]))
    assert "rank 2 never made call 1" in line
    assert "its last was recv from 1 (message) at train.py:10, under way since 7.00 s" in line


def test_two_ranks_that_connect_for_a_message_miss_no_third_one() -> None:
    lost = message(-1, "send", 1, mesh=0, outcome="TransportTimeout")
    line = said([dump(0, group(lost)), dump(1), dump(2)])
    assert "the first use did not end well: send to 1" in line
    assert "rank 2" not in line


@pytest.mark.parametrize(
    "forgetful", [group(entry(7), length=1), group(length=0)], ids=["few calls", "no calls"]
)
def test_messages_that_a_recorder_has_forgotten_are_not_missing(forgetful: Raw) -> None:
    dumps = [dump(0, group(message(0, "send", 1))), dump(1, forgetful)]
    assert match(dumps)[0].absent == {1: Absence.FORGOTTEN}
    assert inspect(dumps, 20)


def test_a_message_bounds_clocks_in_its_direction_only() -> None:
    """A small message leaves its sender before its receiver calls."""
    sent = message(0, "send", 1, began=T0, ms=1.0)
    taken = message(0, "recv", 0, began=T0 + 50, ms=1.0)
    dumps = [dump(0, group(sent)), dump(1, group(taken), host="node-b")]
    clock = estimate(match(dumps), dumps)["node-b"]
    assert clock.margin_seconds == float("inf")
    back = [message(0, "recv", 1, began=T0, ms=51_001.0), message(0, "send", 0, began=T0 + 50.9)]
    dumps = [dump(0, group(sent, back[0])), dump(1, group(taken, back[1]), host="node-b")]
    clock = estimate(match(dumps), dumps)["node-b"]
    assert not clock.ahead_seconds
    assert clock.margin_seconds < 30


# Clocks and traces.


@pytest.mark.parametrize("ahead", [0.0, 2.5, -40.0])
def test_clocks_of_two_hosts_are_aligned(ahead: float) -> None:
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
    relation = "agrees with" if not ahead else "ahead of" if ahead > 0 else "behind"
    assert f"{relation} 'node-a'" in report.replace("'s,", "',")


@pytest.mark.parametrize(
    ("operation", "count_bounds"),
    [("broadcast", 1), ("gather", 1), ("gather_object", 1), ("barrier", 2)],
)
def test_one_way_calls_bound_a_clock_from_one_side_only(operation: str, count_bounds: int) -> None:
    call = group(entry(0, operation, root=-1 if operation == "barrier" else 0))
    dumps = [dump(0, call), dump(1, call, host="b"), dump(2, call)]
    clock = estimate(match(dumps), dumps)["b"]
    assert (clock.margin_seconds < 1) == (count_bounds == 2)


def test_the_clock_of_a_host_that_shares_no_call_is_not_changed() -> None:
    dumps = [dump(0, group(entry(0), ranks=[0])), dump(1, group(entry(0), ranks=[1]), host="b")]
    assert "host 'b': no calls compare its clock" in inspect(dumps, 20)


def drawn(dumps: list[Dump]) -> list[Raw]:
    """Return the events of the trace of these dumps, as they are written."""
    rows = match(dumps)
    text = json.dumps(trace(rows, dumps, estimate(rows, dumps)), allow_nan=False)
    events: list[Raw] = json.loads(text)["traceEvents"]
    return events


def test_a_trace_has_what_perfetto_needs() -> None:
    under_way = entry(2, "barrier", outcome="under way", ms=None)
    lane = entry(0, lane=5, lane_name="eval", began=T0 + 0.5)
    first = [entry(0, began=T0 + rank * 0.001, ms=2.5) for rank in range(3)]
    events = drawn(by_rank(*([each, entry(1), lane, under_way] for each in first)))
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 12
    for event in slices:
        assert min(event["ts"], event["dur"]) >= 0
        assert {"name", "cat", "pid", "tid", "args"} <= set(event)
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    assert {event["dur"] for event in slices if event["name"] == "barrier"} == {98e6}
    names = {(event["pid"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert (1, "rank 1 (node-a, pid 1001)") in names
    assert (2, "group '0' (ranks 0-2), lane 'eval'") in names


def test_arrows_lead_from_the_last_rank_to_those_that_waited() -> None:
    calls = [entry(0, began=T0 + rank * 0.001, ms=5.0) for rank in range(3)]
    arrows: dict[int, list[Raw]] = defaultdict(list)
    for event in drawn(by_rank(*([call] for call in calls))):
        if event["ph"] in {"s", "f"}:
            arrows[event["id"]].append(event)
    assert sorted((begin["pid"], end["pid"]) for begin, end in arrows.values()) == [(2, 0), (2, 1)]
    for begin, end in arrows.values():
        assert (begin["ph"], end["ph"]) == ("s", "f")
        assert begin["ts"] <= end["ts"]
        assert {"name", "cat", "tid"} <= set(begin)


def test_slices_of_one_thread_never_overlap_in_part() -> None:
    calls = [entry(0, began=T0, ms=10.0), entry(1, began=T0 + 0.009), entry(2, began=T0 + 0.0095)]
    events = [each for each in drawn(alike(*calls)) if (each["ph"], each["pid"]) == ("X", 0)]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    for (begin, end), (other_begin, other_end) in itertools.product(spans, spans):
        assert not begin < other_begin < end < other_end
