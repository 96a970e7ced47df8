"""What `python -m objcomm inspect` says about ranks' calls: where they differ, who was missing."""

import pytest

from objcomm._observe.inspect.command import inspect
from objcomm._observe.inspect.rows import Absence, match
from tests.unit.dumps import T0, Raw, alike, dump, entry, group, said


def test_ranks_that_made_the_same_calls_do_not_part() -> None:
    late = [entry(0), entry(1), entry(2, "barrier")]
    dumps = [*alike(*late)[:2], dump(2, group(*late[:2], entry(2, "barrier", began=T0 + 5.1)))]
    assert said(dumps).startswith("The ranks do not diverge: 3 calls match.")
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
    assert "the ranks diverge in call 1" in told
    assert "ranks 0, 2 made barrier at src/train.py:10" in told
    assert "rank 1 made broadcast with root 2 at lib/b.py:7" in told
    assert "The last that all made: all_gather at src/train.py:10 (call 0)" in told


@pytest.mark.parametrize("field", ["root", "fingerprint"])
def test_roots_and_names_part_ranks_too(field: str) -> None:
    dumps = alike(entry(0))
    dumps[2] = dump(2, group(entry(0) | {field: 1}))
    assert "the ranks diverge in call 0" in said(dumps)
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
    assert "the ranks diverge in call 1" in said(dumps)
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
    assert "do not diverge" in said(dumps)
    assert "had not reached it when its dump was taken" in inspect(dumps, 20)


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
    assert "do not diverge: 2 calls match" in said(dumps)


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
    assert "do not diverge: 4 calls" in said(dumps)


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


def test_a_dump_cannot_move_the_readers_cursor() -> None:
    told = inspect(alike(entry(0, "\x1b[2Jall_gather\n", call_site="\x9b2K")), 20)
    assert "\x1b" not in told
    assert "\x9b" not in told
