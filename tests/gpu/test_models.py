"""Every kind of model trains on a real GPU as it does in fp32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer
from tests.gpu.small_jobs import group, job_with, losses

__all__ = ["group"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LATENT = {
    "query_rank": 128,
    "key_value_rank": 128,
    "content_head_dim": 64,
    "rope_head_dim": 64,
    "value_head_dim": 64,
}
MOE = {"experts": 8, "top_k": 2, "ffn": 256, "shared_experts": 1}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {},
    "moe": {"model": {"moe": MOE}},
    "moe-bias": {"model": {"moe": {**MOE, "balance": "bias", "score": "sigmoid"}}},
    "moe-shared-gate": {"model": {"moe": {**MOE, "shared_experts": 1, "shared_gate": True}}},
    "mtp": {"model": {"mtp": {"layers": 2, "weight": 1.0}}},
    "mtp-moe": {"model": {"moe": MOE, "mtp": {"weight": 1.0}}},
    "latent": {"model": {"latent": LATENT, "kv_heads": 8}},
    "documents": {"data": {"document_mask": True}},
    "capped": {"model": {"attention_softcap": 0.5, "logit_softcap": 0.7}},
    "gpt-oss": {
        "model": {
            "mlp": "swiglu-clamped",
            "window": {"size": 128, "full_every": 2},
            "attention_bias": True,
            "attention_out_bias": True,
            "attention_sinks": True,
            "moe": {"experts": 8, "top_k": 2, "ffn": 256, "biases": True},
        }
    },
}


@pytest.mark.parametrize("compiled", ["off", "on"], ids=["eager", "blocks-compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_model_on_gpu_agrees_with_fp32_on_cpu(kind: str, compiled: str) -> None:
    sections: dict[str, dict[str, Any]] = {"train": {"steps": 3, "compile": compiled}}
    sections |= KINDS[kind]
    found = losses(job_with(**sections))
    sections["train"] = {"steps": 3, "compile": "off", "cpu_threads": 8}
    job = job_with(**sections, precision={"compute": "float32"})
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    expected = [trainer.train_step().loss.item() for _ in range(3)]
    trainer.close()
    assert found == pytest.approx(expected, rel=5e-3)
