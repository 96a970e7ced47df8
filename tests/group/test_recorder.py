"""The record of each rank's last calls, dumped on request and when ranks lose each other."""

import contextlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, DesyncError, ObjcommError, TransportError, TransportTimeout
from objcomm._observe import recorder
from objcomm._observe.inspect.command import inspect
from objcomm._observe.inspect.dumps import read
from tests.group.helpers import (
    assert_group_works,
    error_in,
    hear,
    in_thread,
    is_waiting,
    say,
    subgroup,
    tell_all,
)
from tests.group.watched import closely, patiently
from tests.ranks import ranks, solo
from tests.waits import wait_until
from tests.workers import here

Raw = dict[str, Any]

HERE = Path(__file__).name
# Long enough for ranks that start together to enter the call.
LIMIT_S = 0.5


def folder() -> Path:
    """Return the folder that all ranks of this test's own pool share."""
    return here().folder / "records"


def world_entries(dump: Raw) -> list[Raw]:
    """Return the recorded calls on the world's group, without the meeting."""
    (world,) = (each for each in dump["groups"] if each["description"] == "default_pg")
    return [each for each in world["entries"] if each["sequence"] >= 0]


def report() -> str:
    """Return what `inspect` reports about all ranks' files."""
    return inspect(read([folder()]), 20)


@ranks(1, 2, 3)
def test_a_dump_lists_the_last_calls() -> None:
    sent = bytes(10_000) if here().rank == 0 else None
    began = time.time()
    objcomm.broadcast(sent)
    most_ms = (time.time() - began) * 1000
    objcomm.gather(1, dst=here().world_size - 1, codec="msgpack")
    with pytest.raises(ObjcommError):
        objcomm.scatter([])
    dump = objcomm.recorder.dump()
    assert json.loads(json.dumps(dump)) == dump
    assert (dump["rank"], dump["world_size"]) == (here().rank, here().world_size)
    first, second, third = world_entries(dump)[-3:]
    expected = {"operation": "broadcast", "outcome": "returned", "codec": "pickle"}
    assert expected.items() <= first.items()
    assert began - 0.1 <= first["began"] <= second["began"] <= dump["at"]
    assert 0 < first["ms"] <= most_ms
    assert HERE in first["call_site"]
    if here().world_size > 1:
        moved = first["sent_nbytes" if here().rank == 0 else "received_nbytes"]
        assert moved > 10_000
    assert (second["root"], second["codec"]) == (here().world_size - 1, "msgpack")
    assert second["sequence"] == first["sequence"] + 1
    alone = here().world_size == 1  # no other rank receives the error about the list
    assert third["outcome"] == ("UsageError" if alone else "CollectiveError")
    assert_group_works()


@ranks(2, disposable=True)
def test_messages_are_recorded_by_both_ranks_and_compared() -> None:
    other = 1 - here().rank
    objcomm.barrier()
    if here().rank == 0:
        objcomm.send("small", 1, tag=3)
        objcomm.isend(bytes(100_000), 1).wait()
        objcomm.send("to myself", 0)
        objcomm.recv(0)
    else:
        objcomm.probe(0, tag=3)
        objcomm.recv(tag=None)
        objcomm.irecv(0).wait()
    objcomm.sendrecv("around", other, other)
    objcomm.barrier()
    folder().mkdir(exist_ok=True)
    objcomm.recorder.dump(folder() / f"objcomm-rank{here().rank}.json")
    entries = world_entries(objcomm.recorder.dump())
    messages = [each for each in entries if each["operation"] in {"send", "recv", "probe"}]
    wanted = ["send", "send", "send", "recv"] if here().rank == 0 else ["probe", "recv", "recv"]
    assert [each["operation"] for each in messages] == [*wanted, "send", "recv"]
    # For the receive from any rank, the root is the sender.
    assert [each["root"] for each in messages[:3]] == ([1, 1, 0] if here().rank == 0 else [0] * 3)
    assert max(each["sent_nbytes"] + each["received_nbytes"] for each in messages) > 100_000
    dist.barrier()
    text = report()
    assert "The ranks do not diverge" in text
    assert ">" not in text
    assert "message 1" in text


