"""Exceptions that cannot be described without running their own code, which raises."""

from typing import Any, NoReturn


class _Silent(type):
    """A metaclass that raises for every attribute of its classes."""

    def __getattribute__(cls, name: str) -> NoReturn:
        raise SystemExit(f"no {name}")


class ExitsWhenTold(Exception):
    """``str()`` of it exits the process."""

    def __str__(self) -> str:
        raise SystemExit(3)


class InterruptsWhenTold(Exception):
    """``str()`` of it raises KeyboardInterrupt."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


class ToldByAnother(Exception):
    """``str()`` of it raises an exception that has no text either."""

    def __str__(self) -> str:
        raise OfASilentClass


class OfASilentClass(Exception, metaclass=_Silent):
    """Its class has no name."""


class OfNoModule(Exception):
    """Its class has a module whose text raises."""


OfNoModule.__module__ = ExitsWhenTold()  # type: ignore[assignment]  # the purpose of the class


class ExitsWhenShown(Exception):
    """Python reads its notes when it shows a traceback."""

    @property
    def __notes__(self) -> Any:  # type: ignore[override]  # the purpose of the class
        raise SystemExit(3)


def in_a_cycle() -> Exception:
    """Return one of two exceptions that are each other's cause."""
    first, second = LookupError("first"), LookupError("second")
    first.__cause__, second.__cause__ = second, first
    return first


#: Creates each, by the name of its class.
INDESCRIBABLE = {
    "ExitsWhenTold": ExitsWhenTold,
    "InterruptsWhenTold": InterruptsWhenTold,
    "ToldByAnother": ToldByAnother,
    "OfASilentClass": OfASilentClass,
    "OfNoModule": OfNoModule,
    "ExitsWhenShown": ExitsWhenShown,
    "LookupError": in_a_cycle,
}
