"""Make objcomm's errors catchable as those of the library whose functions it replaces.

Knows which class of error a program may expect, but not what raises it.
"""

import builtins
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ParamSpec, TypeVar

from objcomm._observe.published import folded
from objcomm.errors import CaughtAs, CollectiveError, EncodeError, ObjcommError, caught_as, name_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")

#: Returns the error to raise in place of another.
Conversion = Callable[[ObjcommError], ObjcommError]


def raising(conversion: Conversion) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to raise what ``conversion`` returns for an error of objcomm."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        def raises(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except ObjcommError as error:
                # Raised outside the handler, so that its context is the caller's. Popped from a
                # list, because a variable in its traceback would refer back to the error.
                left = [conversion(error)]
            raise left.pop()

        return folded(raises, like=function)

    return decorate


class RaisingBlock(AbstractContextManager[T_co]):
    """Applies ``as_it_raised`` to errors of a block's entry and exit, but not of its body."""

    def __init__(self, block: AbstractContextManager[T_co]) -> None:
        self._begin = raising(as_it_raised)(block.__enter__)
        self._end = raising(as_it_raised)(block.__exit__)

    def __enter__(self) -> T_co:
        return self._begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._end(kind, error, traceback)


def as_it_raised(error: ObjcommError) -> ObjcommError:
    """Convert an error for a library that is a thin layer over torch's collectives.

    Such a library lets an exception of this rank's own code through, so the converted error is also
    of that exception's builtin class. Its other errors are RuntimeErrors, from torch or a check.
    """
    if isinstance(error, CaughtAs):
        return error  # already converted
    own = error.__cause__ if isinstance(error, CollectiveError) else None
    return caught_as(error, builtin_base(raised_in(own)) or RuntimeError)


def raised_in(cause: BaseException | None) -> BaseException | None:
    """Return the program's own exception; for an EncodeError, the one that caused it."""
    return cause.__cause__ if isinstance(cause, EncodeError) else cause


def builtin_base(error: BaseException | None) -> type[Exception] | None:
    """Return the builtin class by which a program may catch an error.

    None if there is none narrower than Exception, or if it is an exception group.
    """
    known = [each for each in type(error).__mro__ if vars(builtins).get(name_of(each)) is each]
    if known[0] is Exception or not issubclass(known[0], Exception):
        return None
    return None if issubclass(known[0], BaseExceptionGroup) else known[0]
