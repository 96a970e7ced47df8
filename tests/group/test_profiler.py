"""``torch.profiler`` shows each operation by name, with its parts nested inside."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

import objcomm
from objcomm._observe.tracing import span
from objcomm.errors import CollectiveError, ObjcommError
from tests.group.helpers import RefusesToPickle, assert_group_works
from tests.ranks import ranks
from tests.workers import here

ALL_THREADS = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # noqa: SLF001  # torch has no public name for it

Span = tuple[float, float, object]
Spans = dict[str, list[Span]]


def looking(config: Any = None) -> profile:
    return profile(activities=[ProfilerActivity.CPU], experimental_config=config)


def exported(profiler: profile, folder: Path) -> Spans:
    """Return the spans of a Chrome trace by name, each as begin, end and thread."""
    path = folder / f"{here().rank}.json"
    profiler.export_chrome_trace(str(path))
    found: Spans = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "user_annotation":
            begin = event["ts"]
            found.setdefault(event["name"], []).append((begin, begin + event["dur"], event["tid"]))
    return found


def is_inside(inner: Span, outer: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1] and inner[2] == outer[2]


@ranks(2)
def test_a_trace_has_the_operation_and_its_parts_nested(tmp_path: Path) -> None:
    objcomm.barrier()
    with looking() as profiler, record_function("step"):
        objcomm.broadcast(torch.ones(100_000))
    spans = exported(profiler, tmp_path)
    (step,), (operation,) = spans["step"], spans["objcomm::broadcast"]
    (transfer,) = spans["objcomm::transfer"]
    (part,) = spans["objcomm::decode" if here().rank else "objcomm::encode"]
    assert is_inside(operation, step)
    assert is_inside(transfer, operation)
    assert is_inside(part, operation)
    earlier, later = (transfer, part) if here().rank else (part, transfer)
    assert earlier[1] <= later[0]
    assert len(spans) == 4


@ranks(2)
def test_a_call_that_fails_closes_its_spans(tmp_path: Path) -> None:
    objcomm.barrier()
    with looking() as profiler, record_function("step"):
        with pytest.raises(CollectiveError):
            objcomm.all_gather(RefusesToPickle(ValueError()) if here().rank else 1)
        with record_function("next"):
            pass
    spans = exported(profiler, tmp_path)
    (step,), (operation,) = spans["step"], spans["objcomm::all_gather"]
    (following,) = spans["next"]
    assert is_inside(operation, step)
    assert operation[1] <= following[0]


@ranks(2)
@pytest.mark.parametrize("looks_at_all", [False, True])
def test_async_calls_are_shown_if_all_are_profiled(tmp_path: Path, *, looks_at_all: bool) -> None:
    objcomm.barrier()
    with looking(ALL_THREADS if looks_at_all else None) as profiler:
        with record_function("step"):
            work = objcomm.all_gather(torch.ones(100_000), async_op=True)
        work.wait()
    spans = exported(profiler, tmp_path)
    (step,), (encoding,) = spans["step"], spans["objcomm::encode"]
    assert is_inside(encoding, step)  # always on the caller's thread
    assert ("objcomm::all_gather" in spans) == looks_at_all
    if looks_at_all:
        (operation,), (transfer,) = spans["objcomm::all_gather"], spans["objcomm::transfer"]
        assert operation[2] != step[2]
        assert is_inside(transfer, operation)
        assert is_inside(spans["objcomm::decode"][0], operation)


@ranks(2)
def test_a_call_may_begin_before_a_profile_and_end_after_it() -> None:
    for _ in range(5):
        profiler = looking()
        works = [objcomm.all_gather(torch.ones(100_000), async_op=True) for _ in range(3)]
        with profiler:
            objcomm.wait_all(works[:1])
        objcomm.wait_all(works[1:])
    assert_group_works()


@ranks(2)
def test_spans_are_shared_without_a_profiler() -> None:
    assert span("a") is span("b")
    with looking():
        assert span("a") is not span("b")


@ranks(1, 2)
def test_each_operation_is_shown_once_by_name() -> None:
    objcomm.barrier()
    with looking() as profiler, record_function("step"):
        objcomm.broadcast(torch.ones(3))
        objcomm.all_gather("x")
        with pytest.raises(ObjcommError):
            objcomm.scatter([])
        objcomm.send("x", here().rank)
        objcomm.recv(here().rank)
    counts = {each.key: each.count for each in profiler.key_averages()}
    for name in ("broadcast", "all_gather", "scatter", "send", "recv"):
        assert counts[f"objcomm::{name}"] == 1
    # These would write into profiler memory that is freed by then.
    assert not [key for key in counts if key.startswith("gloo:")]
    assert_group_works()
