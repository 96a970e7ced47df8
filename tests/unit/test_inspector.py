"""`python -m objcomm inspect` on dumps that are made up: what it reads, matches, says and draws."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from objcomm.__main__ import inspect, main
from objcomm.errors import UsageError
from objcomm.inspector.clocks import corrected, estimate
from objcomm.inspector.dumps import Dump, parse, read
from objcomm.inspector.rows import Absence, match
from objcomm.inspector.trace import trace
from objcomm.inspector.words import ranks_text

Raw = dict[str, Any]

_ROOT = Path(__file__).parents[2]

# Any time will do; a large one shows where precision is lost.
T0 = 1_790_000_000.0


def entry(sequence: int, operation: str = "all_gather", **fields: Any) -> Raw:
    """One call that began `sequence` seconds after T0 and took 2 ms."""
    return {
        "operation": operation,
        "sequence": sequence,
        "mesh": 77,
        "lane": 0,
        "lane_name": "",
        "root": -1,
        "fingerprint": 0,
        "codec": "pickle",
        "call_site": "/job/src/train.py:10",
        "began": T0 + sequence,
        "ms": 2.0,
        "sent_nbytes": 300,
        "received_nbytes": 400,
        "outcome": "returned",
        "awaits": -1,
    } | fields


def group(
    *entries: Raw, ranks: Sequence[int] = (0, 1, 2), name: str = "0", **fields: object
) -> Raw:
    """One group of a dump."""
    told = {"name": name, "description": "", "ranks": list(ranks), "length": 256}
    return told | {"entries": list(entries)} | fields


def raw_dump(rank: int, *groups: Raw, **fields: object) -> Raw:
    """A dump of three ranks' job, taken a hundred seconds after T0."""
    return {
        "objcomm_dump": 1,
        "rank": rank,
        "world_size": 3,
        "host": "node-a",
        "pid": 1000 + rank,
        "at": T0 + 100,
        "is_whole": True,
        "error": None,
        "groups": list(groups),
    } | fields


def dump(rank: int, *groups: Raw, **fields: object) -> Dump:
    """The same, as it is read."""
    return parse(json.dumps(raw_dump(rank, *groups, **fields)), f"rank{rank}.json")


def alike(*entries: Raw) -> list[Dump]:
    """Three ranks that made the same calls."""
    return [dump(rank, group(*entries)) for rank in range(3)]


def said(dumps: Sequence[Dump], last: int = 20) -> str:
    """The report's last sentence."""
    return inspect(dumps, last).splitlines()[-1]


def test_ranks_that_made_the_same_calls_do_not_part() -> None:
    late = [entry(0), entry(1), entry(2, "barrier")]
    dumps = [*alike(*late)[:2], dump(2, group(*late[:2], entry(2, "barrier", began=T0 + 5.1)))]
    assert said(dumps).startswith("The ranks do not part: 3 calls match.")
    assert "call 2" in said(dumps)
    assert "rank 2 came last, 3.10 s after the first" in said(dumps)
    assert ">" not in inspect(dumps, 20)


def test_a_rank_that_never_made_a_call_is_named_with_its_last_one() -> None:
    lost = entry(17, "all_gather", outcome="TransportTimeout", ms=900.0)
    before = entry(16, "barrier", call_site="/job/src/train.py:88", began=T0 + 13.898)
    dumps = [dump(0, group(before, lost)), dump(1, group(before, lost)), dump(2, group(before))]
    told = said(dumps)
    assert "rank 2 never made call 17 (all_gather at train.py:10 on ranks 0-1)" in told
    assert "its last was barrier (call 16) at train.py:88, over 3.10 s before the others" in told


def test_other_operations_are_told_with_their_ranks_and_places() -> None:
    dumps = alike(entry(0), entry(1, "barrier"))
    dumps[1] = dump(1, group(entry(0), entry(1, "broadcast", root=2, call_site="/job/lib/b.py:7")))
    told = said(dumps)
    assert "the ranks part in call 1" in told
    assert "ranks 0, 2 made barrier at src/train.py:10" in told
    assert "rank 1 made broadcast with root 2 at lib/b.py:7" in told
    assert "The last that all made: all_gather at src/train.py:10 (call 0)" in told


