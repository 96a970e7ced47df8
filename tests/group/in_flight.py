"""Shared by tests of outstanding operations."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

import objcomm
from objcomm import Work
from tests.group.helpers import error_in, in_thread, subgroup
from tests.waits import PATIENCE_S

LIMIT_S = PATIENCE_S


def own(name: str, group: dist.ProcessGroup | None = None) -> Any:
    """The object that this rank contributes to an operation."""
    mine = objcomm.rank(group)
    return mine * 10 + 1 if name.endswith("scalar") else {"from": mine, "raw": bytes([mine]) * 40}


def lines() -> list[threading.Thread]:
    """The threads that carry out asynchronous calls."""
    return [each for each in threading.enumerate() if each.name.startswith("objcomm-line")]


@contextlib.contextmanager
def meanwhile(body: Callable[[], object]) -> Iterator[None]:
    """Run `body` in a thread, and raise what it raised."""
    thread = in_thread(body)
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def soon(work: Work[Any]) -> BaseException:
    """The error of a failing work."""
    error: BaseException = error_in(objcomm.ObjcommError, work.wait)
    return error


@contextlib.contextmanager
def two_groups() -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """Two groups of ranks 0 and 1, which have met in both."""
    with subgroup(0, 1) as one, subgroup(0, 1) as two:
        for group in (one, two):
            objcomm.barrier(group=group)
        yield one, two
