"""Exceptions split into parts, and rebuilt without calling their ``__init__``.

Python's own way is to call the class with ``args`` again. That fails if its ``__init__`` takes
different arguments from those it passes to its base class, and it loses ``__cause__`` and
``__context__``. Here, the builtin base class creates the exception from its own arguments, and
everything else is restored. As in Python itself, tracebacks, whose frames refer to other objects,
and the ``obj`` of an AttributeError are not sent.
"""

import builtins
import contextlib
import copyreg
import functools
import types
from typing import Any, NamedTuple

from objcomm.errors import DecodeError, ForbiddenTypeError, shown

_NAME = "exception"

BUILTIN_ERRORS = {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException) and value.__name__ == name
}
_BUILTIN = frozenset(BUILTIN_ERRORS.values())

# Attributes that are not restored as fields, but separately or not at all.
_NO_FIELDS = {"args", "message", "exceptions", "obj"}
#: Their positions must fit together, and CPython 3.11 reads memory at any position it is given.
FIXED = (UnicodeError, SyntaxError)


# Cause, context, and whether the context is hidden. A plain tuple, which any stream may contain.
Links = tuple[BaseException | None, BaseException | None, bool]


class Parts(NamedTuple):
    """All of an exception except its class.

    Attributes:
        made_of: the arguments from which its builtin base class creates it.
        args: its ``args``; None if creating it sets the same.
        fields: what the interpreter, or a class with slots, stores outside ``__dict__``, if
            creating it sets something else.
        attributes: its ``__dict__``, including notes.
        links: its cause and context; None if there are none.
    """

    made_of: tuple[Any, ...]
    args: tuple[Any, ...] | None
    fields: dict[str, Any]
    attributes: dict[str, Any]
    links: Links | None


@functools.lru_cache(maxsize=256)
def _base(kind: Any) -> type[BaseException]:
    """Return the builtin exception class from which ``kind`` inherits its memory layout."""
    return kind if kind in _BUILTIN else _base(kind.__base__)


@functools.lru_cache(maxsize=256)
def _fields(kind: Any) -> dict[str, Any]:
    """Return the descriptors of what an instance stores outside ``__dict__``."""
    own = (types.MemberDescriptorType, types.GetSetDescriptorType)
    found = {
        name: descriptor
        for each in _base(kind).__mro__
        for name, descriptor in vars(each).items()
        if isinstance(descriptor, own) and name not in _NO_FIELDS and not name.startswith("_")
    }
    for each in kind.__mro__:
        for name in copyreg._slotnames(kind):  # type: ignore[attr-defined]  # noqa: SLF001  # as pickle does
            if isinstance(descriptor := vars(each).get(name), types.MemberDescriptorType):
                found.setdefault(name, descriptor)
    return found


def is_rebuilt_by_args(kind: Any) -> bool:
    """Return whether the class does not define how it is pickled."""
    base = _base(kind)
    names = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    return kind not in copyreg.dispatch_table and all(
        getattr(kind, name) is getattr(base, name) for name in names
    )


def links_of(error: BaseException) -> Links | None:
    """Return an error's cause and context; None if there are none."""
    links = error.__cause__, error.__context__, error.__suppress_context__
    is_alone = links[0] is links[1] is None
    return None if is_alone and not links[2] else links


def take_apart(error: BaseException) -> Parts:
    """Split an exception into the arguments of ``make`` and ``complete``.

    Raises:
        Exception: its base class cannot create another one, as may happen in extension modules.
    """
    made_of = args = error.args
    if isinstance(error, OSError):
        made_of = OSError.__reduce__(error)[1]  # type: ignore[assignment]  # includes the file name
    elif isinstance(error, BaseExceptionGroup) and args[:1] != (error.message,):
        made_of = error.message, list(error.exceptions)
    kind: Any = type(error)
    another = make(kind, made_of)
    fields = {}
    for name, descriptor in _fields(kind).items():
        value, usual = (_value(descriptor, each) for each in (error, another))
        if value is not _NOTHING and not _is_same(value, usual):
            fields[name] = value
    is_same = len(args) == len(another.args) and all(map(_is_same, args, another.args))
    return Parts(made_of, None if is_same else args, fields, vars(error), links_of(error))


