"""Objects that only pickle can encode, with everything they share. Adds to `samples.SAMPLES`."""

import collections
import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from tests.samples import Blob, Colour, Plain, Run, TwoArgumentError, pickled

pickled("OrderedDict", lambda: collections.OrderedDict([("b", 1), ("a", 2)]))
pickled("defaultdict", lambda: collections.defaultdict(list, {"a": [1]}))
pickled("Counter", lambda: collections.Counter("hello"))
pickled("deque", lambda: collections.deque([1, 2, 3], maxlen=3))
pickled("Ellipsis and NotImplemented", lambda: [..., NotImplemented])
pickled("classes", lambda: [int, Colour, Plain, collections.OrderedDict])
pickled("builtin functions", lambda: [len, operator.add, functools.reduce])
pickled("module", lambda: types)
for _nbytes in (0, 10, 100_000):
    pickled(f"memoryview of {_nbytes}", lambda n=_nbytes: memoryview(bytes(n)))  # type: ignore[misc]  # binds this n
    pickled(f"writable memoryview of {_nbytes}", lambda n=_nbytes: memoryview(bytearray(n)))  # type: ignore[misc]  # binds this n
    pickled(f"object over a buffer of {_nbytes}", functools.partial(Blob, bytes(_nbytes)))
pickled("exception", lambda: ValueError("é", 1))
pickled("exception of two arguments", lambda: TwoArgumentError(3, "no"))
pickled("exception group", lambda: ExceptionGroup("g", [ValueError(1), TwoArgumentError(1, "x")]))


def _noted() -> Exception:
    error = KeyError("k")
    error.add_note("a note")
    return error


pickled("exception with a note", _noted)


def _twice() -> list[Any]:
    inner: list[Any] = [1]
    blob = b"x" * 100_000
    return [inner, inner, {"inner": inner}, blob, blob]


def _cyclic_list() -> list[Any]:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    return cycle


def _cyclic_objects() -> Plain:
    parent = Plain(name="parent")
    parent.child = Plain(parent=parent, pair=({"up": parent}, parent))  # type: ignore[attr-defined]
    return parent


pickled("the same object twice", _twice)
pickled("cyclic list", _cyclic_list)
pickled("cyclic objects", _cyclic_objects)


def _local_class() -> Any:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    return [Local(1), Local, Colour.RED]


_SCRIPT = """
import dataclasses

@dataclasses.dataclass
class Config:
    lr: float
    tags: list
"""


def _script_class() -> Any:
    """Return an instance of a class whose module no other process can import, like a script's."""
    module = types.ModuleType("a_script_that_nobody_can_import")
    sys.modules[module.__name__] = module
    try:
        exec(_SCRIPT, module.__dict__)  # noqa: S102  # as running a script does
    finally:
        del sys.modules[module.__name__]
    return module.Config(0.1, ["a"])


def _closure() -> Callable[[int], int]:
    factor = 3

    def shifted(number: int, offset: int = 1) -> int:
        return number * factor + offset

    return shifted


pickled("function with closure and default", _closure)
pickled("lambda", lambda: lambda number: number + 1)
pickled("class made in a function", _local_class)
pickled("dataclass of a script", _script_class)
pickled(
    "lambda beside importable members", lambda: {"f": lambda: 1, "c": Colour, "run": Run("r", [])}
)
