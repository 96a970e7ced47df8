"""Call any public function with arguments that it accepts."""

import inspect
from typing import TYPE_CHECKING, Any

import torch

import objcomm
from tests.public_names import FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

#: Values for the parameters without a default.
RIGHT: dict[str, Any] = {
    **dict.fromkeys(("communication_object", "obj", "value"), 1),
    **dict.fromkeys(("fn", "fn1", "func"), int),
    **{name: [1] for name in ("dataset", "objs")},
    **{name: [torch.zeros(1)] for name in ("buffers", "params", "tensors")},
    "activity": objcomm.Activity(0.0, (), -1),
    "color": 0,
    "flag": True,
    "fn2": sum,
    "function": None,  # without one the decorators return one that takes it
    "message": "x",
    "metrics": {"loss": 0.5},
    "model": torch.nn.Linear(1, 1),
    "nproc": 1,
    "op": "sum",
    "path": __file__,
    "ranks": [0],
    "step": 0,
    "tensor": objcomm.to_tensor(1),
    "works": [],
    "writer": None,
}
_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def called(name: str, argument: str = "", given: Any = None) -> object:
    """Call a function with valid arguments except for the one named, if any."""
    function: Callable[..., Any] = FUNCTIONS[name]
    positional, named = [], {}
    for parameter in inspect.signature(function).parameters.values():
        value = given if parameter.name == argument else RIGHT.get(parameter.name)
        if parameter.name == argument or parameter.default is inspect.Parameter.empty:
            if parameter.kind not in _NAMED:
                continue
            if name == "launch" and parameter.default is inspect.Parameter.empty:
                positional.append(value)  # its *args would take the omitted arguments
            else:
                named[parameter.name] = value
    returned = function(*positional, **named)
    if inspect.isgenerator(returned):
        return list(returned)
    if hasattr(returned, "__enter__"):
        with returned:
            return None
    is_decorator = name in {"main_process_only", "once_per_node"}
    return returned(int)() if is_decorator else returned
