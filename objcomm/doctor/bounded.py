"""Calls that may never return, with a limit.

Names are looked up and torch's store is asked in C, without a limit or with one that does not hold
always: a ``TCPStore`` waits for ever for a server that accepts and is silent (torch 2.13).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns or raises, if it does in time.

    A call that does not is left behind in a daemon thread, which does not keep the program alive.

    Args:
        seconds: how long to wait.
        call: what to do.

    Raises:
        TimeoutError: it took longer.
    """
    outcome: Future[T] = Future()

    def carry_out() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  # whoever waits is told
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=carry_out, name="objcomm-doctor", daemon=True).start()
    return outcome.result(max(seconds, 0.0))