_NOTHING = object()


def _value(descriptor: Any, error: BaseException) -> Any:
    try:
        return descriptor.__get__(error)
    except AttributeError:
        return _NOTHING


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) is int and value == other)


def make(kind: Any, made_of: tuple[Any, ...]) -> BaseException:
    """Create an exception with its builtin base class alone."""
    base = _base(kind)
    error: BaseException = base.__new__(kind, *made_of)
    base.__init__(error, *made_of)
    return error


def complete(error: BaseException, rest: tuple[Any, ...]) -> None:
    """Set everything that ``make`` did not set.

    Args:
        error: the result of ``make``.
        rest: all fields of ``Parts`` except the first.
    """
    args, fields, attributes, links = rest
    if args is not None:
        error.args = args
    kind: Any = type(error)
    descriptors = _fields(kind)
    for name, value in fields.items():
        descriptors[name].__set__(error, value)
    vars(error).update(attributes)
    _link(error, links)


def complete_with_state(error: BaseException, rest: tuple[Any, ...]) -> None:
    """Complete an exception whose class defines how it is pickled.

    Args:
        error: the exception that the class created.
        rest: the state to set, its notes and its links; None for each that is missing.
    """
    state, notes, links = rest
    if state is not None:
        error.__setstate__(state)
    if notes is not None:
        error.__notes__ = notes
    _link(error, links)


def _link(error: BaseException, links: Links | None) -> None:
    if links is not None:
        error.__cause__, error.__context__, error.__suppress_context__ = links


def reduced(error: BaseException) -> Any:
    """Return the result of a pickler's ``reducer_override`` for an exception."""
    kind = type(error)
    if is_rebuilt_by_args(kind):
        with contextlib.suppress(Exception):  # an extension's class that only it can create
            made_of, *others = take_apart(error)
            call = make, (kind, made_of)
            return (*call, tuple(others), None, None, complete) if any(others) else call
    notes, links = vars(error).get("__notes__"), links_of(error)
    if notes is links is None:
        return NotImplemented
    reducer = copyreg.dispatch_table.get(kind)
    own: Any = reducer(error) if reducer else error.__reduce_ex__(5)
    function, arguments, state, listed, mapped, set_state = (*own, *[None] * 4)[:6]
    if set_state is not None:
        raise TypeError(
            "a __reduce__ with a state setter does not keep cause, context or notes; "
            "send the error's text"
        )
    rest = state, notes, links
    return function, arguments, rest, listed, mapped, complete_with_state


def check_parts(error: Any, rest: tuple[Any, ...]) -> None:
    """Reject parts that ``complete`` must not receive.

    Raises:
        DecodeError: they are not parts of an exception.
        ForbiddenTypeError: they set an attribute that only Python itself sets.
    """
    if len(rest) != len(Parts._fields) - 1:
        raise DecodeError(_NAME, "these parts do not complete an exception")
    args, fields, attributes, links = rest
    kind: Any = type(error)
    is_plain = isinstance(error, BaseException) and type(fields) is type(attributes) is dict
    if not is_plain or (args is not None and type(args) is not tuple):
        raise DecodeError(_NAME, "these parts do not complete an exception")
    for name in fields:
        if name not in _fields(kind) or isinstance(error, FIXED):
            raise ForbiddenTypeError(_NAME, f"an exception's own {shown(name)} is set")
    for name, value in attributes.items():
        is_notes = name == "__notes__" and type(value) is list
        if is_notes and all(type(note) is str for note in value):  # a range could be huge
            continue
        if type(name) is not str or name.startswith("__"):
            raise ForbiddenTypeError(_NAME, f"an exception's own {shown(name)} is set")
    check_links(links)


def check_links(links: Any) -> None:
    """Reject invalid links."""
    if links is None:
        return
    is_links = type(links) in {list, tuple} and len(links) == 3  # noqa: PLR2004  # see Links
    if not is_links or type(links[2]) is not bool:
        raise DecodeError(_NAME, "the links of an exception are not a triple")
    if not all(each is None or isinstance(each, BaseException) for each in links[:2]):
        raise DecodeError(_NAME, "the cause of an exception is not an exception")
