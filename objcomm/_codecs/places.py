"""Where in an object unpickling has failed.

Python's fast unpickler does not say how far it came. So the stream is read again, by the slow one
that Python has as well, and what follows the place is followed without making anything of it: which
container takes what was not made, which one takes that, and so on. For errors only; the classes'
own functions are called a second time.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from objcomm.errors import name_of

_READ_MAX_NBYTES = 1 << 20  # the slow one takes a second for it


class Place(NamedTuple):
    """Where it failed.

    Attributes:
        path: such as ``obj['model'].head``.
        made_by: the name of the class, or of the function, that was to make the member there.
    """

    path: str
    made_by: str


class _Missing(NamedTuple):
    """What was not made, or holds it.

    Attributes:
        path: the way from the one to the other.
    """

    path: str


_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001  # C's has no stack to look at


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]  # its members have no types
    """Notes what each opcode finds on the stack, for most take it off before they fail."""

    found: Sequence[Any] = ()

    def noting(self, load: Callable[[Any], None]) -> None:
        self.found = self.stack[-3:]
        load(self)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        opcode: lambda self, load=load: self.noting(load)  # type: ignore[misc]  # one for each
        for opcode, load in _PythonUnpickler.dispatch.items()
    }


# Of opcodes that make something: where on the stack the class or the function is.
_MADE = {"REDUCE": -2, "NEWOBJ": -2, "NEWOBJ_EX": -3}
_CHANGED = {"BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"}
_OPCODES = {ord(each.code): each.name for each in pickletools.opcodes}


def place_of_failure(meta: memoryview, buffers: Sequence[Any]) -> Place | None:
    """Where an object can't be made of its pickle.

    Args:
        meta: the stream.
        buffers: its large members.

    Returns:
        The place; None where it is not known, as of what can be made at the second time.
    """
    if len(meta) > _READ_MAX_NBYTES:
        return None
    file = io.BytesIO(meta)
    unpickler = _Unpickler(file, buffers=buffers)
    try:
        unpickler.load()
    except Exception:  # noqa: BLE001  # the caller has it from the first time
        frame = unpickler._unframer.current_frame  # noqa: SLF001  # what it has read ahead
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
    else:  # these are no pickle's bytes
        return None
    if failed == "REDUCE" or failed in _CHANGED:  # the others have taken it off the stack
        unpickler.stack.pop()
    unpickler.stack.append(_Missing(""))
    stacks = [*unpickler.metastack, unpickler.stack]
    return Place("obj" + _path(stacks, dict(unpickler.memo), bytes(meta[at:])), made_by)


def _path(stacks: list[list[Any]], memo: dict[Any, Any], rest: bytes) -> str:
    """Follow what was not made to the end of the stream."""
    for opcode, argument, _ in pickletools.genops(rest):
        name = opcode.name
        if name == "MARK":
            stacks.append([])
        elif name == "MEMOIZE":
            top = stacks[-1][-1]
            memo[len(memo)] = None if type(top) is _Missing else top
        elif name in {"BINGET", "LONG_BINGET"}:
            stacks[-1].append(memo.get(argument))
        elif name == "POP":  # what sets the state of an object returns nothing of use
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
    """The way from what an opcode makes to what was not made."""
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
    return path  # where it is the container, or its class, unchanged


_ATTRIBUTE = re.compile(r"(?:\[1\])?\['(\w+)'\]")  # the second of two mappings has the slots


def _as_attribute(path: str) -> str:
    found = _ATTRIBUTE.match(path)
    return f".{found[1]}{path[found.end() :]}" if found else f" state{path}"