@pytest.mark.parametrize("field", ["root", "fingerprint"])
def test_roots_and_names_part_ranks_too(field: str) -> None:
    dumps = alike(entry(0))
    dumps[2] = dump(2, group(entry(0) | {field: 1}))
    assert "the ranks part in call 0" in said(dumps)
    assert ("[00000001]" in said(dumps)) == (field == "fingerprint")


def test_why_a_rank_wrote_its_dump_is_told_in_short() -> None:
    error = {"type": "TransportTimeout", "text": "barrier: rank 2 is late; rank 0 is in barrier"}
    dumps = [dump(rank, group(entry(0)), error=error) for rank in range(3)]
    assert "\nranks 0-2 wrote on TransportTimeout: barrier: rank 2 is late\n" in inspect(dumps, 20)


def test_the_first_parting_is_told_and_not_what_follows_from_it() -> None:
    desync: Raw = {"outcome": "DesyncError"}
    ours = group(entry(0), entry(1, "barrier", **desync), entry(0, mesh=78, began=T0 + 9))
    theirs = group(entry(0), entry(1, **desync), entry(0, "scatter", mesh=78, began=T0 + 9))
    dumps = [dump(0, ours), dump(1, theirs), dump(2, theirs)]
    assert "the ranks part in call 1" in said(dumps)
    marked = [line for line in inspect(dumps, 20).splitlines() if line.startswith(">")]
    assert len(marked) == 4


def test_what_a_ring_has_forgotten_was_not_left_out() -> None:
    dumps = [
        dump(0, group(*(entry(at) for at in range(10)))),
        dump(1, group(*(entry(at) for at in range(6, 10)), length=4)),
        dump(2, group(entry(9, mesh=78), length=1)),
    ]
    by_sequence = {row.key.sequence: row for row in match(dumps) if row.key.mesh == 77}
    assert by_sequence[5].absent == {1: Absence.FORGOTTEN, 2: Absence.FORGOTTEN}
    assert by_sequence[6].absent == {2: Absence.FORGOTTEN}
    assert all(row.parting is None for row in by_sequence.values())


def test_a_dump_that_was_taken_before_says_nothing_of_later_calls() -> None:
    dumps = alike(entry(0), entry(1))
    dumps[1] = dump(1, group(entry(0)), at=T0 + 0.5)
    assert "do not part" in said(dumps)
    assert "had not come to it when its dump was taken" in inspect(dumps, 20)


def test_a_rank_without_a_dump_is_where_to_look() -> None:
    lost = entry(1, "barrier", outcome="TransportError")
    dumps = [dump(rank, group(entry(0), lost)) for rank in (0, 2)]
    assert "TransportError on ranks 0, 2; there is no dump of rank 1" in said(dumps)
    assert "no dump of rank 1" in inspect(dumps, 20).splitlines()


def test_a_dump_of_another_group_says_nothing_of_this_one() -> None:
    dumps = alike(entry(0))
    dumps[2] = dump(2, is_whole=False)
    assert match(dumps)[0].absent == {2: Absence.NO_DUMP}


def test_who_waits_for_whom_is_told_of_calls_under_way() -> None:
    waits: Raw = {"outcome": "under way", "ms": None}
    dumps = [
        dump(0, group(entry(0, "gather", root=0, awaits=2, **waits))),
        dump(1, group(entry(0, "gather", root=0))),
        dump(2, group(entry(0, "gather", root=0, began=T0 + 3, **waits))),
    ]
    assert "under way on ranks 0, 2; rank 2 was waited for; rank 2 came last" in said(dumps)


def test_a_rank_that_did_not_come_to_the_first_use_is_named() -> None:
    lost = entry(-1, "broadcast", mesh=0, outcome="TransportTimeout", began=T0)
    dumps = [dump(0, group(lost)), dump(1, group(lost)), dump(2)]
    assert "rank 2 never came to the first use (broadcast at train.py:10" in said(dumps)


