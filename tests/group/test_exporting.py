"""The counters exported to Prometheus and TensorBoard, read back by their own parsers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

import objcomm
from objcomm._observe.recorder import Recorder
from objcomm.errors import UsageError
from tests.cases import case
from tests.group.helpers import hear, in_thread, say, subgroup
from tests.ranks import ranks, solo
from tests.workers import here

FIELDS = {
    "objcomm_calls": "calls",
    "objcomm_exchanges": "exchanges",
    "objcomm_sent_bytes": "sent_nbytes",
    "objcomm_received_bytes": "received_nbytes",
    "objcomm_seconds": "seconds",
}


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by metric, then by operation, group, rank and any further labels."""
    families = list(text_string_to_metric_families(text))
    assert [each.name for each in families] == list(FIELDS)
    for each in families:
        assert each.type == "counter"
        assert each.documentation.endswith(".")
        assert all(sample.name == f"{each.name}_total" for sample in each.samples)
    return {
        each.name: {tuple(sample.labels.values()): sample.value for sample in each.samples}
        for each in families
    }


def key_of(operation: str, group: dist.ProcessGroup | None = None) -> tuple[str, str, str]:
    name = (group or dist.group.WORLD or dist.ProcessGroup).group_name
    return operation, str(name), str(here().rank)


@ranks(1, 3)
def test_prometheus_reads_all_counters_of_all_groups() -> None:
    objcomm.reset_stats()
    objcomm.broadcast(bytes(100_000))
    objcomm.all_gather("x")
    counted = objcomm.stats()
    with subgroup(*range(min(here().world_size, 2))) as group:
        if here().rank < 2:
            objcomm.barrier(group=group)
        found = parsed(objcomm.exporters.stats_to_prometheus())
        if here().rank < 2:
            assert found["objcomm_calls"][key_of("barrier", group)] == 1
    assert set(counted) == {"broadcast", "all_gather"}
    for metric, field in FIELDS.items():
        for operation, of in counted.items():
            assert found[metric][key_of(operation)] == getattr(of, field)


@contextlib.contextmanager
def only(*recorders: Recorder) -> Iterator[None]:
    """Pretend that only these groups have been used, not even the one of a single process."""
    with mock.patch("objcomm._observe.stats.known_recorders", return_value=recorders):
        yield


def test_prometheus_reads_labels_of_any_content() -> None:
    odd = 'a "quoted" back\\slash\nand {braces}, \\n too'
    recorder = Recorder()
    recorder.name = odd
    recorder.counters.add("b", (1, 2**60, 0), 1e-7)
    with only(recorder):
        found = parsed(objcomm.exporters.stats_to_prometheus({"job": odd, "empty": ""}))
    key = ("b", odd, "0", odd, "")
    assert found["objcomm_seconds"] == {key: 1e-7}
    assert found["objcomm_sent_bytes"] == {key: 2.0**60}


def test_groups_with_the_same_name_share_a_sample() -> None:
    recorders = [Recorder(), Recorder()]
    for recorder in recorders:
        recorder.name = "0"
        recorder.counters.add("b", (1, 5, 6), 0.5)
    with only(*recorders):
        found = parsed(objcomm.exporters.stats_to_prometheus())
    assert [found[metric]["b", "0", "0"] for metric in FIELDS] == [2, 2, 10, 12, 1.0]


def test_without_counts_there_are_no_samples() -> None:
    with only(Recorder()):
        samples = parsed(objcomm.exporters.stats_to_prometheus())
    assert samples == {name: {} for name in FIELDS}


def test_a_label_that_prometheus_would_refuse_is_refused() -> None:
    for name in ("rank", "group", "operation", "a-b", "1st", "__name__", ""):
        with case(name), pytest.raises(UsageError, match="is not a valid label name"):
            objcomm.exporters.stats_to_prometheus({name: "x"})


@ranks(2)
def test_counters_may_be_read_while_a_call_waits() -> None:
    objcomm.reset_stats()
    objcomm.barrier()
    if here().rank == 0:
        work = objcomm.all_gather("x", async_op=True)
        texts: list[str] = []
        in_thread(lambda: texts.append(objcomm.exporters.stats_to_prometheus())).join()
        assert not work.done()
        assert key_of("all_gather") not in parsed(texts[0])["objcomm_calls"]
        say("the counters were read")
        work.wait()
    else:
        hear("the counters were read")
        objcomm.all_gather("y")


class Scalars:
    """The part of ``SummaryWriter`` that the exporter needs."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[float, int]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert tag not in self.values
        self.values[tag] = (scalar_value, global_step)


@ranks(1, 2)
def test_a_writer_receives_each_figure_once() -> None:
    objcomm.reset_stats()
    objcomm.broadcast("x")
    objcomm.barrier()
    writer = Scalars()
    objcomm.exporters.stats_to_tensorboard(writer, 7)
    counted = objcomm.stats()
    assert writer.values == {
        f"objcomm/{operation}/{metric.removeprefix('objcomm_')}": (getattr(of, field), 7)
        for operation, of in counted.items()
        for metric, field in FIELDS.items()
    }
    assert len(writer.values) == 10


@solo()
def test_tensorboard_reads_the_figures_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415  # takes seconds
        EventAccumulator,
    )
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # likewise

    objcomm.broadcast("x")
    with SummaryWriter(str(tmp_path)) as writer:
        objcomm.exporters.stats_to_tensorboard(writer, 1)
        objcomm.broadcast("y")
        objcomm.exporters.stats_to_tensorboard(writer, 2)
    events = EventAccumulator(str(tmp_path)).Reload()
    calls = events.Scalars("objcomm/broadcast/calls")
    assert [(each.step, each.value) for each in calls] == [(1, 1.0), (2, 2.0)]
