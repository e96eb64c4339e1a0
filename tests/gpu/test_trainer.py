"""The trainer on a real GPU: every mode runs, agrees with the plain one, and repeats to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.checkpoint import Checkpointer
from phalanx.config import Job, check, job_from_table, resolve
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = {"dim": 512, "layers": 2, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 1024}
LATENT = {
    "query_rank": 128,
    "key_value_rank": 128,
    "content_head_dim": 64,
    "rope_head_dim": 64,
    "value_head_dim": 64,
}
MOE = {"experts": 8, "top_k": 2, "ffn": 256, "shared_experts": 1}


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()  # graphs of another test's models are not this process's own


def job_with(**sections: dict[str, Any]) -> Job:
    table: dict[str, Any] = {
        "model": dict(MODEL),
        "data": {"sequence": 512, "prefetch": 0},
        "train": {"steps": 8, "global_batch": 4, "micro_batch": 2, "compile": "off"},
        "optimizer": {"learning_rate": 1e-3},
    }
    for section, values in sections.items():
        table[section] = {**table.get(section, {}), **values}
    job = resolve(job_from_table(table), 1)
    check(job, 1)
    return job


def make_trainer(job: Job) -> Trainer:
    device = torch.device("cuda", 0)
    return Trainer(job, build_mesh(job, device), device)


def losses(job: Job) -> list[float]:
    trainer = make_trainer(job)
    outcomes = [trainer.train_step() for _ in range(job.train.steps)]
    trainer.close()
    return [outcome.loss.item() for outcome in outcomes]


def digest(trainer: Trainer) -> str:
    found = hashlib.sha256()
    for _, tensor in sorted(trainer.tensors().items()):
        found.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()


MODES: dict[str, dict[str, dict[str, Any]]] = {
    "compiled": {"train": {"compile": "on"}},
    "recompute-selective": {"memory": {"recompute": "selective"}},
    "recompute-full": {"memory": {"recompute": "full"}},
    "recompute-full-compiled": {"memory": {"recompute": "full"}, "train": {"compile": "on"}},
    "recompute-selective-compiled": {
        "memory": {"recompute": "selective"},
        "train": {"compile": "on"},
    },
    "offload-optimizer": {"memory": {"offload": "optimizer"}},
    "offload-parameters": {"memory": {"offload": "parameters"}},
    "offload-activations": {"memory": {"offload_activations": True}},
    "fp16": {"precision": {"compute": "float16"}},
    "fp8": {"precision": {"fp8": True}},
    "fp8-compiled": {"precision": {"fp8": True}, "train": {"compile": "on"}},
}


@pytest.mark.parametrize("mode", MODES)
def test_mode_trains_like_the_plain_one(mode: str) -> None:
    expected = losses(job_with())
    found = losses(job_with(**MODES[mode]))
    assert found == pytest.approx(expected, rel=2e-2 if "fp8" in mode else 5e-3)


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


@pytest.mark.parametrize("compiled", ["off", "on"], ids=["eager", "blocks-compiled"])
def test_deterministic_runs_and_resumes_are_equal_to_the_bit(compiled: str, tmp_path: Path) -> None:
    job = job_with(train={"deterministic": True, "compile": compiled, "steps": 6})
    whole = make_trainer(job)
    expected = [whole.train_step().loss.item() for _ in range(6)]
    again = make_trainer(job)
    assert [again.train_step().loss.item() for _ in range(6)] == expected
    assert digest(again) == digest(whole)
    first = make_trainer(job)
    for _ in range(3):
        first.train_step()
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=0)
    path = checkpointer.save(first.step, first.tensors(), first.extra())
    second = make_trainer(job)
    second.restore(checkpointer.load(path, second.tensors()))
    assert [second.train_step().loss.item() for _ in range(3)] == expected[3:]
    assert digest(second) == digest(whole)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_muon_learns_on_gpu(offload: str) -> None:
    sections = {"optimizer": {"kind": "muon"}, "memory": {"offload": offload}}
    found = losses(job_with(**sections, train={"steps": 12}))
    assert found[-1] < found[0]


def test_a_step_makes_no_host_synchronisation() -> None:
    trainer = make_trainer(job_with(train={"steps": 6}))
    trainer.train_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(outcome.loss).item()
