"""Adapters on a real GPU: kernels, compiled blocks and recompute agree, and the base stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.model.post_training.adapters import MARK
from tests.gpu.small_jobs import group, job_with, losses, make_trainer

__all__ = ["group"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES: dict[str, dict[str, dict[str, Any]]] = {
    "compiled": {"train": {"compile": "on"}},
    "recompute": {"memory": {"recompute": "full"}},
    "fp32": {"precision": {"compute": "float32"}},
}


def adapted(kind: str = "lora", **sections: dict[str, Any]) -> Any:
    adapter = {"kind": kind, "rank": 16}
    return job_with(adapter=adapter, optimizer={"learning_rate": 1e-2}, **sections)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_adapters_as_the_plain_one(kind: str, mode: str) -> None:
    plain, found = losses(adapted(kind)), losses(adapted(kind, **MODES[mode]))
    assert found == pytest.approx(plain, rel=5e-3)


def test_the_base_stays_and_has_neither_gradient_nor_state() -> None:
    trainer = make_trainer(adapted("dora"))
    before = {w.name: w.master.clone() for w in trainer.engine.weights}
    trainer.train_step()
    for weight in trainer.engine.weights:
        assert torch.equal(weight.master, before[weight.name]) == (MARK not in weight.name)
        assert weight.parameter.grad is None or MARK in weight.name
        assert (weight.master.dtype == torch.bfloat16) == (MARK not in weight.name)
    moments = [name for name in trainer.tensors() if name.startswith("optimizer.exp_avg")]
    assert moments and all(MARK in name for name in moments)
    trainer.close()
