"""Every public operation, called in one way, for tests that hold for all of them."""

from collections.abc import Callable
from typing import Any

import objcomm

Call = Callable[..., Any]


def _one_each(obj: Any, group: Any = None, **_: Any) -> list[Any]:
    """The object once for each rank of the group that the call's options name."""
    return [obj] * objcomm.world_size(group)


def _sendrecv(obj: Any, **options: Any) -> Any:
    group = options.get("group")
    rank, size = objcomm.rank(group), objcomm.world_size(group)
    if rank < 0:  # refused, whichever ranks it names
        return objcomm.sendrecv(obj, group_dst=0, group_src=0, **options)
    after, before = (rank + 1) % size, (rank - 1) % size
    return objcomm.sendrecv(obj, group_dst=after, group_src=before, **options)


def _isend_and_irecv(obj: Any, **options: Any) -> Any:
    """Send to this rank and receive from any, found by ``probe``."""
    group = options.get("group")
    sending = objcomm.isend(obj, group_dst=max(0, objcomm.rank(group)), tag=11, **options)
    found = objcomm.probe(tag=11, group=group)
    receiving = objcomm.irecv(group_src=found.group_src, tag=found.tag, group=group)
    sending.wait()
    return receiving.wait()


def first(left: Any, _right: Any) -> Any:
    """An associative operation on anything."""
    return left


#: Takes an object, and the options that all operations share.
OPERATIONS: dict[str, Call] = {
    "broadcast": objcomm.broadcast,
    "gather": objcomm.gather,
    "all_gather": objcomm.all_gather,
    "scatter": lambda obj, **named: objcomm.scatter(_one_each(obj, **named), **named),
    "reduce": lambda obj, **named: objcomm.reduce(obj, first, **named),
    "all_reduce": lambda obj, **named: objcomm.all_reduce(obj, first, **named),
    "all_to_all": lambda obj, **named: objcomm.all_to_all(_one_each(obj, **named), **named),
    "reduce_scatter": lambda obj, **named: objcomm.reduce_scatter(
        _one_each(obj, **named), first, **named
    ),
    "scan": lambda obj, **named: objcomm.scan(obj, first, **named),
    "exscan": lambda obj, **named: objcomm.exscan(obj, first, **named),
    "barrier": lambda _, **named: objcomm.barrier(**named),
    "gather_scalar": objcomm.gather_scalar,
    "all_gather_scalar": objcomm.metrics.all_gather_scalar,
    "reduce_and_broadcast": lambda obj, **named: objcomm.reduce_and_broadcast(
        lambda: obj, lambda objs: objs[0], **named
    ),
}

#: Those of them that carry objects of any type.
OBJECT_OPERATIONS = [
    name for name in OPERATIONS if name not in {"barrier", "gather_scalar", "all_gather_scalar"}
]

#: Those in which only one rank gives objects; in all others every rank gives one.
FROM_ONE = {"broadcast", "scatter"}
#: Those in which only one rank gets a result.
TO_ONE = {"gather", "gather_scalar", "reduce"}


def is_told(name: str, failing: int, rank: int) -> bool:
    """Whether a rank raises where `failing` could not give its object, with default roots.

    The ranks that wait for that object do. Add a new operation here if only some ranks wait for
    another in it.
    """
    if rank == failing:
        return True
    return rank == 0 if name in TO_ONE else name not in FROM_ONE or failing == 0


#: Those with one rank that sends to or receives from all others, and the name of that argument.
ROOTED = {
    "broadcast": "src",
    "gather": "dst",
    "scatter": "src",
    "reduce": "dst",
    "gather_scalar": "dst",
}

#: Messages from rank to rank: the same options, but for ``confirm``.
MESSAGES: dict[str, Call] = {"sendrecv": _sendrecv, "isend and irecv": _isend_and_irecv}
