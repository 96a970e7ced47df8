"""Which dumps the inspector reads, and its command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from objcomm.__main__ import main
from objcomm._observe.inspect.dumps import parse, read
from objcomm.errors import UsageError
from tests.unit.dumps import T0, Raw, entry, group, raw_dump


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
        (_without("objcomm_dump"), "not a dump of objcomm.recorder"),
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
        (lambda raw: raw["groups"][0].update(ranks=[-1]), "-1 is not a rank"),
        (lambda raw: raw["groups"][0].update(ranks=["a"]), "'a' is not a rank"),
        (_with(world_size=0), "world_size=0 is out of range"),
        (_with(world_size=1 << 40), "world_size=1099511627776 is out of range"),
        (
            lambda raw: raw["groups"][0].update(
                ranks=list(range(10_001)), entries=raw["groups"][0]["entries"] * 1000
            ),
            "10001000 ranks in all its calls are too many to compare",
        ),
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


def test_the_command_prints_a_report_and_writes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        calls = [entry(0), entry(1)][: 1 if rank == 1 else 2]
        (tmp_path / f"r{rank}.json").write_text(json.dumps(raw_dump(rank, group(*calls))))
    trace = str(tmp_path / "t.json")
    assert main(["inspect", "--trace", trace, *(str(path) for path in tmp_path.iterdir())]) == 0
    told = capsys.readouterr().out
    assert told.startswith("dumps of ranks 0-2, of 3 in all\n")
    assert "rank 1 never made call 1" in told
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
