"""One logger, quiet unless something is wrong; each record says which rank wrote it."""

import contextlib
import io
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import objcomm
from objcomm._failures import mesh
from objcomm.errors import DesyncError, TransportError
from tests.group.helpers import assert_group_works, error_in, exit_at_once, subgroup
from tests.group.logs import collected
from tests.ranks import ranks, solo
from tests.waits import PATIENCE_S
from tests.workers import here


def no_report() -> Any:
    """Log nothing when this rank waits for another in the first use of a group."""
    return mock.patch.object(mesh, "_REPORT_SECONDS", PATIENCE_S)


@ranks(3, disposable=True)
def test_a_program_that_configures_no_logging_sees_nothing() -> None:
    with no_report(), contextlib.redirect_stderr(io.StringIO()) as shown:
        assert_group_works()
        with subgroup(0, 1) as group:
            if here().rank < 2:
                assert_group_works(group)
        with pytest.raises(DesyncError):
            objcomm.barrier("a" if here().rank else "b")
    assert shown.getvalue() == ""


@ranks(3, disposable=True)
def test_records_have_rank_world_size_and_group() -> None:
    with no_report(), collected() as handler:
        assert_group_works()
        with subgroup(1, 2) as group:
            if here().rank:
                assert_group_works(group)
    for record in handler.records:
        assert (record.name, record.levelno) == ("objcomm", logging.DEBUG)
        assert (vars(record)["rank"], vars(record)["world_size"]) == (here().rank, 3)
    world, *others = [each for each in handler.records if "connected" in each.msg]
    assert "3 ranks connected over Unix sockets, on 1 host(s)" in world.getMessage()
    assert world.module == "mesh"
    assert len(others) == (here().rank > 0)
    for record in others:
        assert "2 ranks connected over Unix sockets" in record.getMessage()
        assert vars(record)["group"] not in ("", vars(world)["group"])


@ranks(2)
def test_the_end_of_connections_is_logged_with_its_consequence() -> None:
    objcomm.barrier()
    with collected(logging.INFO) as handler:
        with pytest.raises(DesyncError):
            objcomm.barrier("a" if here().rank else "b")
        assert_group_works()
    (text,) = handler.texts(logging.INFO)
    assert "its connections were closed, and its next call opens new ones: DesyncError" in text


@ranks(2, expect_dead=(1,))
def test_a_broken_group_is_logged_as_such() -> None:
    objcomm.barrier()
    if here().rank == 1:
        exit_at_once()
    with collected(logging.INFO) as handler, pytest.raises(TransportError):
        objcomm.barrier()
    (text,) = handler.texts(logging.INFO)
    assert "its connections were closed, for good: TransportError" in text
    assert "rank 1" in text


@ranks(2)
def test_a_written_record_is_logged(tmp_path: Path) -> None:
    objcomm.barrier()
    folder = tmp_path / "records"
    with collected(logging.INFO) as handler, objcomm.configure(record_folder=folder):
        error = error_in(DesyncError, lambda: objcomm.barrier("a" if here().rank else "b"))
    assert any(error.recorded in text for text in handler.texts(logging.INFO))


@ranks(2)
def test_split_logs_what_it_makes() -> None:
    with collected() as handler:
        objcomm.split(0)
    (text,) = [each for each in handler.told if each.startswith("split makes")]
    assert text.endswith("of ranks [0, 1]")


@ranks(2)
def test_a_filter_that_raises_harms_no_call() -> None:
    asked: list[str] = []

    def refuse(record: logging.LogRecord) -> bool:
        asked.append(record.getMessage())
        raise LookupError("a fault of the program's")

    with collected() as handler, subgroup(0, 1) as group:
        logging.getLogger("objcomm").addFilter(refuse)
        try:
            assert_group_works(group)
        finally:
            logging.getLogger("objcomm").removeFilter(refuse)
    assert any("2 ranks connected" in text for text in asked)
    of_group = [each for each in handler.records if vars(each).get("group") == group.group_name]
    assert not any("connected" in each.msg for each in of_group)


@solo()
def test_without_other_ranks_records_are_of_rank_0_of_1() -> None:
    with collected() as handler:
        objcomm.init()
    (record,) = handler.records
    assert record.levelno == logging.INFO
    assert (vars(record)["rank"], vars(record)["world_size"], vars(record)["group"]) == (0, 1, "")
