"""Which backend and device a rank gets on machines with and without GPUs."""

import pytest
import torch
import torch.distributed as dist

from objcomm import UsageError
from objcomm._bootstrap import init
from objcomm._environment import Placement


def test_each_rank_has_a_cuda_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Placement("SLURM", 5, 8, 1, "node003", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert init.cuda_device(place, None) == torch.device("cuda:1")
    assert init.cuda_device(place, 0) == torch.device("cuda:0")
    assert init.cuda_device(place, "cuda:0") == torch.device("cuda:0")
    with pytest.raises(UsageError, match="LOCAL_RANK"):
        init.cuda_device(place._replace(local_rank=None), None)
    with pytest.raises(UsageError, match="rank 2 of this host, which has 2 CUDA devices"):
        init.cuda_device(place._replace(local_rank=2), None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="has 1 CUDA devices"):
        init.cuda_device(place, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert init.cuda_device(place, None) == torch.device("cuda:0")


def test_cuda_and_nccl_choose_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for has_nccl, backend in ((True, "cpu:gloo,cuda:nccl"), (False, "gloo")):
        monkeypatch.setattr(dist, "is_nccl_available", lambda has=has_nccl: has)
        assert init.default_backend() == backend
    assert init.uses_nccl("cpu:gloo,cuda:nccl")
    assert init.uses_nccl("NCCL")
    assert not init.uses_nccl("gloo")
