"""Replace torch's object collectives in a whole program, and report that and its cost.

``startup.sitecustomize`` starts this in each process of the program that has imported torch.
Reports go to standard error.
"""

import atexit
import contextlib
import os
import sys

import torch.distributed as dist

import objcomm
from objcomm._observe import recorder
from objcomm._world import rank
from objcomm.compat import report
from objcomm.compat import torch as replacing


def begin(*, is_first: bool, has_report: bool) -> None:
    """Replace the functions in this process permanently.

    Args:
        is_first: whether this process runs the program itself and was not started by it. If so,
            rank 0 reports what was replaced.
        has_report: whether rank 0 reports at its end what the calls have cost the ranks.
    """
    replacing.patch()
    replacing.check_calls(is_on=os.environ.get("OBJCOMM_CHECK") != "0")
    if is_first and rank() == 0:
        if dist.is_available():
            _tell(f"objcomm {objcomm.__version__} in place of torch's {', '.join(report.NAMES)}")
        else:
            _tell("nothing is replaced: this torch has no distributed")
    if has_report:
        reporting = report.Report()
        recorder.listeners.append(reporting.add)
        if dist.is_available():
            reporting.exchange_before_leaving()
        atexit.register(_tell_report, reporting, is_asked=is_first)


def _tell_report(reporting: report.Report, *, is_asked: bool) -> None:
    reporting.exchange()
    _tell(*reporting.lines(is_asked=is_asked))


def _tell(*lines: str) -> None:
    text = "".join(f"objcomm.run: {line}\n" for line in lines)
    # A closed standard error must not end the program.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()
