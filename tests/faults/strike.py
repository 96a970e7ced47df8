"""What befalls the victim; each function gets the call that it should have made.

Death between the parts of a message is brought about from outside, by putting itself around the
function that sends the next part.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

from torch.distributed import distributed_c10d

import objcomm
from objcomm.transport.exchange import Exchange

Call = Callable[[], Any]
Tell = Callable[[], None]

# The other ranks are waiting by then, and what was sent has left this process.
_PAUSE_S = 0.3
# Torch's collectives that carry an object's bytes, after those that carry its size.
_TORCHS = ("broadcast", "all_gather", "gather", "scatter")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit() -> NoReturn:
    os._exit(1)


def _close() -> None:
    """Shut every network socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                each.shutdown(socket.SHUT_RDWR)


def _before(end: Call, call: Call, tell: Tell) -> Any:
    time.sleep(_PAUSE_S)
    tell()
    end()
    return call()


def kill_before(call: Call, tell: Tell) -> Any:
    """Die instead of calling."""
    return _before(_kill, call, tell)


def exit_before(call: Call, tell: Tell) -> Any:
    """Leave instead of calling."""
    return _before(_exit, call, tell)


def close_before(call: Call, tell: Tell) -> Any:
    """Lose all connections, then call."""
    return _before(_close, call, tell)


def stop_before(call: Call, tell: Tell) -> Any:
    """Stop; somebody else ends this process."""
    return _before(lambda: os.kill(os.getpid(), signal.SIGSTOP), call, tell)


def stay_away(_call: Call, tell: Tell) -> None:
    """Do something else."""
    tell()


def go_astray(_call: Call, tell: Tell) -> Any:
    """Make another call than the others."""
    tell()
    return objcomm.barrier("astray")


def raise_before(_call: Call, tell: Tell) -> NoReturn:
    """Fail outside of any call."""
    tell()
    raise LookupError("no such shard")


def _between(end: Call, call: Call, tell: Tell) -> Any:
    """``end`` when the payload's turn has come."""

    def instead(*_: Any) -> Any:
        time.sleep(_PAUSE_S)
        tell()
        return end()

    for name in ("send_rest", "relay_rest"):
        _put_around(Exchange, name, lambda original: _first_time(instead, original))
    for name in _TORCHS:
        _put_around(distributed_c10d, name, lambda original: _nth_time(2, instead, original))
    return call()


def kill_between(call: Call, tell: Tell) -> Any:
    """Die with the header sent."""
    return _between(_kill, call, tell)


def exit_between(call: Call, tell: Tell) -> Any:
    """Leave with the header sent."""
    return _between(_exit, call, tell)


def close_between(call: Call, tell: Tell) -> Any:
    """Lose all connections with the header sent."""
    return _between(_close, call, tell)


def _amid(end: Call, call: Call, tell: Tell) -> Any:
    """``end`` while the third piece of a payload is under way."""

    def instead(*_: Any) -> Any:
        tell()
        return end()

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        pieces = 0

        def send(self: Exchange, flat: Any, peer: int, tag: int, owner: Any) -> None:
            nonlocal pieces
            original(self, flat, peer, tag, owner)
            pieces += flat.numel() > 1 << 18
            if pieces == 3:
                pieces += 1
                instead()

        return send

    _put_around(Exchange, "_send", around)
    return call()


def kill_amid(call: Call, tell: Tell) -> Any:
    """Die in the middle of the payload."""
    return _amid(_kill, call, tell)


def close_amid(call: Call, tell: Tell) -> Any:
    """Lose all connections in the middle of the payload."""
    return _amid(_close, call, tell)


def _first_time(
    instead: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    return _nth_time(1, instead, original)


def _nth_time(
    number: int, first: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """``original``, with ``first`` before its ``number``-th call."""
    calls = 0

    def around(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            first()
        return original(*args, **options)

    return around


def _put_around(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    # The process ends with the case, so nothing has to be put back.
    setattr(owner, name, wrap(getattr(owner, name)))