def test_whose_lane_made_the_ranks_meet_does_not_matter() -> None:
    met = entry(-1, began=T0)
    dumps = [
        dump(0, group(met, entry(0), entry(0, lane=5, lane_name="eval"))),
        dump(1, group(met | {"lane": 5, "lane_name": "eval"}, entry(0), entry(0, lane=5))),
        dump(2, group(entry(0), entry(0, lane=5, lane_name="eval"))),
    ]
    assert "do not part: 2 calls match" in said(dumps)


def test_lanes_groups_and_meshes_are_kept_apart() -> None:
    lane: Raw = {"lane": 5, "lane_name": "eval"}
    pair = group(entry(0, mesh=3), ranks=(0, 2), name="7", description="mesh_dp")
    calls = [entry(0), entry(0, began=T0 + 2, **lane), entry(0, mesh=78, began=T0 + 3)]
    dumps = [dump(rank, group(*calls), *[pair] * (rank != 1)) for rank in range(3)]
    assert len(match(dumps)) == 4
    titles = [line for line in inspect(dumps, 20).splitlines() if line.startswith("group")]
    assert titles == [
        "group '0' (ranks 0-2)",
        "group 'mesh_dp' (ranks 0, 2)",
        "group '0' (ranks 0-2), lane 'eval'",
    ]
    assert "do not part: 4 calls" in said(dumps)


# Messages from one rank to another, which no third rank is part of.


def message(sequence: int, operation: str, peer: int, **fields: Any) -> Raw:
    """One rank's part in a message to or from ``peer``, over the connection of the two."""
    return entry(sequence, operation, root=peer, **{"mesh": 90, **fields})


@pytest.mark.parametrize("what", ["", "_object_list"])
def test_messages_are_matched_by_pair_and_direction(what: str) -> None:
    send, recv = f"send{what}", f"recv{what}"
    dumps = [
        dump(0, group(entry(0), message(0, send, 1), message(0, recv, 1), entry(1))),
        dump(1, group(entry(0), message(0, send, 0), message(0, recv, 0), entry(1))),
        dump(2, group(entry(0), message(0, send, 2, mesh=0), entry(1))),
    ]
    assert "do not part: 4 calls match" in said(dumps)
    told = inspect(dumps, 20)
    assert ">" not in told
    for words in (
        f"message 0  rank 0     {send} to 1",
        f"rank 0     {recv} from 1",
        f"{send} to 2",
    ):
        assert words in told
    pairs = {row.key.pair: sorted(row.calls) for row in match(dumps) if row.key.pair}
    assert pairs == {(0, 1): [0, 1], (1, 0): [0, 1], (2, 2): [2]}


def test_a_message_that_nobody_took_parts_no_ranks() -> None:
    dumps = alike(entry(0))
    dumps[0] = dump(0, group(entry(0), message(3, "send", 1)))
    assert "do not part" in said(dumps)
    assert "rank 1     has not taken it" in inspect(dumps, 20)


def test_a_receive_that_waited_in_vain_tells_where_the_other_rank_was() -> None:
    lost = message(0, "recv", 1, mesh=0, outcome="TransportTimeout", ms=900.0, began=T0 + 9)
    sent = message(0, "send", 2, call_site="/job/src/train.py:44", began=T0 + 1)
    dumps = [dump(0, group(entry(0), lost)), dump(1, group(entry(0), sent))]
    dumps.append(dump(2, group(entry(0))))
    told = said(dumps)
    assert "the message did not end well: recv from 1 at train.py:10 on rank 0" in told
    assert (
        "rank 1 was waited for; its last was send to 2 (message 0) at train.py:44, over 8.00 s"
        in told
    )
    assert "rank 1     sent nothing that it takes" in inspect(dumps, 20)
    del dumps[1]
    assert "there is no dump of rank 1, so look there first" in said(dumps)


