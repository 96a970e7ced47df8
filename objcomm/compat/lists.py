"""The lists in which callers give objects and get them: what they must be, and filling them."""

from collections.abc import MutableSequence, Sequence
from typing import Any

from objcomm.call import Call
from objcomm.errors import UsageError


def entries(name: str, given: Any) -> Sequence[Any]:
    """What is a list of the caller's.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise UsageError(f"{name}: give a list of objects, not a {type(given).__name__}")
    return given


def check_room(call: Call, given: Any) -> None:
    """Hold a list to be filled against the number of ranks.

    Raises:
        UsageError: it is none, or too short.
    """
    if not isinstance(given, MutableSequence):
        raise UsageError(f"{call.name}: give a list to fill, not a {type(given).__name__}")
    if len(given) < call.size:
        raise UsageError(
            f"{call.name}: the list to fill has {len(given)} entries, but the group {call.size} "
            "ranks; give [None] * world_size"
        )


def check_gather_list(call: Call, given: Any) -> None:
    """The same for the list that only the destination has.

    Raises:
        UsageError: see ``check_room``; or another rank has one.
    """
    if call.is_root:
        if given is None:
            raise UsageError(f"{call.name}: the destination must give object_gather_list=")
        check_room(call, given)
    elif given:
        raise UsageError(
            f"{call.name}: only the destination, rank {call.root} of the group, may give "
            "object_gather_list="
        )


def check_output(name: str, given: Any) -> None:
    """Hold the list for one object against what it is for.

    Raises:
        UsageError: it is none, or empty.
    """
    if not isinstance(given, MutableSequence) or not given:
        raise UsageError(f"{name}: scatter_object_output_list= must be a list with an entry")


def replace_all(name: str, origin: int, box: Any, objects: Any) -> None:
    """Replace a list's entries by another rank's, one for one.

    Raises:
        UsageError: there are not as many.
    """
    if not isinstance(box, MutableSequence) or len(box) != len(objects):
        given = f"{len(box)} entries" if isinstance(box, MutableSequence) else type(box).__name__
        raise UsageError(
            f"{name}: rank {origin} of the group sent {len(objects)} objects, but the list to fill "
            f"is one of {given}; give a list of the same length"
        )
    replace(box, objects)


def replace(box: MutableSequence[Any], objects: Sequence[Any]) -> None:
    """Replace a list's first entries."""
    for place, obj in enumerate(objects):
        box[place] = obj
