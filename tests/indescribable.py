"""Exceptions of which nothing can be told without running code of theirs that raises."""

from typing import Any, NoReturn


class _Silent(type):
    """A metaclass that answers no question about its classes."""

    def __getattribute__(cls, name: str) -> NoReturn:
        raise SystemExit(f"no {name}")


class ExitsWhenTold(Exception):
    """Its text ends the process."""

    def __str__(self) -> str:
        raise SystemExit(3)


class InterruptsWhenTold(Exception):
    """Its text is Ctrl-C."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


class ToldByAnother(Exception):
    """Its text raises what has no text either."""

    def __str__(self) -> str:
        raise OfASilentClass


class OfASilentClass(Exception, metaclass=_Silent):
    """Its class tells no name."""


class OfNoModule(Exception):
    """Its class says that its module is something without a text."""


OfNoModule.__module__ = ExitsWhenTold()  # type: ignore[assignment]  # that is the question


class ExitsWhenShown(Exception):
    """Python asks for its notes when it shows a traceback."""

    @property
    def __notes__(self) -> Any:  # type: ignore[override]  # that is the question
        raise SystemExit(3)


def in_a_circle() -> Exception:
    """Two exceptions of which each has caused the other."""
    first, second = LookupError("first"), LookupError("second")
    first.__cause__, second.__cause__ = second, first
    return first


#: What makes each, by the name of its class.
INDESCRIBABLE = {
    "ExitsWhenTold": ExitsWhenTold,
    "InterruptsWhenTold": InterruptsWhenTold,
    "ToldByAnother": ToldByAnother,
    "OfASilentClass": OfASilentClass,
    "OfNoModule": OfNoModule,
    "ExitsWhenShown": ExitsWhenShown,
    "LookupError": in_a_circle,
}
