"""A line whose thread waits for its next job."""

import functools
import weakref

from objcomm.transport.line import Line


class Held:
    """Something that can be watched."""


def _take(_: Held) -> None:
    """What a job does with it."""


def test_an_idle_line_holds_no_job() -> None:
    held = Held()
    kept = weakref.ref(held)
    line = Line("idle line")
    line.submit(functools.partial(_take, held))
    del held
    line.drain()
    assert kept() is None
