"""Errors of objcomm, in the place of another library's functions: also what these raised there.

Knows which class of error a program may expect; knows nothing of what raises it.
"""

import builtins
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ParamSpec, TypeVar

from objcomm._observe.published import folded
from objcomm._observe.tracing import keep_eager
from objcomm.errors import CaughtAs, CollectiveError, EncodeError, ObjcommError, caught_as, name_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")

#: Gives an error as it is to leave a function.
Conversion = Callable[[ObjcommError], ObjcommError]


def raising(conversion: Conversion) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function whose errors of objcomm's leave it as ``conversion`` gives them."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        def raises(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except ObjcommError as error:
                # Raised where none is handled, so that its context is the caller's. In no
                # variable: its traceback would hold that, and so the error itself.
                left = [conversion(error)]
            raise left.pop()

        keep_eager([raises])
        return folded(functools.update_wrapper(raises, function))

    return decorate


class RaisingBlock(AbstractContextManager[T_co]):
    """The same for what a block begins and ends with; errors of its body are not touched."""

    def __init__(self, block: AbstractContextManager[T_co], conversion: Conversion) -> None:
        self._begin = raising(conversion)(block.__enter__)
        self._end = raising(conversion)(block.__exit__)

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
    """An error in the place of a library that had torch's collectives below, and nothing besides.

    Where this rank's own code raised, the library let that pass: it is also that exception's
    builtin class. Everything else came from torch, or from a check, as a RuntimeError.
    """
    if isinstance(error, CaughtAs):
        return error  # as it was raised
    own = error.__cause__ if isinstance(error, CollectiveError) else None
    return caught_as(error, builtin_base(raised_in(own)) or RuntimeError)


def raised_in(cause: BaseException | None) -> BaseException | None:
    """What a program's own code raised: of an object that can't be encoded what its code did."""
    return cause.__cause__ if isinstance(cause, EncodeError) else cause


def builtin_base(error: BaseException | None) -> type[Exception] | None:
    """The builtin class by which a program may catch an error; None if only Exception is left.

    No group of exceptions, which is made of others.
    """
    known = [each for each in type(error).__mro__ if vars(builtins).get(name_of(each)) is each]
    if known[0] is Exception or not issubclass(known[0], Exception):
        return None
    return None if issubclass(known[0], BaseExceptionGroup) else known[0]
