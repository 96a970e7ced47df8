"""What torch's tools see of objcomm: spans in ``torch.profiler``, nothing in ``torch.compile``.

This module knows how dynamo chooses the frames that it compiles, but not what the functions do.
"""

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch.autograd.profiler

#: The module whose ``_is_profiler_enabled`` each call checks, as torch.optim does: 0.01 µs.
profiler = torch.autograd.profiler

#: The type that ``span`` returns.
Span = contextlib.AbstractContextManager[object]

_NOBODY_LOOKS: Span = contextlib.nullcontext()


def span(name: str) -> Span:
    """Return a context manager that ``torch.profiler`` shows as ``objcomm::name`` if enabled."""
    # A span costs 6 µs even if the profiler is off.
    if not profiler._is_profiler_enabled:  # noqa: SLF001  # see above
        return _NOBODY_LOOKS
    return profiler.record_function(f"objcomm::{name}")


def begun(name: str) -> Span | None:
    """Return an entered ``span``; None if the profiler is off, so that there is nothing to exit."""
    if not profiler._is_profiler_enabled:  # noqa: SLF001  # see above
        return None
    made = profiler.record_function(f"objcomm::{name}")
    made.__enter__()
    return made


_FOLDER = str(Path(__file__).parents[1])
_REASON = "objcomm moves objects between processes, which a graph cannot capture"


def keep_eager(members: Iterable[object]) -> None:
    """Make compiled functions call these without compiling them: the graph breaks at each call.

    This does what ``torch.compiler.disable`` does without its two costs: importing
    ``torch._dynamo``, and wrapping each function. Dynamo reads two marks. The mark on a function
    keeps dynamo from tracing a call, and provides the reason for its log. The mark on the
    function's code keeps dynamo from compiling its frame and all frames below it. Without that
    mark, dynamo tried 60 of objcomm's frames for six calls.

    Args:
        members: functions, and classes whose methods are marked, including those inherited from
            objcomm's classes; anything else is ignored.
    """
    for member in members:
        for function in _functions(member):
            # The attributes that `torch.compiler.disable` sets.
            function.__dict__["_torchdynamo_disable"] = True
            function.__dict__["_torchdynamo_disable_msg"] = _REASON
            _skip_frames(inspect.unwrap(function))


def _functions(member: object) -> Iterator[FunctionType]:
    if isinstance(member, FunctionType):
        yield member
    elif isinstance(member, type) and not issubclass(member, BaseException):
        own = [base for base in member.__mro__ if base.__module__.partition(".")[0] == "objcomm"]
        for each in [each for base in own for each in vars(base).values()]:
            inner = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
            if isinstance(inner, FunctionType):
                yield inner


def _skip_frames(function: Any) -> None:
    if not function.__code__.co_filename.startswith(_FOLDER):
        return  # for example methods of named tuples, which share their code
    # Part of torch._C, so torch._dynamo is not imported. It is not public: a torch version without
    # it compiles what it can of these frames, which is correct and slow only once.
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame  # noqa: PLC0415  # see above

        skip = eval_frame._FrameAction.SKIP  # noqa: SLF001  # see above
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # noqa: SLF001  # this frame, and below
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
