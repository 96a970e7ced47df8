"""Public functions and classes as users see them: their names, and the tracebacks of their errors.

Tracebacks show the program's frames but not objcomm's, because the reader wants the line of the
call and the error. Otherwise there would be 6 to 12 frames in between, and as many for each error
in the chain.
"""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from types import FunctionType, ModuleType, TracebackType
from typing import Any, ParamSpec, TypeVar

from objcomm._config import KEYWORDS_ELSEWHERE, shows_full_tracebacks
from objcomm._observe.tracing import keep_eager
from objcomm._wire.failure_message import is_own
from objcomm.errors import ObjcommError

P = ParamSpec("P")
R = TypeVar("R")

# Modules whose frames occur between those of objcomm.
_BETWEEN = frozenset({"concurrent.futures._base", "contextlib"})

# Raised on purpose. Any other exception raised by objcomm's own code is a bug in objcomm.
_DELIBERATE = (ObjcommError, TimeoutError, CancelledError)


def publish(module: str, members: Mapping[str, Any]) -> dict[str, Any]:
    """Present public names as members of the module from which users import them.

    Tracebacks and pickles then contain names that do not change when code moves. Compiled functions
    call the members without compiling them, and errors of functions and context managers do not
    show objcomm's frames.

    Args:
        module: the name of that module.
        members: functions and classes by their names in the module; modules are ignored.

    Returns:
        The members that the module must define under these names.
    """
    published = dict(members)
    for name, each in members.items():
        if isinstance(each, ModuleType):
            continue
        each.__module__ = module
        if isinstance(each, FunctionType):
            published[name] = folded(each)
        elif hasattr(each, "__exit__"):
            _fold_block(each)
    keep_eager(members.values())
    return published


def _fold_block(kind: type) -> None:
    """Fold the methods of a context manager, once per method even if several classes inherit it."""
    for base in kind.__mro__:
        for name in vars(base).keys() & {"__init__", "__enter__", "__exit__"}:
            method = vars(base)[name]
            if isinstance(method, FunctionType) and not hasattr(method, "__wrapped__"):
                setattr(base, name, folded(method))


def folded(function: Callable[P, R], like: Callable[..., Any] | None = None) -> Callable[P, R]:
    """Wrap a function for users: the errors that it raises do not show objcomm's frames.

    Args:
        function: the function; compiled functions call it without compiling it.
        like: the function whose name and signature users see, if ``function`` wraps another one.
    """

    def public(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _name_keywords(error, kwargs)
            fold(error)
            raise  # a bare raise does not add a frame

    # Before update_wrapper, after which ``function`` would be marked in place of ``public``.
    keep_eager([function, public])
    return functools.update_wrapper(public, like or function)


def _name_keywords(error: BaseException, given: Mapping[str, object]) -> None:
    """Add the right name to a TypeError caused by a keyword argument of another library."""
    has_begun = error.__traceback__ is None or error.__traceback__.tb_next is not None
    if isinstance(error, TypeError) and not has_begun:
        for name in given.keys() & KEYWORDS_ELSEWHERE.keys():
            error.add_note(f"{name}= is called {KEYWORDS_ELSEWHERE[name]} in objcomm")


def fold(error: BaseException) -> None:
    """Remove objcomm's frames from the tracebacks of an error and of all errors in its chain."""
    if shows_full_tracebacks() or _is_defect(error):
        return
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _without_own(each.__traceback__)
        left += [each.__cause__, each.__context__]
        left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def _is_defect(error: BaseException) -> bool:
    """Whether an error is a bug in objcomm, so that its frames are needed."""
    if isinstance(error, _DELIBERATE) or not isinstance(error, Exception):
        return False
    frames = _frames(error.__traceback__)
    # A single frame means that the call itself failed because of wrong arguments.
    return len(frames) > 1 and _is_own(frames[-1])


def _without_own(traceback: TracebackType | None) -> TracebackType | None:
    frames = _frames(traceback)
    if not any(map(_is_own, frames)):
        return traceback
    kept: TracebackType | None = None
    for each in reversed(frames):
        if not _is_own(each) and each.tb_frame.f_globals.get("__name__") not in _BETWEEN:
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _is_own(entry: TracebackType) -> bool:
    return is_own(entry.tb_frame.f_code.co_filename)


def _frames(traceback: TracebackType | None) -> list[TracebackType]:
    found = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found