def test_a_receive_from_any_rank_misses_nobody() -> None:
    waits = message(0, "recv", -1, mesh=0, outcome="under way", ms=None)
    told = inspect([dump(0, group(waits)), dump(1), dump(2)], 20)
    assert "recv from any" in told
    assert "recv from any at train.py:10 on rank 0: under way." in told


def test_two_unserved_calls_of_two_ranks_are_not_one_message() -> None:
    waits: Raw = {"mesh": 0, "outcome": "under way", "ms": None}
    dumps = [
        dump(0, group(message(0, "recv", 1, **waits))),
        dump(1, group(message(0, "send", 0, **waits))),
    ]
    assert [len(row.calls) for row in match(dumps)] == [1, 1]


def test_a_rank_that_waits_in_a_message_is_told_so_where_a_collective_misses_it() -> None:
    lost: Raw = {"outcome": "TransportTimeout", "began": T0 + 9}
    waits = message(0, "recv", 1, mesh=0, outcome="under way", ms=None, began=T0 + 2)
    dumps = [dump(rank, group(entry(0), entry(1, **lost))) for rank in range(3)]
    dumps[2] = dump(2, group(entry(0), waits))
    told = said(dumps)
    assert "rank 2 never made call 1" in told
    assert "its last was recv from 1 (message) at train.py:10, under way since 7.00 s" in told


def test_two_ranks_that_meet_for_a_message_miss_no_third_one() -> None:
    lost = message(-1, "send", 1, mesh=0, outcome="TransportTimeout")
    dumps = [dump(0, group(lost)), dump(1), dump(2)]
    told = said(dumps)
    assert "the first use did not end well: send to 1" in told
    assert "rank 2" not in told


def test_messages_that_a_ring_has_forgotten_were_not_left_untaken() -> None:
    dumps = [dump(0, group(message(0, "send", 1))), dump(1, group(entry(7), length=1))]
    assert match(dumps)[0].absent == {1: Absence.FORGOTTEN}


def test_a_message_bounds_clocks_in_its_direction_only() -> None:
    """A small one leaves its sender before its receiver calls."""
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


def test_a_receive_of_two_dumps_is_told_as_the_later_one_saw_it(tmp_path: Path) -> None:
    before = message(0, "recv", 0, mesh=0, outcome="under way", ms=None, began=T0)
    after = message(3, "recv", 0, began=T0)
    for name, at, call in (("a", T0 + 1, before), ("b", T0 + 2, after)):
        raw = raw_dump(1, group(call), at=at)
        (tmp_path / f"objcomm-{name}.json").write_text(json.dumps(raw))
    ((found,),) = (each.groups for each in read([tmp_path]))
    assert [(call.sequence, call.outcome) for call in found.calls] == [(3, "returned")]


def test_only_the_last_calls_are_shown_and_what_is_marked() -> None:
    dumps = alike(*(entry(at) for at in range(30)))
    dumps[0] = dump(
        0, group(*(entry(at, "barrier" if at == 3 else "all_gather") for at in range(30)))
    )
    report = inspect(dumps, 5)
    shown = [line for line in report.splitlines() if "call " in line[:12]]
    assert len(shown) == 6
    assert shown[0].startswith(">  call 3 ")
    assert "(24 earlier; --last 30 shows them)" in report


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


def test_several_dumps_of_one_process_are_one(tmp_path: Path) -> None:
    under_way = entry(1, outcome="under way", ms=None)
    for name, told in {
        "objcomm-rank0-1.json": raw_dump(0, group(entry(0), under_way), at=T0 + 1.5),
        "objcomm-rank0-2.json": raw_dump(
            0, group(under_way | {"outcome": "returned", "ms": 700.0})
        ),
        "objcomm-rank1-1.json": raw_dump(1, group(entry(0), entry(1))),
        "notes.json": {},
    }.items():
        (tmp_path / name).write_text(json.dumps(told))
    dumps = read([tmp_path])
    assert [each.rank for each in dumps] == [0, 1]
    assert [call.ms for call in dumps[0].groups[0].calls] == [2.0, 700.0]


