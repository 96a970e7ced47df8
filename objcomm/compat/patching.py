"""Replace functions of a library with others while a patch is active.

Knows modules and functions, but not what the functions do.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Self, TypeAlias

from objcomm._observe.published import folded
from objcomm._transport.threads import Alone

Function = Callable[..., Any]


# A module, a name in it, the original function and its replacement.
_Place: TypeAlias = tuple[ModuleType, str, Function, Function]


class Switch:
    """Replaces functions while it has at least one holder; see ``Patch``.

    Args:
        modules: returns the modules in which to replace functions.
        functions: the new functions by name.
        serves: whether a new function serves calls with this ``group``; otherwise the original
            does.
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
        """Add a holder, and replace the functions if it is the first."""
        with self._lock, self._change:
            self._holders.add(holder)
            if not self._places:
                self._places = self._all_places()
                for module, name, _, replacement in self._places:
                    setattr(module, name, replacement)

    def release(self, holder: object) -> None:
        """Remove a holder, and restore the original functions if it was the last.

        A name that has been assigned something else meanwhile keeps it. A replacement that is still
        referenced elsewhere calls the original from then on.
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
        """Find the functions in ``modules``, and in every module that imported one by name."""
        replacements: dict[Function, Function] = {}  # one for each original
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
                # Bypasses a ``__getattribute__`` that would load a lazy module.
                names = tuple(ModuleType.__getattribute__(module, "__dict__").items())
                for name, value in names:
                    if id(value) in found and (module, name) not in known:
                        places.append((module, name, *found[id(value)]))
        return places

    def _replacement(self, function: Function, original: Function) -> Function:
        known, at = self._options[function]

        def replacement(*args: Any, **kwargs: Any) -> Any:
            group = args[at] if len(args) > at else kwargs.get("group")
            # A newer version of the library may have options that the function does not know.
            is_known = kwargs.keys() <= known and len(args) <= len(known)
            if self._holders and is_known and self._serves(group):
                return function(*args, **kwargs)
            return original(*args, **kwargs)

        return folded(replacement, like=original)


class Patch:
    """Keeps functions replaced until ``undo`` or the end of the ``with`` block."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        switch.hold(self)

    def undo(self) -> None:
        """End this patch if it is active; the last one to end restores the original functions."""
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
