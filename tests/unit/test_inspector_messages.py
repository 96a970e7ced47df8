"""What the inspector says about messages between two ranks, in which no third rank takes part."""

import json
from pathlib import Path
from typing import Any

import pytest

from objcomm._observe.inspect.command import inspect
from objcomm._observe.inspect.dumps import read
from objcomm._observe.inspect.rows import Absence, estimate, match
from tests.unit.dumps import T0, Raw, alike, dump, entry, group, raw_dump, said


def message(sequence: int, operation: str, peer: int, **fields: Any) -> Raw:
    """One rank's side of a message to or from ``peer``, over the connection of the two."""
    return entry(sequence, operation, root=peer, **{"mesh": 90, **fields})


@pytest.mark.parametrize(
    ("send", "recv"),
    [
        ("send", "recv"),
        ("ssend", "recv"),
        ("issend", "recv"),
        ("send_object_list", "recv_object_list"),
    ],
)
def test_messages_are_matched_by_pair_and_direction(send: str, recv: str) -> None:
    dumps = [
        dump(0, group(entry(0), message(0, send, 1), message(0, recv, 1), entry(1))),
        dump(1, group(entry(0), message(0, send, 0), message(0, recv, 0), entry(1))),
        dump(2, group(entry(0), message(0, send, 2, mesh=0), entry(1))),
    ]
    assert "do not diverge: 4 calls match" in said(dumps)
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
    assert "do not diverge" in said(dumps)
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


@pytest.mark.parametrize("name", ["probe", "mprobe"])
def test_a_probe_that_found_a_message_misses_no_sender(name: str) -> None:
    found = message(0, name, 1, mesh=0, began=T0 + 9)
    lost = message(0, name, 1, mesh=0, outcome="TransportTimeout", began=T0 + 9)
    told = [
        inspect([dump(0, group(entry(0), each)), dump(1, group(entry(0)))], 20)
        for each in (found, lost)
    ]
    assert ["sent nothing that it takes" in each for each in told] == [False, True]


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


def test_a_rank_that_was_to_remember_no_calls_has_forgotten_its_part() -> None:
    dumps = [dump(0, group(message(0, "send", 1))), dump(1, group(length=0))]
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


def test_a_receive_of_two_dumps_is_told_as_the_later_one_saw_it(tmp_path: Path) -> None:
    before = message(0, "recv", 0, mesh=0, outcome="under way", ms=None, began=T0)
    after = message(3, "recv", 0, began=T0)
    for name, at, call in (("a", T0 + 1, before), ("b", T0 + 2, after)):
        raw = raw_dump(1, group(call), at=at)
        (tmp_path / f"objcomm-{name}.json").write_text(json.dumps(raw))
    ((found,),) = (each.groups for each in read([tmp_path]))
    assert [(call.sequence, call.outcome) for call in found.calls] == [(3, "returned")]
