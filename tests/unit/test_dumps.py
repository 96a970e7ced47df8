"""Which dumps the inspector reads, and its command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from objcomm.__main__ import main
from objcomm._observe.inspect.dumps import parse, read
from objcomm.errors import UsageError
from tests.unit.dumps import T0, Raw, entry, group, raw_dump


def test_several_dumps_of_one_process_are_merged(tmp_path: Path) -> None:
    under_way = entry(1, outcome="under way", ms=None)
    returned = under_way | {"outcome": "returned", "ms": 700.0}
    for name, content in {
        "objcomm-rank0-1.json": raw_dump(0, group(entry(0), under_way), at=T0 + 1.5),
        "objcomm-rank0-2.json": raw_dump(0, group(returned)),
        "objcomm-rank1-1.json": raw_dump(1, group(entry(0), entry(1))),
        "notes.json": {},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    dumps = read([tmp_path])
    assert [each.rank for each in dumps] == [0, 1]
    assert [call.ms for call in dumps[0].groups[0].calls] == [2.0, 700.0]


def test_a_receive_in_two_dumps_is_shown_as_in_the_later_one(tmp_path: Path) -> None:
    before = entry(0, "recv", root=0, mesh=0, outcome="under way", ms=None, began=T0)
    after = entry(3, "recv", root=0, mesh=90, began=T0)
    for at, call in enumerate((before, after)):
        raw = raw_dump(1, group(call), at=T0 + 1 + at)
        (tmp_path / f"objcomm-{at}.json").write_text(json.dumps(raw))
    ((found,),) = (each.groups for each in read([tmp_path]))
    assert [(call.sequence, call.outcome) for call in found.calls] == [(3, "returned")]


def test_dumps_of_two_runs_are_refused(tmp_path: Path) -> None:
    for pid in (5, 6):
        (tmp_path / f"objcomm-rank0-{pid}.json").write_text(json.dumps(raw_dump(0, pid=pid)))
    with pytest.raises(UsageError, match="two processes that were rank 0"):
        read([tmp_path])


def _with(**fields: object) -> Callable[[Raw], object]:
    return lambda raw: raw.update(fields)


def _in_group(**fields: object) -> Callable[[Raw], object]:
    return lambda raw: raw["groups"][0].update(fields)


def _in_entry(**fields: object) -> Callable[[Raw], object]:
    return lambda raw: raw["groups"][0]["entries"][0].update(fields)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda raw: raw.pop("objcomm_dump"), "not a dump of objcomm.recorder"),
        (_with(objcomm_dump=9), "version 9"),
        (lambda raw: raw.pop("host"), "host is missing"),
        (_with(rank="0"), "rank is wrong"),
        (_with(rank=True), "rank is wrong"),
        (_with(at=10**400), "at=.* is out of range"),
        (_with(groups=[1]), r"groups\[0\]: not an object"),
        (_with(error={"type": 1, "text": ""}), "error: type is wrong"),
        (_in_entry(began=None), r"groups\[0\]: entries\[0\]: began is wrong"),
        (_in_entry(ms=-1.0), "ms=-1.0"),
        (_in_entry(ms=None), "ms=None"),
        (_in_entry(call_site=7), "call_site is wrong"),
        (_in_group(ranks=[-1]), "-1 is not a rank"),
        (_in_group(ranks=["a"]), "'a' is not a rank"),
        (_with(world_size=0), "world_size=0 is out of range"),
        (_with(world_size=1 << 40), "world_size=1099511627776 is out of range"),
        (
            _in_group(ranks=list(range(10_001)), entries=[entry(0)] * 1000),
            "10001000 ranks in all its calls are too many to compare",
        ),
    ],
)
def test_a_damaged_dump_is_refused(damage: Callable[[Raw], object], reason: str) -> None:
    raw = raw_dump(0, group(entry(0)))
    damage(raw)
    with pytest.raises(UsageError, match=rf"^a\.json: .*{reason}"):
        parse(json.dumps(raw), "a.json")


@pytest.mark.parametrize(
    "text", ["", "[", "NaN", '{"objcomm_dump": NaN}', "[" * 100_000, "[]", "1"]
)
def test_a_file_that_is_not_a_dump_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^a\.json: "):
        parse(text, "a.json")


@pytest.mark.parametrize(
    ("arguments", "reason"),
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
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


def test_an_unwritable_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(raw_dump(0, group(entry(0)))))
    with pytest.raises(SystemExit):
        main(["inspect", str(path), "--trace", str(tmp_path / "no" / "t.json")])
    assert "--trace" in capsys.readouterr().err


def test_the_command_prints_a_report_and_writes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        calls = [entry(0), entry(1)][: 1 if rank == 1 else 2]
        (tmp_path / f"r{rank}.json").write_text(json.dumps(raw_dump(rank, group(*calls))))
    trace = str(tmp_path / "t.json")
    assert main(["inspect", "--trace", trace, *(str(path) for path in tmp_path.iterdir())]) == 0
    report = capsys.readouterr().out
    assert report.startswith("dumps of ranks 0-2, of 3 in all\n")
    assert "rank 1 never made call 1" in report
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
