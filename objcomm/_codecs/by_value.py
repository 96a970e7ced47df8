"""Functions and classes by value: cloudpickle, which is imported only where something needs it.

Functions keep the name of their file. From 3.1.3 on cloudpickle writes ``<dynamic-code>`` instead,
so that a stream does not depend on where a function was defined; but tracebacks, and the lines that
errors show, need the file.
"""

import io
from types import CodeType
from typing import Any

import cloudpickle


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
    """Pickles as ``cloudpickle.Pickler`` does, and code with the name of its file beside it."""

    def reducer_override(self, obj: Any) -> Any:
        """Called for every member that is not of a builtin container or scalar type."""
        if type(obj) is CodeType:
            _, parts = self.dispatch_table[CodeType](obj)
            return _code_in, (obj.co_filename, *parts)
        return super().reducer_override(obj)


def dumps(obj: object) -> bytes:
    """An object as ``pickle.loads`` reads it; functions of ``__main__`` go by value."""
    with io.BytesIO() as file:
        Pickler(file).dump(obj)
        return file.getvalue()


def _code_in(file: str, *parts: Any) -> CodeType:
    return CodeType(*parts).replace(co_filename=file)
