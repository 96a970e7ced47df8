"""Finds which member of an object a codec refused, and says where it sits."""

import dataclasses
import types
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
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
        yield from ((f" key {key!r}", key) for key in obj)
    elif isinstance(obj, (list, tuple)):
        names = getattr(obj, "_fields", None)
        steps = [f".{name}" for name in names] if names else [f"[{at}]" for at in range(len(obj))]
        yield from zip(steps, obj, strict=True)
    elif isinstance(obj, (set, frozenset)):
        yield from ((f" member {value!r}", value) for value in obj)
    elif not isinstance(obj, type):
        yield from _attributes(obj)


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, types.FunctionType) and obj.__closure__:
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__, strict=True):
            yield f" closure {name!r}", cell.cell_contents
    elif dataclasses.is_dataclass(obj):
        for field in dataclasses.fields(obj):
            yield f".{field.name}", getattr(obj, field.name, None)
    else:
        for name, value in getattr(obj, "__dict__", {}).items():
            yield f".{name}", value
