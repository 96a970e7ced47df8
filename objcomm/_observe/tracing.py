"""What torch's tools see of objcomm: names in ``torch.profiler``, nothing in ``torch.compile``.

Knows how dynamo chooses the frames that it looks at, and nothing of what the functions do.
"""

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch.autograd.profiler

#: Of which a call asks ``_is_profiler_enabled``, as torch.optim does: 0.01 µs.
profiler = torch.autograd.profiler

#: What ``span`` gives.
Span = contextlib.AbstractContextManager[object]

_NOBODY_LOOKS: Span = contextlib.nullcontext()


def span(name: str) -> Span:
    """A block that ``torch.profiler`` shows as ``objcomm::name``, if it looks."""
    # A span costs 6 µs even if nobody looks.
    if not profiler._is_profiler_enabled:  # noqa: SLF001  # see above
        return _NOBODY_LOOKS
    return profiler.record_function(f"objcomm::{name}")


def begun(name: str) -> Span | None:
    """The same, entered; None where nobody looks, so that there is nothing to leave."""
    if not profiler._is_profiler_enabled:  # noqa: SLF001  # see above
        return None
    made = profiler.record_function(f"objcomm::{name}")
    made.__enter__()
    return made


_FOLDER = str(Path(__file__).parents[1])
_REASON = "objcomm moves objects between processes, which a graph cannot capture"


def keep_eager(members: Iterable[object]) -> None:
    """Let a compiled function call these as they are: its graph breaks, and goes on behind them.

    What ``torch.compiler.disable`` does, without its two costs: it imports ``torch._dynamo``, and
    it puts a function around each function. Dynamo reads two marks. The one on a function keeps it
    from tracing a call, with the reason in its log. The one on the function's code keeps it from
    looking at the frame when that runs, and at all frames below: without it, it tried 60 of
    objcomm's frames for six calls.

    Args:
        members: functions, and classes, whose methods are kept out, with those that they inherit
            from classes of objcomm; anything else is let be.
    """
    for member in members:
        for function in _functions(member):
            # As `torch.compiler.disable` does.
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
        return  # such as a named tuple's methods, whose code all named tuples share
    # Part of torch._C, so nothing of torch._dynamo is imported. It is not public: a torch that has
    # it no more compiles what it can of these frames, which is slow once and right.
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame  # noqa: PLC0415  # see above

        skip = eval_frame._FrameAction.SKIP  # noqa: SLF001  # see above
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # noqa: SLF001  # this frame, and below
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
