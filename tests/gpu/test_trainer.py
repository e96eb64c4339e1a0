"""The trainer on a real GPU: every mode runs, agrees with the plain one, and repeats to the bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint import Checkpointer
from phalanx.train.trainer import Trainer
from tests.gpu.small_jobs import group, job_with, losses, make_trainer

__all__ = ["group"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