@ranks(2)
def test_only_the_last_256_calls_are_kept() -> None:
    for at in range(300):
        objcomm.barrier(f"{at}")
    entries = world_entries(objcomm.recorder.dump())
    assert len(entries) == 256
    assert entries[-1]["sequence"] - entries[0]["sequence"] == 255


@ranks(3)
def test_one_group_can_be_dumped_alone_and_in_global_ranks() -> None:
    objcomm.barrier()
    with subgroup(1, 2) as pair:
        if here().rank == 0:
            with pytest.raises(objcomm.NotInGroupError):
                objcomm.recorder.dump(group=pair)
        else:
            objcomm.all_gather("x", group=pair)
            (found,) = objcomm.recorder.dump(group=pair)["groups"]
            assert (found["ranks"], found["rank"], found["size"]) == ([1, 2], here().rank - 1, 2)
            assert [each["operation"] for each in found["entries"]][-1] == "all_gather"


@ranks(2)
def test_a_call_under_way_and_its_lane_are_recorded(tmp_path: Path) -> None:
    objcomm.barrier()

    def on_a_lane() -> None:
        with objcomm.lane("eval"):
            objcomm.all_gather("x")

    def last() -> Raw:
        return world_entries(objcomm.recorder.dump())[-1]

    if here().rank == 0:
        thread = in_thread(on_a_lane)
        wait_until(lambda: last()["lane_name"] == "eval" and is_waiting(), "the call to wait")
        entry = last()
        objcomm.recorder.dump(tmp_path / "r.json")
        assert (entry["outcome"], entry["ms"], entry["awaits"]) == ("under way", None, 1)
        assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]
        assert entry in world_entries(json.loads((tmp_path / "r.json").read_text()))
        say("go")
    else:
        hear("go")
        thread = in_thread(on_a_lane)
    thread.join()
    assert_group_works()


@ranks(3, disposable=True)
def test_a_timeout_makes_each_rank_write_and_the_files_name_the_late_rank() -> None:
    with objcomm.configure(record_folder=folder()), patiently():
        objcomm.barrier()
        if here().rank == 2:
            for rank in range(2):
                hear(f"rank {rank} has raised")
        error = error_in(TransportTimeout, lambda: objcomm.all_gather("x", timeout=LIMIT_S))
        say(f"rank {here().rank} has raised")
        written = Path(error.recorded)
        assert written.name.startswith(f"objcomm-rank{here().rank}-{os.getpid()}-")
        assert any(str(written) in note for note in error.__notes__)
        assert "TransportTimeout" not in error.__notes__
        with pytest.raises(BrokenGroupError) as again:
            objcomm.barrier()
        assert not again.value.recorded
    dump = json.loads(written.read_text())
    assert dump["error"]["type"] == "TransportTimeout"
    assert dump["error"]["text"] == str(error)
    assert world_entries(dump)[-1]["outcome"] == "TransportTimeout"
    assert len(list(folder().glob(f"*rank{here().rank}-*"))) == 1
    dist.barrier()
    assert "rank 2 came last" in report().splitlines()[-1]


@ranks(3, disposable=True)
def test_a_message_that_never_came_is_found() -> None:
    with objcomm.configure(record_folder=folder()), patiently():
        if here().rank == 0:
            assert objcomm.recv(1) == "the two have met"
            hear("another has been sent")
            error = error_in(TransportTimeout, lambda: objcomm.recv(1, timeout=LIMIT_S))
            assert error.recorded
            say("rank 0 has raised")
        elif here().rank == 1:
            objcomm.send("the two have met", 0)
            objcomm.send("of another tag", 0, tag=5)
            say("another has been sent")
            hear("rank 0 has raised")
            objcomm.recorder.dump(folder() / "objcomm-asked.json")
    dist.barrier()
    last = report().splitlines()[-1]
    assert "the message did not end well: recv from 1" in last
    assert "rank 1 was waited for; its last was send to 0" in last


@ranks(3, disposable=True)
def test_a_rank_that_misses_the_first_use_is_found() -> None:
    # Rank 2 has not used objcomm, so it does not answer.
    with objcomm.configure(record_folder=folder()), patiently(answers_s=0.1):
        tell_all("all are here", "")
        if here().rank < 2:
            error = error_in(TransportTimeout, lambda: objcomm.broadcast(1, timeout=LIMIT_S))
            assert error.recorded
            say(f"rank {here().rank} has raised")
        else:
            for rank in range(2):
                hear(f"rank {rank} has raised")
            objcomm.recorder.dump(folder() / "objcomm-asked.json")
    dist.barrier()
    assert "rank 2 never came to the first use (broadcast at" in report()


