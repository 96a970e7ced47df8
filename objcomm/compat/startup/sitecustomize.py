"""Python imports this at startup if ``objcomm.run`` has put this folder on its path.

Replaces torch's object collectives as soon as this process has imported torch; a process that never
imports torch imports nothing of objcomm. The path, and any other ``sitecustomize`` after this one,
end up as they would without it. Every Python process that the program starts runs this, so it
imports nothing else.
"""

import os
import sys

TYPE_CHECKING = False  # typing's own takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_FOLDER = os.path.dirname(__file__)  # noqa: PTH120  # pathlib takes long to import, too
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))  # noqa: PTH120  # likewise


class _Finder:
    """Finds torch where it would be found anyway, and objcomm where this file is.

    Once torch is imported, objcomm is imported too; once that is imported, from anywhere, the
    functions are replaced.

    Args:
        is_first: whether this process runs the program itself.
        has_report: whether to report at its end what the functions have cost.
    """

    def __init__(self, *, is_first: bool, has_report: bool) -> None:
        self._is_first = is_first
        self._has_report = has_report

    def find_spec(
        self, name: str, path: "object" = None, target: "object" = None
    ) -> "ModuleSpec | None":
        """See ``importlib.abc.MetaPathFinder``."""
        if name == "torch":
            others = [each.find_spec for each in sys.meta_path if each is not self]
            specs = (find(name, path, target) for find in others)  # type: ignore[arg-type]  # passed on
            return _followed(next((each for each in specs if each), None), self._on_torch)
        if name == "objcomm":
            from importlib.machinery import PathFinder  # noqa: PLC0415  # only if needed

            return _followed(PathFinder.find_spec(name, [_ROOT]), self._on_objcomm)
        return None

    def _on_torch(self) -> None:
        import objcomm  # noqa: F401, PLC0415  # not before torch is imported

    def _on_objcomm(self) -> None:
        from objcomm.compat.program import begin  # noqa: PLC0415  # likewise

        begin(is_first=self._is_first, has_report=self._has_report)


def _followed(spec: "ModuleSpec | None", follow: "Callable[[], None]") -> "ModuleSpec | None":
    """Make the loader of ``spec`` call a function after it has imported the module."""
    if spec is not None and spec.loader is not None:
        load = spec.loader.exec_module

        def load_and_follow(module: "ModuleType") -> None:
            load(module)
            follow()

        spec.loader.exec_module = load_and_follow  # type: ignore[method-assign]  # only for this spec
    return spec


def _watch() -> None:
    """Watch for torch, if this Python belongs to the environment that ``objcomm.run`` used."""
    pid, has_report, prefix = os.environ.get("OBJCOMM_RUN", "0 0 ").split(" ", 2)
    if prefix == sys.prefix:
        finder = _Finder(is_first=int(pid) == os.getpid(), has_report=has_report == "1")
        sys.meta_path.insert(0, finder)


def _give_way() -> None:
    """Restore the path, and import the ``sitecustomize`` that this one has hidden."""
    sys.path[:] = [each for each in sys.path if each != _FOLDER]
    this = sys.modules.pop(__name__)
    try:
        __import__(__name__)  # the hidden one
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, this)


_watch()
_give_way()
