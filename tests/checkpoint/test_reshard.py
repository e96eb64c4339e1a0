"""A checkpoint of any mesh continues on any other: the same bits, then the same losses."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from phalanx.checkpoint import Checkpointer, latest
from phalanx.config import Job
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import make_job
from tests.shared_ranks import SharedRanks

SAVED, STEPS = 2, 4
MOE = {"moe": {"experts": 4, "top_k": 2, "ffn": 16, "shared_experts": 1}}
DENSE_TARGETS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "fsdp4": (4, {"zero": 3}),
    "tp4": (4, {"tensor": 4}),
    "pp4": (4, {"pipeline": 4}),
    "cp2xfsdp2": (4, {"context": 2, "zero": 3}),
}

Digests = dict[str, str]


class Source(NamedTuple):
    """A run that was saved in the middle and went on."""

    folder: Path
    digests: Digests  # of whole tensors when it was saved
    losses: list[float]  # of the steps after


def job_on(ranks: int, parallel: dict[str, Any], model: dict[str, Any]) -> Job:
    sections = {
        "model": {"layers": 4, "heads": 4, "kv_heads": 4, **model},
        "parallel": parallel,
        "precision": {"compute": "float32"},
        "train": {"steps": STEPS, "micro_batch": 2},
    }
    return make_job(ranks, sections)


def make_trainer(job: Job) -> Trainer:
    device = torch.device("cpu")
    return Trainer(job, build_mesh(job, device), device)


def digests(trainer: Trainer) -> Digests:
    """Of every whole tensor that this rank has a part of."""
    found = {}
    for name, tensor in sorted(trainer.tensors().items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        content = whole.detach().contiguous().view(-1).numpy().tobytes()
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def together(found: list[Digests]) -> Digests:
    """Of all ranks, which must not contradict each other."""
    merged: Digests = {}
    for one in found:
        for name, digest in one.items():
            assert merged.setdefault(name, digest) == digest, name
    return merged


def more_losses(trainer: Trainer) -> list[float]:
    losses = []
    while trainer.step < STEPS:
        losses.append(float(trainer.train_step().loss))
    trainer.close()
    return losses


def _train_and_save(job: Job, folder: Path) -> tuple[Digests, list[float]]:
    trainer = make_trainer(job)
    for _ in range(SAVED):
        trainer.train_step()
    Checkpointer(folder).save(trainer.step, trainer.tensors(), trainer.extra())
    return digests(trainer), more_losses(trainer)


def save_source(
    shared_ranks: SharedRanks,
    folder: Path,
    ranks: int,
    parallel: dict[str, Any],
    model: dict[str, Any],
) -> Source:
    results = shared_ranks.run(ranks, _train_and_save, job_on(ranks, parallel, model), folder)
    return Source(folder, together([found for found, _ in results]), results[0][1])


def _load_and_train(job: Job, folder: Path) -> tuple[Digests, list[float]]:
    trainer = make_trainer(job)
    path = latest(folder)
    assert path is not None
    trainer.restore(Checkpointer(folder).load(path, trainer.tensors()))
    assert trainer.step == SAVED
    return digests(trainer), more_losses(trainer)


def continue_on(
    shared_ranks: SharedRanks,
    source: Source,
    ranks: int,
    parallel: dict[str, Any],
    model: dict[str, Any],
) -> None:
    job = job_on(ranks, parallel, model)
    results = shared_ranks.run(ranks, _load_and_train, job, source.folder)
    assert together([found for found, _ in results]) == source.digests
    for _, losses in results:
        # Another mesh adds in another order: equal up to rounding, not to the bit.
        assert losses == pytest.approx(source.losses, rel=2e-5)


@pytest.fixture(scope="module")
def dense(shared_ranks: SharedRanks, tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("pp2xtp2xfsdp2")
    axes = {"pipeline": 2, "tensor": 2, "zero": 3}
    return save_source(shared_ranks, folder, 8, axes, {})


@pytest.mark.parametrize("target", DENSE_TARGETS)
def test_pipeline_tensor_and_fsdp_shards_continue_on_another_mesh(
    dense: Source, target: str, shared_ranks: SharedRanks
) -> None:
    continue_on(shared_ranks, dense, *DENSE_TARGETS[target], {})


def test_two_expert_groups_continue_as_four(shared_ranks: SharedRanks, tmp_path: Path) -> None:
    source = save_source(shared_ranks, tmp_path, 4, {"expert": 2, "zero": 3}, MOE)
    continue_on(shared_ranks, source, 4, {"expert": 4, "zero": 3}, MOE)
