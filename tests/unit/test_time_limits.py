"""What ``timeout=`` accepts, in a world of one: any positive time, however long."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import objcomm
from objcomm import UsageError, Work, as_completed, wait_all
from tests.unit.flights import Begin

ENDLESS = [float("inf"), 1e300, 10**400, threading.TIMEOUT_MAX + 1, timedelta.max]
WRONG = [True, False, float("nan"), float("-inf"), -1, timedelta(-1), "1", [1]]


def _receive(timeout: Any, _: Begin) -> Any:
    """Receive a message that this rank sends itself while it waits."""
    work = objcomm.irecv(src=0, timeout=timeout)
    objcomm.send(1, dst=0)
    return work.wait()


def _fail_together(timeout: Any, _: Begin) -> int:
    with objcomm.fail_together(timeout=timeout):
        return 1


def _soon(begun: Begin) -> Work[Any]:
    """Return an outstanding work that ends soon."""
    made = begun(1)
    threading.Timer(0.05, made.end).start()
    return made.work


#: Calls that take a time limit and return 1.
CALLS: dict[str, Callable[[Any, Begin], Any]] = {
    "broadcast": lambda timeout, _: objcomm.broadcast(1, timeout=timeout),
    "agree": lambda timeout, _: objcomm.agree(1, timeout=timeout) or 1,
    "run_on_main": lambda timeout, _: objcomm.run_on_main(lambda: 1, timeout=timeout),
    "fail_together": _fail_together,
    "irecv": _receive,
    "init": lambda timeout, _: objcomm.init(timeout=timeout).world_size,
    "wait": lambda timeout, begun: _soon(begun).wait(timeout),
    "wait_all": lambda timeout, begun: wait_all([_soon(begun)], timeout)[0],
    "as_completed": lambda timeout, begun: next(as_completed([_soon(begun)], timeout)).result(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("timeout", ENDLESS, ids=lambda timeout: str(timeout)[:20])
def test_a_limit_may_have_any_length(name: str, timeout: Any, begun: Begin) -> None:
    assert CALLS[name](timeout, begun) == 1


@pytest.mark.parametrize("name", [*CALLS, "launch"])
@pytest.mark.parametrize("timeout", WRONG, ids=str)
def test_a_value_that_is_not_a_time_is_refused(name: str, timeout: Any, begun: Begin) -> None:
    calls = CALLS | {"launch": lambda timeout, _: objcomm.launch(print, 1, timeout=timeout)}
    with pytest.raises(UsageError, match="must be a positive number of seconds"):
        calls[name](timeout, begun)


@pytest.mark.parametrize("name", ["report_after", "lost_after"])
@pytest.mark.parametrize("seconds", [True, 0, -1.0, float("nan"), "5"], ids=str)
def test_an_option_that_is_not_a_number_of_seconds_is_refused(name: str, seconds: Any) -> None:
    with pytest.raises(UsageError, match="must be a number of seconds above 0"):
        objcomm.configure(**{name: seconds})
