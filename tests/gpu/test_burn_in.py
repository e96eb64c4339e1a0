"""A burn-in of this machine's GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from phalanx.doctor.acceptance.program import find_measured
from phalanx.doctor.acceptance.report import AcceptanceRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_gpus_are_loaded_and_watched(tmp_path: Path) -> None:
    request = AcceptanceRequest(node="n", folder=str(tmp_path), seconds=10.0)
    text = msgspec.json.encode(request).decode()
    command = [sys.executable, "-m", "phalanx.doctor.acceptance.program", text]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    measured = find_measured(done.stdout)
    assert measured is not None
    loads = {each.key: each for each in measured.report.loads}
    for key in ("gemm cuda:0", "memory cuda:0"):
        assert loads[key].samples >= 5 and not loads[key].wrong and not loads[key].problem
    assert measured.report.gpus and measured.report.gpus[0].most_celsius > 0
