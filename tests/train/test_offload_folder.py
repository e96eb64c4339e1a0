"""Jobs whose optimizer state is in files: bits, checkpoints, other meshes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.checkpoint import Checkpointer
from phalanx.config import ConfigError, Job
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer, offload_folder
from tests.parallel.test_parity import make_job
from tests.ranks import run_ranks

STEPS = 4


def job_on(ranks: int, folder: str) -> Job:
    memory = {"offload": "optimizer", "offload_folder": folder} if folder else {}
    sections: dict[str, Any] = {
        "model": {"layers": 1},
        "memory": memory,
        "parallel": {"zero": 3} if ranks > 1 else {},
        "precision": {"compute": "bfloat16"},
        "train": {"steps": STEPS, "micro_batch": 2, "deterministic": True},
    }
    return make_job(ranks, sections)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def train(job: Job, checkpoints: Path, resume: Path | None) -> dict[str, Tensor]:
    """The whole state after the last step, with a checkpoint of the second."""
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    checkpointer = Checkpointer(checkpoints, keep=0)
    if resume is not None:
        trainer.restore(checkpointer.load(resume, trainer.tensors()))
    while trainer.step < job.train.steps:
        trainer.train_step()
        if trainer.step == 2:
            checkpointer.save(2, trainer.tensors(), trainer.extra())
    trainer.close()
    return {name: whole(tensor) for name, tensor in trainer.tensors().items()}


def run(
    ranks: int, folder: str, checkpoints: Path, resume: Path | None = None
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = run_ranks(ranks, train, job_on(ranks, folder), checkpoints, resume)[
        0
    ]
    return found


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_from_a_file_goes_on_in_memory_and_on_another_mesh(tmp_path: Path) -> None:
    nvme = str(tmp_path / "nvme")
    away = run(2, nvme, tmp_path / "away")
    here = run(2, "", tmp_path / "here")
    assert equal(away, here)
    saved = tmp_path / "away/step-00000002"
    for folder in (nvme, ""):
        assert equal(away, run(2, folder, tmp_path / f"again-{bool(folder)}", saved))
    one = [run(1, folder, tmp_path / f"one-{bool(folder)}", saved) for folder in (nvme, "")]
    assert equal(*one)
    assert list((tmp_path / "nvme").iterdir()) == []


def test_a_variable_that_the_node_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = job_on(1, "$LOCAL_NVME/state")
    monkeypatch.delenv("LOCAL_NVME", raising=False)
    with pytest.raises(ConfigError, match="names a variable that this node does not have"):
        offload_folder(job)
    monkeypatch.setenv("LOCAL_NVME", str(tmp_path))
    assert offload_folder(job) == tmp_path / "state"
    plain = msgspec.structs.replace(
        job, memory=msgspec.structs.replace(job.memory, offload_folder="")
    )
    assert offload_folder(plain) is None
