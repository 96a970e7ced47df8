"""Errors of objcomm, in the place of another library's functions: also what these raised there.

Knows which class of error a program may expect; knows nothing of what raises it.
"""

import builtins
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from objcomm.errors import ObjcommError, name_of

T = TypeVar("T")
P = ParamSpec("P")


def raising(
    converted: Callable[[ObjcommError], ObjcommError],
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function whose errors of objcomm's shall leave it as ``converted`` gives them."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def raises(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except ObjcommError as error:
                # Raised where none is handled, so that its context is the caller's. In no
                # variable: its traceback would hold that, and so the error itself.
                left = [converted(error)]
            raise left.pop()

        return raises

    return decorate


def builtin_base(error: BaseException | None) -> type[Exception] | None:
    """The builtin class by which a program may catch an error; None if only Exception is left.

    No group of exceptions, which is made of others.
    """
    known = [each for each in type(error).__mro__ if vars(builtins).get(name_of(each)) is each]
    if known[0] is Exception or not issubclass(known[0], Exception):
        return None
    return None if issubclass(known[0], BaseExceptionGroup) else known[0]
