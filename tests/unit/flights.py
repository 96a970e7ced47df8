"""Works that end when a test lets them."""

import threading
from collections.abc import Callable
from typing import Any

from objcomm import Work
from objcomm._transport.threads import SerialExecutor
from tests.waits import PATIENCE_S

LIMIT_S = PATIENCE_S
PLACE = f"{__file__}:7"


class Waited:
    """The attribute that the watchdog reads."""

    waiter = 0


class Begun:
    """A work on its own line that ends when the test lets it."""

    def __init__(self, outcome: Any = None, line: SerialExecutor | None = None) -> None:
        self.may_end = threading.Event()
        self.waited = Waited()
        self.line = line or SerialExecutor("test line")
        self.work: Work[Any] = Work("gather", PLACE, self.waited)
        may_end = self.may_end

        def body() -> Any:
            assert may_end.wait(LIMIT_S)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        self.work.carry_out_on(self.line, body)

    def end(self) -> Work[Any]:
        self.may_end.set()
        self.line.drain()
        return self.work


#: Begins a work with the given outcome.
Begin = Callable[..., Begun]
