"""How facts are transmitted, and how the report looks: text, JSON, picture and command line."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from objcomm.__main__ import main
from objcomm._bootstrap.doctor.facts import Contact, Link, Lookup, Measured, Report
from objcomm._bootstrap.doctor.findings import findings
from objcomm._bootstrap.doctor.report import draw, plain
from objcomm._bootstrap.doctor.report import report as text_of
from objcomm._transport.store import pack_record, unpack_record
from objcomm.errors import MissingDependencyError
from tests.doctor.job import by_command
from tests.doctor.made_up import evidence, measured, report


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (report(1, variables=(("NCCL_DEBUG", "INFO"),)), Report),
        ((Contact(1, "no answer"), Contact(2)), tuple[Contact, ...]),
        ((Lookup(0, 1, "::ffff:10.0.0.2", 5.0, 3),), tuple[Lookup, ...]),
        (Measured((Link(0, 1, 1e-4, 1e9),), "gone"), Measured),
        (True, bool),
    ],
)
def test_facts_come_back_as_they_were(facts: Any, kind: Any) -> None:
    assert unpack_record(pack_record(facts), kind, "facts") == facts


def test_control_characters_are_removed() -> None:
    variables = (("NCCL_DEBUG", "\x1b[2J"),)
    odd = replace(report(0, open_files=10, variables=variables), host="no\x1b[2Jde")
    text = text_of(evidence(odd, report(1)), findings(evidence(odd, report(1))))
    assert "\x1b" not in text
    assert "no [2Jde" in text


def test_the_findings_come_last_and_the_worst_of_them_in_the_last_line() -> None:
    whole = evidence(report(0), report(1, open_files=100), report(2))
    lines = text_of(whole, findings(whole)).splitlines()
    assert lines[0] == (
        "objcomm doctor: ranks 0-2 of 4 on 1 host, by the variables of torchrun, "
        "meeting at node0:29500"
    )
    assert lines[-1] == "1 error, 1 warning; first: missing-ranks, rank 3"
    at = lines.index("ERROR missing-ranks: rank 3: did not arrive within 30 s; ranks 0-2 did")
    assert lines[at + 1].startswith("  -> check that they were started")
    assert max(map(len, lines[at:])) <= 100


def test_a_healthy_job_is_reported_as_such() -> None:
    text = text_of(measured(evidence()), [])
    assert text.endswith("\nnothing found that would break or slow a job\n")
    assert "reachability" not in text
    hosts = [line for line in text.splitlines() if line.startswith("node")]
    assert [line.split()[:4] for line in hosts] == [
        ["node0", "0-1", "eth0", "10.0.0.1"],
        ["node1", "2-3", "eth0", "10.0.0.2"],
    ]
    assert ["1", "2000", "-", "1000", "1000"] in [line.split() for line in text.splitlines()]


def test_pairs_that_were_not_measured_are_counted() -> None:
    whole = measured(evidence())
    text = text_of(replace(whole, links=whole.links[:4]), [])
    assert text.count("4 pairs of ranks were skipped for lack of time") == 2


def test_a_large_world_is_summed_up() -> None:
    whole = evidence(*[report(rank, rank) for rank in range(20)])
    text = text_of(replace(measured(whole), world_size=20), [])
    assert "1000 to 1000, median 1000" in text
    assert "from \\ to" not in text


def test_json_has_all_but_the_tokens() -> None:
    whole = evidence(report(0), report(1))
    parsed = json.loads(plain(whole, findings(whole)))
    assert parsed["missing"] == [2, 3]
    assert parsed["findings"][0]["severity"] == "error"
    assert parsed["status"] == 1
    assert parsed["left_out"] == 6
    assert "token0" not in json.dumps(parsed)


def test_a_picture_of_the_links_is_written(tmp_path: Path) -> None:
    draw(measured(evidence()), tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install matplotlib$"):
        draw(evidence(), tmp_path / "links.png")


@pytest.mark.parametrize(
    "arguments", [["--timeout", "0"], ["--timeout", "nan"], ["--nproc", "0"], ["--what"]]
)
def test_wrong_arguments_end_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    # The exact text depends on how pytest was started.
    assert re.match(r"usage: (python -m )?objcomm ", capsys.readouterr().err)


def test_a_rank_starts_no_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--nproc", "2"])
    assert ended.value.code == 2
    assert "this is a rank already" in capsys.readouterr().err


def test_a_step_that_never_ends_is_ended() -> None:
    program = """
import threading
from objcomm._bootstrap.doctor import command
command.longest = lambda seconds: 0.5
command.examine = lambda environ: threading.Event().wait()
command.check(command.Options(1.0))
"""
    done = by_command([sys.executable, "-c", program])
    assert done.status == 1
    assert "Timeout (0:00:00.5" in done.err
    assert "in check" in done.err  # where it was
