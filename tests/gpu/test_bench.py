"""The benchmark on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.results import Results

_REPOSITORY = Path(__file__).parent.parent.parent


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_every_form_moves_every_payload(tmp_path: Path) -> None:
    figures = tmp_path / "gpu.jsonl"
    command = [sys.executable, "-m", "bench.gpu", "--smoke", "--json", str(figures)]
    subprocess.run(command, cwd=_REPOSITORY, check=True)
    results = Results.load([figures])
    assert "These figures mean nothing" in gpu.page(results)
    # Two operations on a config in four forms; on two sizes three in five forms, and one in three;
    # small tensors and a step in five forms; two deaths.
    assert len(list(results)) == 2 * 4 + 2 * (3 * 5 + 3) + 2 * 5 + 2