def test_dumps_of_two_runs_are_refused(tmp_path: Path) -> None:
    for pid in (5, 6):
        (tmp_path / f"objcomm-rank0-{pid}.json").write_text(json.dumps(raw_dump(0, pid=pid)))
    with pytest.raises(UsageError, match="two processes that were rank 0"):
        read([tmp_path])


def _without(name: str) -> Callable[[Raw], object]:
    return lambda raw: raw.pop(name)


def _with(**fields: object) -> Callable[[Raw], object]:
    return lambda raw: raw.update(fields)


def _in_entry(**fields: object) -> Callable[[Raw], object]:
    return lambda raw: raw["groups"][0]["entries"][0].update(fields)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_without("objcomm_dump"), "no dump of objcomm.recorder"),
        (_with(objcomm_dump=9), "version 9"),
        (_without("host"), "host is missing"),
        (_with(rank="0"), "rank is wrong"),
        (_with(rank=True), "rank is wrong"),
        (_with(at=10**400), "at=.* is out of range"),
        (_with(groups=[1]), r"groups\[0\]: not an object"),
        (_with(error={"type": 1, "text": ""}), "error: type is wrong"),
        (_in_entry(began=None), r"groups\[0\]: entries\[0\]: began is wrong"),
        (_in_entry(ms=-1.0), "ms=-1.0"),
        (_in_entry(ms=None), "ms=None"),
        (_in_entry(call_site=7), "call_site is wrong"),
        (lambda raw: raw["groups"][0].update(ranks=[-1]), "-1 is no rank"),
        (lambda raw: raw["groups"][0].update(ranks=["a"]), "'a' is no rank"),
    ],
)
def test_a_damaged_dump_is_refused_with_its_place(
    damage: Callable[[Raw], object], told: str
) -> None:
    raw = raw_dump(0, group(entry(0)))
    damage(raw)
    with pytest.raises(UsageError, match=rf"^a\.json: .*{told}"):
        parse(json.dumps(raw), "a.json")


@pytest.mark.parametrize(
    "text", ["", "[", "NaN", '{"objcomm_dump": NaN}', "[" * 100_000, "[]", "1"]
)
def test_what_is_no_dump_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^a\.json: "):
        parse(text, "a.json")


def test_a_dump_cannot_move_the_readers_cursor() -> None:
    told = inspect(alike(entry(0, "\x1b[2Jall_gather\n", call_site="\x9b2K")), 20)
    assert "\x1b" not in told
    assert "\x9b" not in told


def test_ranks_are_listed_shortly() -> None:
    assert ranks_text([5]) == "rank 5"
    assert ranks_text([2, 0, 1, 7, 9, 8]) == "ranks 0-2, 7-9"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inspect", "missing.json"], "missing.json: No such file"),
        (["inspect", "."], "without any objcomm-"),
        (["inspect", "--last", "0", "x.json"], "--last must be at least 1"),
        (["inspect"], "required: FILE"),
        ([], "required: COMMAND"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(raw_dump(0, group(entry(0)))))
    with pytest.raises(SystemExit):
        main(["inspect", str(path), "--trace", str(tmp_path / "no" / "t.json")])
    assert "--trace" in capsys.readouterr().err


def test_the_command_prints_a_report_and_writes_a_trace(tmp_path: Path) -> None:
    for rank in range(3):
        calls = [entry(0), entry(1)][: 1 if rank == 1 else 2]
        (tmp_path / f"r{rank}.json").write_text(json.dumps(raw_dump(rank, group(*calls))))
    command = [sys.executable, "-m", "objcomm", "inspect", "--trace", str(tmp_path / "t.json")]
    done = subprocess.run(
        [*command, *(str(tmp_path / f"r{rank}.json") for rank in range(3))],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=_ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dumps of ranks 0-2, of 3 in all\n")
    assert "rank 1 never made call 1" in done.stdout
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