@ranks(3, disposable=True)
def test_a_desync_is_written_once_by_every_rank() -> None:
    objcomm.barrier()
    with objcomm.configure(record_folder=str(folder())), closely():
        call = objcomm.all_gather if here().rank else objcomm.barrier
        error = error_in(DesyncError, lambda: call("x"))
        assert error.recorded
        assert error.recent[-1].operation in {"barrier", "all_gather"}
        assert_group_works()
    dist.barrier()
    assert len(list(folder().iterdir())) == here().world_size
    last = report().splitlines()[-1]
    assert "the ranks diverge in call 1: rank 0 made barrier" in last
    assert f"made all_gather at {HERE}" in last.replace(f"group/{HERE}", HERE)


@ranks(2, expect_dead=[1])
def test_surviving_ranks_record_a_death() -> None:
    objcomm.barrier()
    if here().rank == 1:
        os._exit(0)
    with objcomm.configure(record_folder=folder()):
        assert error_in(TransportError, lambda: objcomm.all_gather("x")).recorded
    assert "there is no dump of rank 1, so look there first" in report()


@ranks(2, disposable=True)
def test_an_error_within_a_callback_is_written_once() -> None:
    def fails() -> None:
        objcomm.barrier("a" if here().rank == 0 else "b", group=inner)

    with subgroup(0, 1) as inner, objcomm.configure(record_folder=folder()), closely():
        objcomm.barrier()
        with contextlib.suppress(ObjcommError):
            objcomm.reduce_and_broadcast(fails, len)
        dist.barrier()
        assert len(list(folder().iterdir())) == 2


def desync() -> DesyncError:
    """The error of two barriers with different names."""
    name = "a" if here().rank == 0 else "b"
    error: DesyncError = error_in(DesyncError, lambda: objcomm.barrier(name))
    return error


@ranks(2, disposable=True)
def test_an_error_is_raised_although_its_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    objcomm.barrier()
    with objcomm.configure(record_folder=tmp_path / "file"), closely():
        error = desync()
    assert not error.recorded
    assert any("could not write" in note for note in error.__notes__)
    assert_group_works()


@ranks(2, disposable=True)
def test_a_program_that_continues_after_errors_does_not_fill_the_disk() -> None:
    objcomm.barrier()
    os.environ["OBJCOMM_RECORD_FOLDER"] = str(folder())
    with closely():
        for _ in range(18):
            desync()
        assert len(list(folder().glob(f"*rank{here().rank}-*"))) == 16
        with objcomm.configure(record_folder=""):
            assert not desync().recorded


@solo()
def test_a_world_of_one_is_recorded_too() -> None:
    assert objcomm.recorder.dump()["groups"] == []
    objcomm.all_gather("x")
    objcomm.barrier("y")
    (recorded,) = objcomm.recorder.dump()["groups"]
    assert (recorded["name"], recorded["ranks"], recorded["size"]) == ("", [0], 1)
    assert [each["operation"] for each in recorded["entries"]] == ["all_gather", "barrier"]
    assert [each["sequence"] for each in recorded["entries"]] == [0, 1]
    assert all(HERE in each["call_site"] for each in recorded["entries"])


@solo()
def test_only_its_user_can_read_a_dump_and_it_follows_no_link() -> None:
    folder = here().folder
    precious, dump = folder / "precious", folder / "calls.json"
    precious.write_text("as it was")
    dump.symlink_to(precious)
    (folder / f".calls.json.{os.getpid()}").symlink_to(precious)
    objcomm.recorder.dump(dump)
    assert precious.read_text() == "as it was"
    assert stat.S_IMODE(dump.lstat().st_mode) == 0o600
    assert json.loads(dump.read_text())["pid"] == os.getpid()
    before = set(folder.iterdir())
    with pytest.raises(TypeError):  # a failed write leaves no file
        recorder._write({"at": object()}, dump)  # noqa: SLF001  # there is no public way
    assert set(folder.iterdir()) == before
