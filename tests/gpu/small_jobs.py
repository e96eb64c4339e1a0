"""Small jobs on one device, which tests of the trainer there share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.config import Job, check, job_from_table, resolve
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer

MODEL = {"dim": 512, "layers": 2, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 1024}


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
