"""The helpers of several families, each called in the same way."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch

import objcomm
from tests.faults.plan import Case, contribution

_Call = Callable[[Case, Callable[[], None]], Any]


def call(case: Case, callback: Callable[[], None]) -> Any:
    """Run the case's helper; ``callback`` is called at the start of this rank's part."""
    return _CALLS[case.operation](case, callback)


def _run_on_main(case: Case, callback: Callable[[], None]) -> bytes:
    def compute() -> bytes:
        callback()
        return contribution(case, 0)

    return objcomm.run_on_main(compute, timeout=case.limit_seconds)


def _main_first(case: Case, callback: Callable[[], None]) -> None:
    with objcomm.main_first(timeout=case.limit_seconds):
        callback()


def _average_metrics(case: Case, _: Callable[[], None]) -> bytes:
    means = objcomm.metrics.average_metrics({"loss": 0.5}, 64, timeout=case.limit_seconds)
    return contribution(case, 0) if means == {"loss": 0.5} else b""


def _broadcast_file(case: Case, _: Callable[[], None]) -> bytes:
    with tempfile.NamedTemporaryFile() as file:  # each rank has one, and only the source's is read
        file.write(contribution(case, 0))
        file.flush()
        return bytes(objcomm.broadcast_file(file.name, timeout=case.limit_seconds))


def _stream(case: Case, _: Callable[[], None]) -> bytes:
    objs = [contribution(case, case.root)] if objcomm.rank() == case.root else None
    (got,) = objcomm.stream(objs, case.root, timeout=case.limit_seconds)
    return bytes(got)


def _model(case: Case) -> torch.nn.Module:
    model = torch.nn.BatchNorm1d(case.nbytes // 4)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    return model


_CALLS: dict[str, _Call] = {
    "run_on_main": _run_on_main,
    "main_first": _main_first,
    "average_metrics": _average_metrics,
    "agree": lambda case, _: objcomm.agree(contribution(case, 0), timeout=case.limit_seconds),
    "broadcast_file": _broadcast_file,
    "stream": _stream,
    "sync_gradients": lambda case, _: objcomm.models.sync_gradients(
        _model(case).parameters(), timeout=case.limit_seconds
    ),
    "sync_model": lambda case, _: objcomm.models.sync_model(
        _model(case), timeout=case.limit_seconds
    ),
}
