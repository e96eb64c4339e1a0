"""The dry run counts what the real parallel code would hold, for any number of ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from phalanx.config import Job, check, job_from_table, resolve
from phalanx.parallel.dryrun import DryRunReport
from phalanx.parallel.dryrun import dry_run as dry_run_here
from phalanx.plan.memory.model_counts import parameters
from phalanx.train.parity.prove import make_trainer
from tests.parallel.test_parity import make_job
from tests.ranks import run_alone


def job_of(preset: str, world_size: int, parallel: dict[str, Any]) -> Job:
    table = {
        "model": {"preset": preset},
        "data": {"sequence": 4096},
        "parallel": parallel,
        "train": {"global_batch": 2048, "device": "cuda"},
    }
    job = resolve(job_from_table(table), world_size)
    check(job, world_size)
    return job


def dry_run(job: Job, world_size: int) -> DryRunReport:
    report: DryRunReport = run_alone(dry_run_here, job, world_size)
    return report


def state_bytes(job: Job, world_size: int) -> list[int]:
    rows = dry_run(job, world_size).rows
    return [row.weight_bytes + row.gradient_bytes + row.optimizer_bytes for row in rows]


# Bytes a parameter that a rank holds whole, and those divided over the shards.
LEVELS = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}


@pytest.mark.parametrize("zero", LEVELS)
def test_sixteen_bytes_a_parameter_divided_by_the_zero_level(zero: int) -> None:
    parallel: dict[str, Any] = {"tensor": 4, "zero": zero}
    if zero < 3:  # at ZeRO 3 gradients lie beside fp32 parameters, in fp32
        parallel["reduce_dtype"] = "compute"
    job = job_of("llama3-8b", 64, parallel)
    if zero == 0:  # masters and moments of a pure copy are not divided at all
        assert job.parallel.replicate == 16
    (found,) = state_bytes(job, 64)
    whole, divided = LEVELS[zero]
    count = parameters(job.model).total
    norms = (2 * job.model.layers + 1) * job.model.dim  # not divided by tensor parallelism
    held = (count - norms) / 4 + norms
    assert found == pytest.approx(held * (whole + divided / 16), rel=1e-3)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_optimizer_holds_what_the_trainer_holds(kind: str) -> None:
    """Muon keeps one moment of its matrices, and two of what is left to AdamW."""
    job = make_job(1, {"optimizer": {"kind": kind}})
    trainer = make_trainer(job)
    state = trainer.optimizer.tensors().items()
    held = sum(each.nbytes for name, each in state if name != "optimizer.step")
    trainer.close()
    assert [row.optimizer_bytes for row in dry_run(job, 1).rows] == [held]


def test_stages_cover_the_405b_model_on_16384_ranks() -> None:
    job = job_of("llama3-405b", 16384, {"tensor": 8, "pipeline": 16, "zero": 1})
    report = dry_run(job, 16384)
    assert report.mesh["shard"] == 128
    assert report.parameters == parameters(job.model).total
    assert [layer for row in report.rows for layer in row.layers] == list(range(126))
    outer = (len(report.rows[0].layers), len(report.rows[-1].layers))
    assert min(len(row.layers) for row in report.rows) >= 7
    assert max(outer) <= max(len(row.layers) for row in report.rows), "the head counts as work"


def dry_run_strictly(job: Job, world_size: int) -> DryRunReport:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return dry_run_here(job, world_size)


@pytest.mark.parametrize("axes", [{}, {"replicate": 2}, {"zero": 0}])
def test_nothing_is_warned_of_that_a_reader_could_not_change(axes: dict[str, int]) -> None:
    job = job_of("llama3-8b", 16, {"context": 2, **axes})
    report: DryRunReport = run_alone(dry_run_strictly, job, 16)
    assert report.rows


def test_expert_and_tensor_parallelism_divide_what_a_rank_computes_with() -> None:
    job = job_of("mixtral-8x7b", 32, {"expert": 8, "tensor": 2, "zero": 2})
    (row,) = dry_run(job, 32).rows
    counts = parameters(job.model)
    assert row.parameters == counts.total
    # Every rank computes with an eighth of the experts and half of the rest.
    experts = counts.total - counts.active + 2 * (counts.total - counts.active) // 6
    rest = counts.total - experts
    routers = job.model.layers * job.model.dim * (8 + 2) + job.model.dim
    expected = experts / 8 + (rest - routers) / 2 + routers
    assert row.parameters_per_rank == pytest.approx(expected, rel=1e-3)
