"""Classes that a user admits to the ``msgpack`` codec, by a name that all ranks agree on."""

import dataclasses
import enum
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

from objcomm.codecs.exceptions import check_arguments
from objcomm.codecs.rules import check_attributes, member_of
from objcomm.errors import DecodeError, UsageError, shown

C = TypeVar("C", bound=type)

_NAME = "msgpack"

# An object's own part where all its state is in __dict__; a builtin base makes it larger.
_PLAIN_BASICSIZE = 32


class Entry(NamedTuple):
    """How one class is taken apart and rebuilt."""

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class _Classes:
    """Both directions; replaced as one, so that readers need no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: tuple[dict[type, Entry], dict[str, tuple[type, Entry]]] = ({}, {})

    def add(self, cls: type, entry: Entry) -> None:
        with self._lock:
            by_class, by_name = self._entries
            other = by_name.get(entry.name, (cls, entry))[0]
            same_source = (other.__module__, other.__qualname__) == (
                cls.__module__,
                cls.__qualname__,
            )
            if other is not cls and not same_source:
                raise UsageError(
                    f"{entry.name!r} already stands for {other!r}; register {cls!r} with name="
                )
            self._entries = (
                {**by_class, cls: entry},
                {**by_name, entry.name: (cls, entry)},
            )

    def by_class(self, cls: type) -> Entry | None:
        return self._entries[0].get(cls)

    def by_name(self, name: str) -> Entry | None:
        found = self._entries[1].get(name)
        return found and found[1]


classes = _Classes()


@overload
def register(
    cls: C,
    *,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    name: str | None = None,
) -> C: ...


@overload
def register(
    *,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    name: str | None = None,
) -> Callable[[C], C]: ...


def register(
    cls: Any = None,
    *,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    name: str | None = None,
) -> Any:
    """Admit a class to ``codec="msgpack"``; call it on every rank, also as a decorator.

    Dataclasses, named tuples, enums, exceptions and classes that keep their state in ``__dict__``
    need no functions: their members are encoded one by one, and they are rebuilt as pickle does it,
    without a call of ``__init__``.

    Args:
        cls: the class; its subclasses are not admitted with it.
        encode: turns an instance into plain data (or into other registered classes).
        decode: turns that data into an instance; give both or neither.
        name: what travels; ``module.qualname`` if not given. The same on every rank.

    Returns:
        ``cls``.

    Raises:
        UsageError: only one function was given, the class's state can't be found without them, or
            another class has the name.

    Examples:
        >>> import dataclasses, objcomm
        >>> @objcomm.register
        ... @dataclasses.dataclass
        ... class Metrics:
        ...     loss: float
        ...     shape: tuple[int, ...]
        >>> objcomm.from_tensor(objcomm.to_tensor(Metrics(0.5, (2, 3)), codec="msgpack"))
        Metrics(loss=0.5, shape=(2, 3))
    """
    if cls is None:
        return lambda decorated: register(decorated, encode=encode, decode=decode, name=name)
    if (encode is None) != (decode is None):
        raise UsageError("register needs both encode= and decode=, or neither")
    if encode is None or decode is None:
        encode, decode = _derived(cls)
    classes.add(cls, Entry(name or f"{cls.__module__}.{cls.__qualname__}", encode, decode))
    return cls


def _derived(cls: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if issubclass(cls, enum.Flag):
        return (lambda member: member.value), lambda value: member_of(
            cls, _checked(cls, value, int)
        )
    if issubclass(cls, enum.Enum):
        return (lambda member: member.name), lambda name: cls[_checked(cls, name, str)]
    if issubclass(cls, tuple) and hasattr(cls, "_make"):
        return list, lambda members: cls._make(_checked(cls, members, list))
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        return (
            lambda obj: [getattr(obj, name) for name in _all_of(obj, names)],
            lambda values: _filled(cls, dict(zip(names, _checked(cls, values, list), strict=True))),
        )
    if issubclass(cls, BaseException):
        return (lambda error: [error.args, vars(error)]), lambda parts: _raised(cls, parts)
    has_slots = any("__slots__" in vars(base) for base in cls.__mro__[:-1])
    if has_slots or cls.__basicsize__ > _PLAIN_BASICSIZE:
        raise UsageError(
            f"{cls!r} keeps state outside of __dict__; register it with encode= and decode="
        )
    return (lambda obj: dict(vars(obj))), (lambda state: _with_state(cls.__new__(cls), state))


def _checked(cls: Any, received: Any, kind: type) -> Any:
    """What arrived for an instance, if it is of the very type that was sent."""
    if type(received) is not kind:
        raise DecodeError(_NAME, f"a {cls.__qualname__} is not made of {shown(received)}")
    return received


def _raised(cls: Any, parts: Any) -> Any:
    """An exception as it was, without a call of ``__init__``."""
    args, state = _checked(cls, parts, list)
    check_arguments(cls, _checked(cls, args, tuple))
    error = cls.__new__(cls, *args)
    error.args = args
    return _with_state(error, state)


def _with_state(obj: Any, state: Any) -> Any:
    for name in _checked(type(obj), state, dict):
        _checked(type(obj), name, str)
    check_attributes(state)
    # Not by setattr, for a name of the sender's may be that of a property.
    vars(obj).update(state)
    return obj


def _filled(cls: Any, state: dict[str, Any]) -> Any:
    obj: Any = object.__new__(cls)
    for name, value in state.items():
        object.__setattr__(obj, name, value)  # also where the class is frozen
    return obj


def _all_of(obj: Any, names: list[str]) -> list[str]:
    """The fields of a dataclass, if they are all that it holds.

    Raises:
        TypeError: it was given further attributes, which would be lost.
    """
    if further := getattr(obj, "__dict__", {}).keys() - set(names):
        raise TypeError(f"attributes {sorted(further)} are no fields; register with encode=")
    return names
