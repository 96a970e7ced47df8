"""Finds where in an object unpickling failed.

Python's fast unpickler does not report its position. So its slow unpickler reads the stream again,
up to the failure. The rest of the stream is then followed without creating objects, to find which
container receives the missing object, which one receives that container, and so on. This is used
only for errors; it calls the classes' functions a second time.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from objcomm.errors import name_of

_READ_MAX_NBYTES = 1 << 20  # takes the slow unpickler one second


class Place(NamedTuple):
    """Where unpickling failed.

    Attributes:
        path: such as ``obj['model'].head``.
        made_by: name of the class or function that should have created the member there.
    """

    path: str
    made_by: str


class _Missing(NamedTuple):
    """Stands for the object that was not created, or for one that contains it.

    Attributes:
        path: the path from this object to the missing one.
    """

    path: str


_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001  # the C version does not expose its stack


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]  # its members have no types
    """Records what each opcode finds on the stack, because most pop it before they fail."""

    found: Sequence[Any] = ()

    def noting(self, load: Callable[[Any], None]) -> None:
        self.found = self.stack[-3:]
        load(self)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        opcode: lambda self, load=load: self.noting(load)  # type: ignore[misc]  # one function per opcode
        for opcode, load in _PythonUnpickler.dispatch.items()
    }


# For opcodes that create an object, the stack position of the class or function.
_MADE = {"REDUCE": -2, "NEWOBJ": -2, "NEWOBJ_EX": -3}
_CHANGED = {"BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"}
_OPCODES = {ord(each.code): each.name for each in pickletools.opcodes}


def place_of_failure(meta: memoryview, buffers: Sequence[Any]) -> Place | None:
    """Find where an object cannot be created from its pickle.

    Args:
        meta: the stream.
        buffers: its large members.

    Returns:
        The place; None if it is unknown, as when the second attempt succeeds.
    """
    if len(meta) > _READ_MAX_NBYTES:
        return None
    file = io.BytesIO(meta)
    unpickler = _Unpickler(file, buffers=buffers)
    try:
        unpickler.load()
    except Exception:  # noqa: BLE001  # the caller already has the error
        frame = unpickler._unframer.current_frame  # noqa: SLF001  # read ahead, not yet used
        ahead = len(frame.getbuffer()) - frame.tell() if frame else 0
        at = file.tell() - ahead
        failed = _OPCODES.get(meta[at - 1], "")
    else:
        return None
    found = unpickler.found
    if failed == "STACK_GLOBAL":
        made_by = ".".join(map(str, found[-2:]))
    elif failed in _MADE:
        made_by = name_of(found[_MADE[failed]], "__qualname__")
    elif failed in _CHANGED:
        made_by = name_of(type(unpickler.stack[-1]), "__qualname__")
    else:  # not a pickle
        return None
    if failed == "REDUCE" or failed in _CHANGED:  # the others have already popped it
        unpickler.stack.pop()
    unpickler.stack.append(_Missing(""))
    stacks = [*unpickler.metastack, unpickler.stack]
    return Place("obj" + _path(stacks, dict(unpickler.memo), bytes(meta[at:])), made_by)


def _path(stacks: list[list[Any]], memo: dict[Any, Any], rest: bytes) -> str:
    """Follow the missing object to the end of the stream, and return its path."""
    for opcode, argument, _ in pickletools.genops(rest):
        name = opcode.name
        if name == "MARK":
            stacks.append([])
        elif name == "MEMOIZE":
            top = stacks[-1][-1]
            memo[len(memo)] = None if type(top) is _Missing else top
        elif name in {"BINGET", "LONG_BINGET"}:
            stacks[-1].append(memo.get(argument))
        elif name == "POP":  # the result of setting an object's state
            dropped = stacks[-1].pop()
            if type(dropped) is _Missing and type(stacks[-1][-1]) is not _Missing:
                path = dropped.path.removeprefix(" arguments[1]")
                stacks[-1][-1] = _Missing(_as_attribute(path))
        elif name == "STOP":
            top = stacks[-1][-1]
            return top.path if type(top) is _Missing else ""
        else:
            _follow(stacks, opcode, argument)
    return ""


def _follow(stacks: list[list[Any]], opcode: pickletools.OpcodeInfo, argument: Any) -> None:
    before = opcode.stack_before
    members = []
    if pickletools.markobject in before:
        members = stacks.pop()
        before = before[: before.index(pickletools.markobject)]
    at = len(stacks[-1]) - len(before)
    taken = [*stacks[-1][at:], *members]
    del stacks[-1][at:]
    for number, each in enumerate(taken):
        if type(each) is _Missing:
            stacks[-1].append(_Missing(_step(opcode.name, taken, number, each.path)))
            return
    stacks[-1] += [argument] * len(opcode.stack_after)


def _step(name: str, taken: Sequence[Any], at: int, path: str) -> str:
    """Return the path from the object that an opcode creates to the missing one."""
    if name.startswith("TUPLE"):
        return f"[{at}]{path}"
    if name == "FROZENSET" or (name == "ADDITEMS" and at):
        return f" member{path}"
    if name == "BUILD" and at:
        return _as_attribute(path)
    if at and name in {"APPEND", "APPENDS"}:
        path = f"[{len(taken[0]) + at - 1}]{path}"
    elif at and name in {"SETITEM", "SETITEMS"}:
        path = f" key{path}" if at % 2 else f"[{taken[at - 1]!r}]{path}"
    elif at:
        path = f" arguments{path}"
    return path  # it is the container or its class


_ATTRIBUTE = re.compile(r"(?:\[1\])?\['(\w+)'\]")  # the second of two mappings holds the slots


def _as_attribute(path: str) -> str:
    found = _ATTRIBUTE.match(path)
    return f".{found[1]}{path[found.end() :]}" if found else f" state{path}"
