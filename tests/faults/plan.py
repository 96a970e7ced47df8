"""What is tried: faults, operations, and which of them meet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import objcomm
from tests.faults import torchs

WORLD_SIZE = 3
#: Who suffers: the source of what has one, a sender elsewhere.
VICTIM = 1
#: The limit of calls that a stopped or absent rank is to end, in seconds.
LIMIT_S = 3.0
#: More than fits with a header, and enough pieces that one of them is under way.
LARGE_NBYTES = 32 << 20


@dataclass(frozen=True)
class Operation:
    """One operation, as every rank calls it.

    Attributes:
        call: takes this rank's object and the options of all operations.
        torch_call: torch's nearest counterpart, if it has one.
        has_payload: whether the object travels behind a header.
    """

    call: Callable[..., Any]
    torch_call: Callable[[Any], Any] | None
    has_payload: bool = True


def _first(left: Any, _right: Any) -> Any:
    return left


OPERATIONS: dict[str, Operation] = {
    "broadcast": Operation(
        lambda obj, **options: objcomm.broadcast(obj, src=VICTIM, **options), torchs.broadcast
    ),
    "gather": Operation(objcomm.gather, torchs.gather),
    "all_gather": Operation(objcomm.all_gather, torchs.all_gather),
    "scatter": Operation(
        lambda obj, **options: objcomm.scatter([obj] * WORLD_SIZE, src=VICTIM, **options),
        torchs.scatter,
    ),
    "reduce": Operation(lambda obj, **options: objcomm.reduce(obj, _first, **options), None),
    "all_reduce": Operation(
        lambda obj, **options: objcomm.all_reduce(obj, _first, **options), torchs.all_gather
    ),
    "reduce_and_broadcast": Operation(
        lambda obj, **options: objcomm.reduce_and_broadcast(
            lambda: obj, lambda objs: objs[VICTIM], **options
        ),
        None,
    ),
    "barrier": Operation(
        lambda _, **options: objcomm.barrier(**options), torchs.barrier, has_payload=False
    ),
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong on the victim.

    Attributes:
        text: for the table.
        strike: the name of a function in ``strike``, called on the victim in place of the
            operation, or around it.
        dies: whether the victim's process ends by it.
        breaks: whether the group is broken afterwards.
        is_limited: whether only a time limit ends the wait.
        needs_payload: whether it can only happen to an operation that has one.
        torch_too: whether the same can be done to torch's collectives.
        survivors_see: the errors that a rank may raise.
    """

    text: str
    strike: str
    dies: bool = False
    breaks: bool = True
    is_limited: bool = False
    needs_payload: bool = False
    torch_too: bool = True
    survivors_see: tuple[str, ...] = ("TransportError",)


FAULTS: dict[str, Fault] = {
    "kill": Fault("SIGKILL before its header", "kill_before", dies=True),
    "exit": Fault("`os._exit` before its header", "exit_before", dies=True),
    "close": Fault("its sockets are closed", "close_before", torch_too=False),
    "kill between": Fault(
        "SIGKILL between header and payload", "kill_between", dies=True, needs_payload=True
    ),
    "exit between": Fault(
        "`os._exit` between header and payload", "exit_between", dies=True, needs_payload=True
    ),
    "close between": Fault(
        "its sockets are closed between header and payload",
        "close_between",
        needs_payload=True,
        torch_too=False,
    ),
    "kill amid": Fault(
        "SIGKILL in the middle of its payload",
        "kill_amid",
        dies=True,
        needs_payload=True,
        torch_too=False,
    ),
    "close amid": Fault(
        "its sockets are closed in the middle of its payload",
        "close_amid",
        needs_payload=True,
        torch_too=False,
    ),
    "stop": Fault(
        f"SIGSTOP; the limit is {LIMIT_S:g} s",
        "stop_before",
        dies=True,
        is_limited=True,
        survivors_see=("TransportTimeout",),
    ),
    "absent": Fault(
        f"it does not come; the limit is {LIMIT_S:g} s",
        "stay_away",
        is_limited=True,
        survivors_see=("TransportTimeout",),
    ),
    "astray": Fault(
        "it makes another call", "go_astray", breaks=False, survivors_see=("DesyncError",)
    ),
    "raises": Fault(
        "it raises before the call, inside of `fail_together`",
        "raise_before",
        breaks=False,
        torch_too=False,
        survivors_see=("CollectiveError",),
    ),
}


def cases() -> list[tuple[str, str]]:
    """Every fault with every operation that it can happen to."""
    return [
        (fault, operation)
        for fault, about in FAULTS.items()
        for operation, called in OPERATIONS.items()
        if called.has_payload or not about.needs_payload
    ]
