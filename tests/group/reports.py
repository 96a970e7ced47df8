"""Shared by tests that read what objcomm logs about long waits."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.group.helpers import in_thread, say
from tests.group.logs import collected
from tests.waits import wait_until


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collects what objcomm logs as warnings."""
    with collected(logging.WARNING) as handler:
        yield handler.told
    assert {each.levelno for each in handler.records} <= {logging.WARNING}


def told_when(is_told: Callable[[], object], topic: str) -> threading.Thread:
    """A thread that notifies the other ranks once this one has seen the report."""

    def tell() -> None:
        wait_until(is_told, "the report")
        say(topic)

    return in_thread(tell)
