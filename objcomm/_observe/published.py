"""Public functions and classes as users see them: their names, and the tracebacks of their errors.

A traceback has the program's own frames, and not objcomm's: the reader wants the line of the call
and the error. Between them would be 6 to 12 frames, and as many for each error that led to it.
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

# Their frames stand between those of objcomm.
_BETWEEN = frozenset({"concurrent.futures._base", "contextlib"})

# What is raised on purpose; any other error that objcomm's own code raises is a defect of it.
_DELIBERATE = (ObjcommError, TimeoutError, CancelledError)


def publish(module: str, members: Mapping[str, Any]) -> dict[str, Any]:
    """Public names go by the module that users import them from, wherever their code stands.

    So tracebacks and pickles have names that stay when code moves. Compiled functions call them as
    they are, and what functions and blocks raise shows no frames of objcomm.

    Args:
        module: the name of that module.
        members: functions and classes by their names in it; modules are let be.

    Returns:
        What the module is to have by these names.
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
    """The same for what a block begins and ends with, once where several inherit that."""
    for base in kind.__mro__:
        for name in vars(base).keys() & {"__init__", "__enter__", "__exit__"}:
            method = vars(base)[name]
            if isinstance(method, FunctionType) and not hasattr(method, "__wrapped__"):
                setattr(base, name, folded(method))


def folded(function: Callable[P, R]) -> Callable[P, R]:
    """The same function for users: what it raises shows no frames of objcomm."""

    def public(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _name_keywords(error, kwargs)
            fold(error)
            raise  # without a value, it adds no frame of its own

    keep_eager([public])  # before it is dressed: dynamo looks at the code of what it wraps
    return functools.update_wrapper(public, function)


def _name_keywords(error: BaseException, given: Mapping[str, object]) -> None:
    """Say the right words, where a call did not begin because of keywords of another library."""
    has_begun = error.__traceback__ is None or error.__traceback__.tb_next is not None
    if isinstance(error, TypeError) and not has_begun:
        for name in given.keys() & KEYWORDS_ELSEWHERE.keys():
            error.add_note(f"{name}= is called {KEYWORDS_ELSEWHERE[name]} in objcomm")


def fold(error: BaseException) -> None:
    """Drop objcomm's frames from an error's traceback, and from those of all that led to it."""
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
    """Whether objcomm's own code has raised what it should not: its frames are needed then."""
    if isinstance(error, _DELIBERATE) or not isinstance(error, Exception):
        return False
    frames = _frames(error.__traceback__)
    # A single frame is that of a call whose arguments the function does not have.
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
