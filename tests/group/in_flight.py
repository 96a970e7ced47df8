"""What tests of operations in flight share."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import Work

# Promised within 2 s; a loaded machine gets more.
SOON_S = 6.0
LIMIT_S = 15.0


def own(name: str, group: dist.ProcessGroup | None = None) -> Any:
    """What this rank gives to an operation."""
    mine = objcomm.rank(group)
    return mine * 10 + 1 if name.endswith("scalar") else {"from": mine, "raw": bytes([mine]) * 40}


def lines() -> list[threading.Thread]:
    """The threads that carry asynchronous calls out."""
    return [each for each in threading.enumerate() if each.name.startswith("objcomm-line")]


@contextlib.contextmanager
def in_thread(body: Callable[[], object]) -> Iterator[None]:
    """Run `body` meanwhile, and raise what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    for error in errors:
        raise error


def soon(work: Work[Any]) -> BaseException:
    """The error of a work that fails soon."""
    began = time.monotonic()
    with pytest.raises(objcomm.ObjcommError) as caught:
        work.wait()
    assert time.monotonic() - began < SOON_S
    return caught.value
