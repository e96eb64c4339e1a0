"""Pipelines route as one process does and resume to the bit, whatever keeps experts balanced."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from phalanx.checkpoint import Checkpointer, latest
from phalanx.config import Job
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import EXPERTS, make_job
from tests.shared_ranks import SharedRanks

STEPS, SAVED = 4, 2
BALANCES = ("auxiliary", "bias", "none")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
RAMP = [{"until_tokens": 2 * 4 * 32, "global_batch": 4}]  # the schedule is made anew at step 3


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]
    tensors: dict[str, torch.Tensor]  # of this rank, after the last step

    @property
    def biases(self) -> dict[str, list[float]]:
        return {n: t.tolist() for n, t in self.tensors.items() if n.endswith("expert_bias")}


def make(
    balance: str, ranks: int, parallel: dict[str, Any], further: dict[str, Any] | None = None
) -> Job:
    moe = {**EXPERTS, "balance": balance, "bias_rate": 0.01, "score": "sigmoid"}
    table: dict[str, Any] = {
        "model": {"moe": moe},
        "parallel": parallel,
        "train": {"steps": STEPS, "deterministic": True},
    }
    for section, values in (further or {}).items():
        table[section] = {**table.get(section, {}), **values}
    return make_job(ranks, table)


def run(job: Job, folder: Path | None = None, *, resume: bool = False) -> Run:
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    if resume:
        assert folder is not None
        found = latest(folder)
        assert found is not None
        trainer.restore(Checkpointer(folder, keep=0).load(found, trainer.tensors()))
    outcomes = []
    while trainer.step < STEPS:
        outcomes.append(trainer.train_step())
        if folder is not None and not resume and trainer.step == SAVED:
            Checkpointer(folder, keep=0).save(trainer.step, trainer.tensors(), trainer.extra())
    trainer.close()
    losses = [outcome.loss.item() for outcome in outcomes]
    norms = [outcome.grad_norm.item() for outcome in outcomes]
    return Run(losses, norms, {n: t.clone() for n, t in trainer.tensors().items()})


_references: dict[bytes, Run] = {}


def run_alone(job: Job) -> Run:
    """The reference: made once for all schedules of a balance."""
    key = msgspec.json.encode(job)
    if key not in _references:
        _references[key] = run(job)
    return _references[key]


def straight_and_resumed(job: Job, folder: Path) -> tuple[Run, Run]:
    return run(job, folder), run(job, folder, resume=True)


def prove(shared_ranks: SharedRanks, job: Job, alone: Job, folder: Path) -> None:
    """A mesh equals one process, its biases exactly, and goes on from a checkpoint to the bit."""
    expected = run_alone(alone)
    biases: dict[str, list[float]] = {}
    for straight, resumed in shared_ranks.run(
        job.parallel.pipeline, straight_and_resumed, job, folder
    ):
        assert straight.losses == pytest.approx(expected.losses, rel=1e-6)
        assert straight.norms == pytest.approx(expected.norms, rel=1e-5)
        biases |= straight.biases
        assert resumed.losses == straight.losses[SAVED:]
        assert resumed.norms == straight.norms[SAVED:]
        for name, tensor in straight.tensors.items():
            assert torch.equal(resumed.tensors[name], tensor), name
    assert biases == expected.biases


SHORT = [("bias", schedule) for schedule in SCHEDULES]
SHORT += [("auxiliary", "zero-bubble"), ("none", "1f1b")]


@pytest.mark.parametrize(("balance", "schedule"), SHORT)
def test_a_pipeline_balances_like_one_process_and_resumes_to_the_bit(
    balance: str, schedule: str, shared_ranks: SharedRanks, tmp_path: Path
) -> None:
    axes = {"pipeline": 2, "schedule": schedule}
    prove(shared_ranks, make(balance, 2, axes), make(balance, 1, {}), tmp_path)


def forwards_of_a_step(job: Job) -> list[int]:
    """How often each part of this rank ran in its first step."""
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    counts = [0] * len(trainer.engine.parts)

    def count(index: int) -> None:
        counts[index] += 1

    for index, part in enumerate(trainer.engine.parts):
        part.register_forward_pre_hook(lambda *_, index=index: count(index))
    trainer.train_step()
    trainer.close()
    return counts


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_stage_runs_once_for_each_micro_batch_and_never_to_find_out_shapes(
    schedule: str, shared_ranks: SharedRanks
) -> None:
    job = make("none", 2, {"pipeline": 2, "schedule": schedule})
    for counts in shared_ranks.run(2, forwards_of_a_step, job):
        assert counts == [8] * len(counts)


def test_a_batch_that_grows_makes_a_schedule_anew_and_counts_nothing_for_it(
    shared_ranks: SharedRanks, tmp_path: Path
) -> None:
    further = {"train": {"batch_ramp": RAMP}}
    axes = {"pipeline": 2, "schedule": "1f1b"}
    prove(shared_ranks, make("bias", 2, axes, further), make("bias", 1, {}, further), tmp_path)


FURTHER: dict[str, dict[str, Any]] = {
    "plain": {},
    "ramp": {"train": {"batch_ramp": RAMP}},
    "recompute": {"memory": {"recompute": "full"}},
    "documents": {"data": {"document_mask": True}},
}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("balance", "schedule", "further"), list(product(BALANCES, SCHEDULES, FURTHER))
)
def test_every_balance_under_every_schedule(
    balance: str, schedule: str, further: str, shared_ranks: SharedRanks, tmp_path: Path
) -> None:
    axes = {"pipeline": 2, "schedule": schedule}
    sections = FURTHER[further]
    prove(shared_ranks, make(balance, 2, axes, sections), make(balance, 1, {}, sections), tmp_path)
