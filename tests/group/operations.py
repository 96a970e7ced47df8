"""Every public operation, called in one way, for tests that hold for all of them."""

from collections.abc import Callable
from typing import Any

import objcomm

Call = Callable[..., Any]


def _scatter(obj: Any, **options: Any) -> Any:
    return objcomm.scatter([obj] * objcomm.world_size(options.get("group")), **options)


def _all_to_all(obj: Any, **options: Any) -> Any:
    return objcomm.all_to_all([obj] * objcomm.world_size(options.get("group")), **options)


def _reduce_scatter(obj: Any, **options: Any) -> Any:
    objs = [obj] * objcomm.world_size(options.get("group"))
    return objcomm.reduce_scatter(objs, first, **options)


def _scan(obj: Any, **options: Any) -> Any:
    return objcomm.scan(obj, first, **options)


def _exscan(obj: Any, **options: Any) -> Any:
    return objcomm.exscan(obj, first, **options)


def _reduce(obj: Any, **options: Any) -> Any:
    return objcomm.reduce(obj, first, **options)


def _all_reduce(obj: Any, **options: Any) -> Any:
    return objcomm.all_reduce(obj, first, **options)


def _barrier(_: Any, **options: Any) -> Any:
    return objcomm.barrier(**options)


def _reduce_and_broadcast(obj: Any, **options: Any) -> Any:
    return objcomm.reduce_and_broadcast(lambda: obj, lambda objs: objs[0], **options)


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
    "scatter": _scatter,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "scan": _scan,
    "exscan": _exscan,
    "barrier": _barrier,
    "gather_scalar": objcomm.gather_scalar,
    "all_gather_scalar": objcomm.metrics.all_gather_scalar,
    "reduce_and_broadcast": _reduce_and_broadcast,
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
