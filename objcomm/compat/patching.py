"""Functions in the places of a library's own, for as long as a patch holds them there.

Knows modules and functions; knows nothing of what they do.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Self, TypeAlias

from objcomm._observe.published import folded
from objcomm._observe.tracing import keep_eager
from objcomm._transport.threads import Alone

Function = Callable[..., Any]


# A module, a name in it, what stood there, and what stands there now.
_Place: TypeAlias = tuple[ModuleType, str, Function, Function]


class Switch:
    """Puts functions in their places while anybody holds it; see ``Patch``.

    Args:
        modules: gives the modules in which they have places.
        functions: what stands there then, by name.
        serves: whether a call with this ``group`` is for them, or for what stood there before.
    """

    def __init__(
        self,
        modules: Callable[[], Sequence[ModuleType]],
        functions: Mapping[str, Function],
        serves: Callable[[Any], bool],
    ) -> None:
        self._modules = modules
        self._functions = functions
        self._serves = serves
        names = {each: list(inspect.signature(each).parameters) for each in functions.values()}
        self._options = {each: (set(known), known.index("group")) for each, known in names.items()}
        self._lock = threading.RLock()
        self._change = Alone("a patch")
        self._holders: set[object] = set()
        self._places: list[_Place] = []

    def hold(self, holder: object) -> None:
        """Put the functions in their places, if they are not there."""
        with self._lock, self._change:
            self._holders.add(holder)
            if not self._places:
                self._places = self._all_places()
                for module, name, _, replacement in self._places:
                    setattr(module, name, replacement)

    def release(self, holder: object) -> None:
        """Put back what stood there, if nobody else holds the switch.

        Where something else stands by now it stays; what it calls of ours acts as the original.
        """
        with self._lock, self._change:
            self._holders.discard(holder)
            if self._holders:
                return
            for module, name, original, replacement in self._places:
                if getattr(module, name, None) is replacement:
                    setattr(module, name, original)
            self._places = []

    def _all_places(self) -> list[_Place]:
        """In the modules, and wherever a module has imported one of their functions by its name."""
        replacements: dict[Function, Function] = {}  # what is one function stays one
        places: list[_Place] = []
        for module in self._modules():
            for name, function in self._functions.items():
                original = getattr(module, name)
                replacement = replacements.get(original) or self._replacement(function, original)
                replacements[original] = replacement
                places.append((module, name, original, replacement))
        found = {id(original): (original, made) for original, made in replacements.items()}
        known = {(module, name) for module, name, _, _ in places}
        for module in tuple(sys.modules.values()):
            if isinstance(module, ModuleType):
                # Past a ``__getattribute__`` that would load a module which is lazy.
                names = tuple(ModuleType.__getattribute__(module, "__dict__").items())
                for name, value in names:
                    if id(value) in found and (module, name) not in known:
                        places.append((module, name, *found[id(value)]))
        return places

    def _replacement(self, function: Function, original: Function) -> Function:
        known, at = self._options[function]

        def replacement(*args: Any, **kwargs: Any) -> Any:
            group = args[at] if len(args) > at else kwargs.get("group")
            # A newer library may have options that the function does not know.
            is_known = kwargs.keys() <= known and len(args) <= len(known)
            if self._holders and is_known and self._serves(group):
                return function(*args, **kwargs)
            return original(*args, **kwargs)

        keep_eager([replacement])
        return folded(functools.update_wrapper(replacement, original))


class Patch:
    """Holds the functions in their places until ``undo``, or the end of a block."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        switch.hold(self)

    def undo(self) -> None:
        """Let go; does nothing if that was done. What stood there comes back with the last one."""
        self._switch.release(self)

    def __enter__(self) -> Self:
        self._switch.hold(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()
