"""A batch that grows during the run: the same steps on every mesh, and across a resume."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest

from phalanx.config import BatchStage, ConfigError, Job, batch_ramp, check
from phalanx.train.parity.prove import LOSS_TOLERANCE, NORM_TOLERANCE, train
from tests.parallel.test_parity import make_job, train_alone
from tests.shared_ranks import SharedRanks
from tests.train.test_determinism import (
    Result,
    Run,
    checkpoint_of,
    cut_off,
    job_on,
    joined,
    make_runs,
)

RAMP = ({"until_tokens": 32 * 7, "global_batch": 4}, {"until_tokens": 32 * 20, "global_batch": 6})
BATCHES = [4, 4, 6, 6, 8, 8]  # 7 and 20 samples are reached within a step

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp3": (3, {"zero": 3}),
    "ddp2": (2, {"zero": 0}),
    "pp2-1f1b": (2, {"pipeline": 2}),
    "pp2-zero-bubble": (2, {"pipeline": 2, "schedule": "zero-bubble"}),
}


def ramped(ranks: int, parallel: dict[str, Any]) -> Job:
    section = {"steps": len(BATCHES), "batch_ramp": RAMP, "micro_batch": 1}
    return make_job(ranks, {"parallel": parallel, "train": section})


def test_the_samples_of_a_run_follow_the_ramp() -> None:
    ramp = batch_ramp(ramped(1, {}))
    assert [ramp.at(ramp.samples(step)) for step in range(len(BATCHES))] == BATCHES
    assert ramp.samples(len(BATCHES)) == sum(BATCHES)


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_follows_the_ramp_like_one_process(name: str, shared_ranks: SharedRanks) -> None:
    ranks, parallel = MESHES[name]
    expected = train_alone(ramped(1, {}))
    for found in shared_ranks.run(ranks, train, ramped(ranks, parallel)):
        assert [loss for loss, _ in found] == pytest.approx(
            [loss for loss, _ in expected], rel=LOSS_TOLERANCE
        )
        assert [norm for _, norm in found] == pytest.approx(
            [norm for _, norm in expected], rel=NORM_TOLERANCE
        )


CUTS = (1, 2, 4)  # the edges of the ramp


class Runs(NamedTuple):
    """A run of a ramp that was saved at its edges and went on, one that was not, and the rests."""

    saved: list[Result]
    whole: list[Result]
    continued: dict[int, list[Result]]  # by the step they continue from


@pytest.fixture(scope="module", params=[(1, {}), (2, {"pipeline": 2})], ids=["single", "pp2"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ramp")
    ranks, parallel = request.param
    job = job_on(ranks, parallel, folder)
    stages = tuple(BatchStage(**stage) for stage in RAMP)
    # On two replicas' worth of micro-batches, batches of 4, 6 and 8 have 2, 3 and 4 of them.
    job = msgspec.structs.replace(
        job, train=msgspec.structs.replace(job.train, batch_ramp=stages, steps=len(BATCHES))
    )
    (saved,) = make_runs(ranks, job, Run(folder, save_at=CUTS))
    rests = (Run(folder, resume=checkpoint_of(folder, cut)) for cut in CUTS)
    whole, *continued = make_runs(ranks, job, Run(folder / "whole"), *rests)
    return Runs(saved, whole, dict(zip(CUTS, continued, strict=True)))


def test_a_run_that_is_saved_at_the_edges_of_the_ramp_is_as_one_that_is_not(runs: Runs) -> None:
    assert len(runs.saved[0][0]) == len(BATCHES)
    assert runs.whole == runs.saved


@pytest.mark.parametrize("cut", CUTS)
def test_a_run_cut_at_the_edges_of_the_ramp_continues_to_the_bit(runs: Runs, cut: int) -> None:
    assert joined(cut_off(runs.saved, cut), runs.continued[cut]) == runs.saved


@pytest.mark.parametrize(
    ("stages", "parallel", "message"),
    [
        ([(100, 4), (90, 6)], {}, r"batch_ramp\[1\].until_tokens = 90: must be above 100"),
        ([(100, 1)], {}, r"train.micro_batch = 2: must be at most train.batch_ramp\[0\].*nearest"),
        ([(100, 2)], {"pipeline": 2}, r"batch_ramp\[0\].global_batch = 2: gives 1 micro-batches"),
    ],
)
def test_impossible_ramps_are_refused(
    stages: list[tuple[int, int]], parallel: dict[str, Any], message: str
) -> None:
    ranks = parallel.get("pipeline", 1)
    job = make_job(ranks, {"parallel": parallel, "train": {"micro_batch": 2}})
    ramp = tuple(BatchStage(until_tokens=tokens, global_batch=batch) for tokens, batch in stages)
    job = msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, batch_ramp=ramp))
    with pytest.raises(ConfigError, match=message):
        check(job, ranks)
