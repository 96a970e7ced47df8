"""The backend and device a rank gets, on machines with any accelerator and with none."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from objcomm import UsageError
from objcomm._bootstrap import init
from objcomm._bootstrap.doctor import host
from objcomm._environment import Placement

PLACE = Placement("SLURM", 5, 8, 1, "node003", 1)


def fake_modules(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Make these torch's only modules for device types."""

    def module_of(device: Any) -> Any:
        found = modules.get(torch.device(device).type)
        if found is None:
            raise RuntimeError("no module for it")
        return found

    monkeypatch.setattr(torch, "get_device_module", module_of)  # torch caches the real ones


def fake_accelerator(monkeypatch: pytest.MonkeyPatch, device_type: str, **module: Any) -> None:
    """Make torch report an accelerator of this type, with a module of these functions."""
    device = torch.device(device_type)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    fake_modules(monkeypatch, **{device_type: SimpleNamespace(**module)})


@pytest.mark.parametrize(
    ("device_type", "variable"),
    [
        ("cuda", "CUDA_VISIBLE_DEVICES"),
        ("cuda", "ROCR_VISIBLE_DEVICES"),
        ("xpu", "ZE_AFFINITY_MASK"),
        ("mtia", "MTIA_VISIBLE_DEVICES"),
    ],
)
def test_each_rank_gets_its_own_device(
    monkeypatch: pytest.MonkeyPatch, device_type: str, variable: str
) -> None:
    for shown_by in init.SHOWN_BY.values():
        for each in shown_by:
            monkeypatch.delenv(each, raising=False)
    fake_modules(monkeypatch, **{device_type: SimpleNamespace(device_count=lambda: 2)})
    first, second = (torch.device(device_type, index) for index in range(2))
    assert init.device_of(PLACE, device_type, None) == second
    assert init.device_of(PLACE, device_type, 0) == first
    assert init.device_of(PLACE, device_type, str(first)) == first
    with pytest.raises(UsageError, match="LOCAL_RANK"):
        init.device_of(PLACE._replace(local_rank=None), device_type, None)
    few = f"rank 2 of this host, which has 2 {device_type} devices; .* check .*{variable}"
    with pytest.raises(UsageError, match=few):
        init.device_of(PLACE._replace(local_rank=2), device_type, None)
    fake_modules(monkeypatch, **{device_type: SimpleNamespace(device_count=lambda: 1)})
    with pytest.raises(UsageError, match=f"has 1 {device_type} devices"):
        init.device_of(PLACE, device_type, None)
    monkeypatch.setenv(variable, "3")
    assert init.device_of(PLACE, device_type, None) == first


def test_a_type_that_torch_cannot_count_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_modules(monkeypatch)
    assert init.device_count("hpu") == 0
    fake_modules(monkeypatch, hpu=SimpleNamespace())
    assert init.device_count("hpu") == 0


@pytest.mark.parametrize(
    ("device_type", "named", "is_there", "backend"),
    [
        ("cuda", "nccl", True, "cpu:gloo,cuda:nccl"),
        ("cuda", "nccl", False, "gloo"),
        ("xpu", "xccl", True, "cpu:gloo,xpu:xccl"),
        ("hpu", "hccl", True, "cpu:gloo,hpu:hccl"),
        ("hpu", None, True, "gloo"),
        ("mps", "gloo", True, "gloo"),
    ],
)
def test_the_accelerator_decides_the_backend(
    monkeypatch: pytest.MonkeyPatch,
    device_type: str,
    named: str | None,
    is_there: bool,  # noqa: FBT001  # pytest passes it by name
    backend: str,
) -> None:
    fake_accelerator(monkeypatch, device_type)
    defaults = {} if named is None else {device_type: named}
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", {"cpu": "gloo", **defaults})
    monkeypatch.setattr(dist, "is_backend_available", lambda name: is_there and name == named)
    assert init.default_backend() == backend
    assert init.accelerator_in(backend) == ("" if backend == "gloo" else device_type)


def test_the_backend_without_an_accelerator_is_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert init.default_backend() == "gloo"
    absent = mock.Mock(side_effect=RuntimeError("no module for it"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", absent)
    assert init.accelerator_type() == ""
    assert init.default_backend() == "gloo"


def test_a_backend_is_for_the_devices_that_torch_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert init.backends_in("NCCL") == {"cuda": "nccl"}
    assert init.backends_in("gloo") == {"cpu": "gloo", "cuda": "gloo"}
    assert init.backends_in("cpu:gloo,XPU:xccl") == {"cpu": "gloo", "xpu": "xccl"}
    assert init.backends_in("") == {}
    for backend, own in (
        ("nccl", "cuda"),
        ("xccl", "xpu"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("gloo", ""),
        ("mpi", ""),
        ("cpu:gloo,cuda:nccl,xpu:xccl", "cuda"),
    ):
        assert init.accelerator_in(backend) == own
    fake_accelerator(monkeypatch, "xpu")
    assert init.accelerator_in("cpu:gloo,cuda:nccl,xpu:xccl") == "xpu"


def test_a_ranks_device_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_xpu, choose_mtia = mock.Mock(), mock.Mock()
    fake_accelerator(monkeypatch, "xpu")
    other = SimpleNamespace(set_device=choose_mtia, current_device=lambda: 2)
    fake_modules(monkeypatch, mtia=other)
    monkeypatch.setattr(torch.accelerator, "set_device_index", choose_xpu)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    for device in ("xpu:3", "mtia:1", "xpu"):
        init.make_current(torch.device(device))
    choose_xpu.assert_called_once_with(3)
    choose_mtia.assert_called_once_with(1)
    assert init.current_device("xpu") == torch.device("xpu:1")
    assert init.current_device("mtia") == torch.device("mtia:2")


def test_the_doctor_reports_the_names_of_the_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_accelerator(
        monkeypatch, "xpu", device_count=lambda: 2, get_device_name=lambda at: f"Max {at}"
    )
    assert host.devices() == ("Max 0", "Max 1")
    assert host.device_problem(PLACE, "cpu:gloo,xpu:xccl") == ""
    problem = host.device_problem(PLACE._replace(local_rank=2), "cpu:gloo,xpu:xccl")
    assert problem.startswith("this is rank 2 of this host, which has 2 xpu devices; start no more")
    assert host.device_problem(PLACE, "gloo") == ""
    fake_accelerator(monkeypatch, "xpu", device_count=lambda: 1)
    assert host.devices() == ("xpu",)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert host.devices() == ()
