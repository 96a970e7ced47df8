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
    subprocess.run(command, cwd=_REPOSITORY, check=True, timeout=300)
    written = gpu.page(Results.load([figures]))
    assert "Means nothing" in written
    assert written.count("| broadcast |") == 5
