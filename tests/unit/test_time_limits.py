"""What ``timeout=`` accepts, in a world of one: any positive time, however long."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import objcomm
from objcomm import UsageError
from tests.unit.flights import Begin

ENDLESS = [float("inf"), 1e300, 10**400, threading.TIMEOUT_MAX + 1, timedelta.max]
WRONG = [True, False, float("nan"), float("-inf"), -1, timedelta(-1), "1", [1]]


def _receive(timeout: Any) -> Any:
    """Receive a message that this rank sends itself while it waits."""
    work = objcomm.irecv(src=0, timeout=timeout)
    objcomm.send(1, dst=0)
    return work.wait()


def _fail_together(timeout: Any) -> int:
    with objcomm.fail_together(timeout=timeout):
        return 1


#: Calls that take a time limit and return 1.
CALLS: dict[str, Callable[[Any], Any]] = {
    "broadcast": lambda timeout: objcomm.broadcast(1, timeout=timeout),
    "agree": lambda timeout: objcomm.agree(1, timeout=timeout) or 1,
    "run_on_main": lambda timeout: objcomm.run_on_main(lambda: 1, timeout=timeout),
    "fail_together": _fail_together,
    "irecv": _receive,
    "init": lambda timeout: objcomm.init(timeout=timeout).world_size,
}


def _waits(begun: Begin) -> dict[str, Callable[[Any], Any]]:
    """Waits for an outstanding call that ends soon."""

    def flight() -> objcomm.Work[Any]:
        made = begun(1)
        threading.Timer(0.05, made.end).start()
        return made.work

    return {
        "wait": lambda timeout: flight().wait(timeout),
        "wait_all": lambda timeout: objcomm.wait_all([flight()], timeout)[0],
        "as_completed": lambda timeout: next(objcomm.as_completed([flight()], timeout)).result(),
    }


@pytest.mark.parametrize("name", [*CALLS, "wait", "wait_all", "as_completed"])
@pytest.mark.parametrize("timeout", ENDLESS, ids=lambda timeout: str(timeout)[:20])
def test_a_limit_of_any_length_is_one(name: str, timeout: Any, begun: Begin) -> None:
    assert (CALLS | _waits(begun))[name](timeout) == 1


@pytest.mark.parametrize("name", [*CALLS, "wait", "wait_all", "as_completed", "launch"])
@pytest.mark.parametrize("timeout", WRONG, ids=str)
def test_what_is_no_time_is_refused(name: str, timeout: Any, begun: Begin) -> None:
    calls = CALLS | _waits(begun)
    calls["launch"] = lambda timeout: objcomm.launch(print, 1, timeout=timeout)
    with pytest.raises(UsageError, match="must be a positive number of seconds"):
        calls[name](timeout)


@pytest.mark.parametrize("name", ["report_after", "lost_after"])
@pytest.mark.parametrize("seconds", [True, 0, -1.0, float("nan"), "5"], ids=str)
def test_what_is_no_number_of_seconds_is_refused(name: str, seconds: Any) -> None:
    given: dict[str, Any] = {name: seconds}
    with pytest.raises(UsageError, match="must be a number of seconds above 0"):
        objcomm.configure(**given)
