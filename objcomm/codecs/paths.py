"""Finds which member of an object a codec refused, and says where it sits."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Deep enough for any object that a person can read a path into; a cycle ends here too.
_DEPTH_MAX = 32


def blame(obj: object, can_encode: Callable[[object], bool]) -> tuple[str, object]:
    """Walk down to the innermost member that cannot be encoded by itself.

    Args:
        obj: what was refused as a whole.
        can_encode: whether a codec takes one member; called for each on the way, so this is slow
            and only for errors.

    Returns:
        Its path, such as ``obj['model'].head``, and the member.
    """
    path, culprit = "obj", obj
    for _ in range(_DEPTH_MAX):
        try:
            refused = next(
                ((step, member) for step, member in members(culprit) if not can_encode(member)),
                None,
            )
        except Exception:  # noqa: BLE001  # an attribute or repr() that raises: the path ends here
            break
        if refused is None:
            break
        path, culprit = path + refused[0], refused[1]
    return path, culprit


def members(obj: Any) -> Iterator[tuple[str, Any]]:
    """What ``obj`` holds, each with the step that leads to it.

    A mapping's keys, a function's closure and an object's attributes count as members.
    """
    if isinstance(obj, Mapping):
        for key, value in obj.items():
            yield f"[{key!r}]", value
        for key in obj:
            yield f" key {key!r}", key
    elif isinstance(obj, (list, tuple)):
        fields = getattr(obj, "_fields", None)
        for index, value in enumerate(obj):
            yield (f".{fields[index]}" if fields else f"[{index}]"), value
    elif isinstance(obj, (set, frozenset)):
        for value in obj:
            yield f" member {value!r}", value
    elif callable(obj) and getattr(obj, "__closure__", None):
        names = obj.__code__.co_freevars
        for name, cell in zip(names, obj.__closure__, strict=True):
            yield f" closure {name!r}", cell.cell_contents
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for field in dataclasses.fields(obj):
            yield f".{field.name}", getattr(obj, field.name, None)
    elif not isinstance(obj, type):
        for name, value in getattr(obj, "__dict__", {}).items():
            yield f".{name}", value
