"""Counters of each operation on this rank, also as Prometheus text and TensorBoard scalars.

Neither package is needed. ``recorder`` decides what is counted, and when.
"""

import re
from collections.abc import Collection, Mapping
from typing import Protocol

from objcomm._config import GroupLike
from objcomm._observe.history import OperationStats
from objcomm._observe.recorder import counters_of, known_recorders
from objcomm._world import rank
from objcomm.errors import UsageError


class ScalarWriter(Protocol):
    """What ``stats_to_tensorboard`` writes to; ``torch.utils.tensorboard.SummaryWriter`` is one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Write the value of one step."""


# By field of OperationStats: the metric's name, in base units, and its help text.
_FIGURES = {
    "calls": ("calls", "Calls of the operation on this rank."),
    "exchanges": (
        "exchanges",
        "Rounds of messages, each of which had to wait for the one before.",
    ),
    "sent_nbytes": ("sent_bytes", "Bytes that this rank sent, to all ranks together."),
    "received_nbytes": ("received_bytes", "Bytes that this rank received."),
    "seconds": (
        "seconds",
        "Time that this rank spent in the operation, waiting for other ranks included.",
    ),
}

_LABEL = re.compile("(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = ("operation", "group", "rank")


def stats_to_prometheus(labels: Mapping[str, str] | None = None) -> str:
    """Return the counters of all groups that this process uses, in Prometheus' text format.

    Does not communicate. May be called from any thread, even while another call waits. A call is
    counted when it has ended. Serve the text as ``text/plain; version=0.0.4; charset=utf-8``, or
    write it to a ``.prom`` file for node_exporter.

    Args:
        labels: labels for every sample in addition to ``operation``, ``group`` and ``rank``, such
            as the job's name. Their names must be valid in Prometheus.

    Returns:
        The text of five counters, ``objcomm_calls_total``, ``objcomm_exchanges_total``,
        ``objcomm_sent_bytes_total``, ``objcomm_received_bytes_total`` and
        ``objcomm_seconds_total``. ``rank`` is the global rank of this process. ``group`` is torch's
        name for the group; empty for calls without torch.distributed.

    Raises:
        UsageError: the name of a label is not valid in Prometheus, or is one of the three above.

    Examples:
        >>> import objcomm
        >>> objcomm.reset_stats()
        >>> objcomm.barrier()
        >>> text = objcomm.exporters.stats_to_prometheus()
        >>> [line for line in text.splitlines() if "calls_total{" in line]
        ['objcomm_calls_total{operation="barrier",group="",rank="0"} 1']
    """
    if not isinstance(labels, Mapping | None):
        raise UsageError(f"stats_to_prometheus: labels={labels!r} must be a mapping")
    added = dict(labels or {})
    for name in added:
        if not _LABEL.fullmatch(name) or name in _OWN_LABELS:
            raise UsageError(
                f"stats_to_prometheus: {name!r} is not a valid label name, or is in use; "
                "choose another"
            )
    counted = {}
    for (group, operation), of in _by_group().items():
        own = {"operation": operation, "group": group, "rank": max(rank(), 0)}
        written = [f'{name}="{_escaped(str(value))}"' for name, value in (own | added).items()]
        counted[",".join(written)] = of
    lines = []
    for field, (name, meaning) in _FIGURES.items():
        metric = f"objcomm_{name}_total"
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} counter"]
        lines += [f"{metric}{{{each}}} {getattr(of, field)}" for each, of in counted.items()]
    return "\n".join([*lines, ""])


def stats_to_tensorboard(writer: ScalarWriter, step: int, group: GroupLike = None) -> None:
    """Write the counters of one group as scalars, such as ``objcomm/broadcast/sent_bytes``.

    Does not communicate. Each rank has its own counters; call this on the ranks that have a
    writer.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or any object with its ``add_scalar``.
        step: the training step at which TensorBoard shows the values.
        group: a process group, a one-dimensional device mesh, or None for the world.

    Raises:
        UsageError: ``group`` is not a group of this job, or a launcher has started other ranks, but
            torch.distributed is not initialized.
        NotInGroupError: this rank is not a member of ``group``.

    Examples:
        >>> import objcomm
        >>> class Printer:
        ...     def add_scalar(self, tag, value, step):
        ...         if tag.endswith("calls"):
        ...             print(tag, value, step)
        >>> objcomm.reset_stats()
        >>> objcomm.barrier()
        >>> objcomm.exporters.stats_to_tensorboard(Printer(), step=100)
        objcomm/barrier/calls 1 100
    """
    for operation, counted in counters_of(group, "stats_to_tensorboard").snapshot().items():
        for field, (name, _) in _FIGURES.items():
            writer.add_scalar(f"objcomm/{operation}/{name}", getattr(counted, field), step)


def totals() -> OperationStats:
    """Return the sums of all counters of this process."""
    return _sum(_by_group().values())


def _by_group() -> dict[tuple[str, str], OperationStats]:
    """Return all counters by group and operation.

    If a group was destroyed and created again, both may exist while the old one is referenced. A
    sample must not occur twice, so their counters are added up.
    """
    found: dict[tuple[str, str], OperationStats] = {}
    # A part of a group shares the counters of the whole group.
    for each in {id(each.counters): each for each in reversed(known_recorders())}.values():
        for operation, counted in each.counters.snapshot().items():
            before = found.get((each.name, operation), OperationStats())
            found[each.name, operation] = _sum([before, counted])
    return found


def _sum(counted: Collection[OperationStats]) -> OperationStats:
    return OperationStats(**{each: sum(getattr(of, each) for of in counted) for each in _FIGURES})


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def stats(group: GroupLike = None) -> dict[str, OperationStats]:
    """Return what each operation on ``group`` has cost this rank so far.

    Does not communicate.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the world.

    Returns:
        The counters by operation, for example ``stats()["broadcast"].sent_nbytes``. If connections
        were refused because they did not come from a rank of the group, their number is
        ``stats()["refused"].calls``. After ``destroy_process_group``, the last values remain
        available: those of the world until the next call without torch.distributed, those of
        another group while the program keeps a reference to that group.

    Raises:
        UsageError: ``group`` is not a group of this job, or a launcher has started other ranks, but
            torch.distributed is not initialized.
        NotInGroupError: this rank is not a member of ``group``.

    Examples:
        >>> import objcomm
        >>> objcomm.reset_stats()
        >>> objcomm.barrier()
        >>> objcomm.stats()["barrier"].calls
        1
    """
    return counters_of(group, "stats").snapshot()


def reset_stats(group: GroupLike = None) -> None:
    """Reset the counters of ``group`` to zero, on this rank.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the world.

    Raises:
        UsageError: ``group`` is not a group of this job, or a launcher has started other ranks, but
            torch.distributed is not initialized.
        NotInGroupError: this rank is not a member of ``group``.

    Examples:
        >>> import objcomm
        >>> objcomm.reset_stats()
        >>> objcomm.stats()
        {}
    """
    counters_of(group, "reset_stats").clear()
