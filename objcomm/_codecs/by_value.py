"""Functions and classes by value, with cloudpickle, which is imported only when needed.

Restores what cloudpickle loses: variables that functions share, the qualified name of a class, and
the module of a type variable. Functions also keep the name of their file. Since 3.1.3, cloudpickle
writes ``<dynamic-code>`` instead, so that a stream does not depend on where a function was defined,
but tracebacks and the lines that errors show need the file.
"""

import enum
import io
import typing
from types import CellType, CodeType, FunctionType
from typing import Any

import cloudpickle

from objcomm._codecs import exceptions


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
    """Pickles like ``cloudpickle.Pickler``, but without its losses."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._cells: set[int] = set()  # cells of functions sent by value; pickle keeps them alive

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a member; called for each that is not a builtin container or scalar."""
        return exceptions.reduced(obj) if isinstance(obj, BaseException) else self.reduced(obj)

    def reduced(self, obj: Any) -> Any:
        """Reduce an object that may be sent by value; NotImplemented if pickle has its own rule."""
        kind = type(obj)
        if kind is CodeType:
            _, parts = self.dispatch_table[CodeType](obj)
            return _code_in, (obj.co_filename, *parts)
        if kind is CellType:
            return self._reduce_cell(obj)
        reduced = super().reducer_override(obj)
        reducer = self.dispatch_table.get(kind)
        if reduced is NotImplemented and reducer is not None:
            reduced = reducer(obj)
        if reduced is NotImplemented:
            return reduced
        if kind is FunctionType and obj.__closure__:
            return self._with_own_cells(obj, reduced)
        if kind is typing.TypeVar:
            return _with_module(obj, reduced)
        return _with_qualname(obj, reduced) if issubclass(kind, type) else reduced

    def _with_own_cells(self, function: FunctionType, reduced: Any) -> Any:
        """Let a function keep its shared cells; cloudpickle gives each function new ones.

        Cells are empty until the function exists, because one of them may contain the function.
        """
        make, (*arguments, _), (attributes, slots), *_, set_state = reduced
        cells = function.__closure__ or ()
        self._cells.update(map(id, cells))
        slots["__closure__"] = None
        state = set_state, (attributes, slots), tuple(map(_content, cells))
        return make, (*arguments, cells), state, None, None, _set_function

    def _reduce_cell(self, cell: CellType) -> Any:
        if id(cell) in self._cells:  # the function fills it
            return CellType, ()
        return CellType, (), _content(cell), None, None, _fill


def dumps(obj: object) -> bytes:
    """Pickle an object for ``pickle.loads``; functions of ``__main__`` are pickled by value."""
    with io.BytesIO() as file:
        Pickler(file).dump(obj)
        return file.getvalue()


def _code_in(file: str, *parts: Any) -> CodeType:
    return CodeType(*parts).replace(co_filename=file)


def _content(cell: CellType) -> tuple[Any, ...]:
    """Return a cell's content as a tuple, which is empty if its variable has no value yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _fill(cell: CellType, content: tuple[Any, ...]) -> None:
    for value in content:
        cell.cell_contents = value


def _set_function(function: FunctionType, state: tuple[Any, ...]) -> None:
    set_state, state, contents = state
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        _fill(cell, content)
    set_state(function, state)


def _with_qualname(cls: type, reduced: Any) -> Any:
    """Add the qualified name to cloudpickle's reduction, which keeps it only for enums.

    A class keeps what is in its namespace when it is created, so the name is added there.
    """
    make, arguments, *state = reduced
    if not state or issubclass(cls, enum.Enum):  # builtin classes go by name
        return reduced
    kind, name, bases, namespace, *rest = arguments
    return make, (kind, name, bases, {**namespace, "__qualname__": cls.__qualname__}, *rest), *state


def _with_module(variable: Any, reduced: Any) -> Any:
    """Restore a type variable's module; cloudpickle sets it to its own."""
    if reduced[0] is getattr:  # sent by name, because it is in a module
        return reduced
    return *reduced, variable.__module__, None, None, _set_module


def _set_module(variable: Any, module: str) -> None:
    variable.__module__ = module
