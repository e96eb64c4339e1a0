"""Algorithms of matmuls that are remembered, on the library itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE = 2048  # its matmul is large enough to be timed


def test_a_remembered_algorithm_is_taken_without_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phalanx.model.cuda import cublaslt
    from phalanx.model.cuda.cublaslt import MatmulPlan, MatmulProblem

    monkeypatch.setenv(cublaslt.FOLDER_VARIABLE, str(tmp_path))
    a, b = (torch.randn(SIZE, SIZE, device="cuda").bfloat16() for _ in range(2))
    problem = MatmulProblem(SIZE, SIZE, SIZE, False, True, a.dtype, b.dtype, False)
    outs, chosen = [torch.empty_like(a) for _ in range(2)], []
    for out in outs:
        cublaslt.table.cache_clear()  # as in a process that begins
        plan = MatmulPlan(problem, 0)
        plan.run(a, b, out, None)
        assert plan.chosen is not None
        chosen.append(list(plan.chosen.algorithm))
        assert bool(plan.candidates) == (len(chosen) == 1)
    cublaslt.table.cache_clear()
    assert chosen[0] == chosen[1] and torch.equal(*outs)
    torch.testing.assert_close(outs[0], a @ b.t(), rtol=2e-2, atol=1.0)
