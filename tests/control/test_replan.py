"""A job on a cluster of processes is changed while it trains: no step is lost or made twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.testing.local_cluster import TrialCluster
from phalanx.train import StepRecord, read_records
from tests.control.jobs import losses, undisturbed, write_job

pytestmark = pytest.mark.timeout(300)

CONSTANT = "schedule.kind=constant"  # the same steps, however many follow
LEAST_STEP = 0.05  # seconds: so that few steps are made


def steps_made(root: Path, name: str) -> list[StepRecord]:
    (folder,) = (root / "runs" / name).iterdir()
    return list(read_records(folder / "metrics" / "steps.jsonl", StepRecord))


def runs_again(cluster: TrialCluster, job: int, generation: int) -> dict[str, Any]:
    """The job once a step of a later generation is on record."""

    def made() -> bool:
        shown = cluster.job(job)
        if shown["generation"] <= generation or shown["state"] != "running":
            return False
        return steps_made(cluster.root, shown["name"])[-1].generation > generation

    cluster.wait(made, "the changed job to run", 120)
    return cluster.job(job)


def test_a_job_is_changed_and_scaled_without_losing_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CHAOS", "1")  # workers let themselves be slowed down
    with TrialCluster(tmp_path, nodes=2, gpus_per_node=1) as cluster:
        path = write_job(tmp_path, "changed", 100_000)
        path.write_text(path.read_text().replace("pipeline = 2", "pipeline = 1"))
        job = cluster.submit(str(path), "--set", CONSTANT)
        cluster.pace(job, LEAST_STEP)
        cluster.wait(lambda: cluster.job(job)["step"] > 20, "steps", 120)
        asked = ("--set", "parallel.pipeline=2", "--set", "parallel.zero=1")
        answer = json.loads(cluster.command("what-if", str(job), *asked))
        assert answer["calibration"] != 1 and "pipeline 2" in answer["then"]["mapping"]
        first = cluster.job(job)["generation"]
        told = json.loads(cluster.command("replan", str(job), *asked, "--apply"))
        assert "parallel.pipeline = 2" in told["message"]
        shown = runs_again(cluster, job, first)
        assert shown["replicas"] == 1 and len(shown["nodes"]) == 2
        for refused, words in (
            (("scale", str(job), "--gpus", "6"), "6"),
            (("replan", str(job), "--apply", "--set", "train.seed=1"), "another run"),
            (("replan", str(job), "--apply", "--set", "parallel.pipeline=3"), "parallel.pipeline"),
        ):
            with pytest.raises(RuntimeError, match=words):
                cluster.command(*refused)
        assert cluster.job(job)["state"] == "running"
        second = cluster.job(job)["generation"]
        one = ("--set", "parallel.pipeline=1", "--gpus", "1", "--apply")
        cluster.command("replan", str(job), *one)
        runs_again(cluster, job, second)
        third = cluster.job(job)["generation"]
        cluster.command("scale", str(job), "2")
        runs_again(cluster, job, third)
        changes = cluster.events("Replan", job)
        cluster.command("cancel", str(job))
        made = steps_made(tmp_path, "changed")
    assert [each.step for each in made] == list(range(1, len(made) + 1)), "each step once, in order"
    samples = [each.first_sample for each in made]
    assert samples == [8 * number for number in range(len(made))], "and with its own samples"
    assert {each.generation for each in made} == {first, second, third, third + 1}
    assert {each["change"]["by"] for each in changes} == {shown["user"]}
    assert len(changes) == 4, "also the one that had no place"
    assert changes[0]["change"]["before"].startswith("data 2")
    assert changes[0]["change"]["step_ns"]["mid"] > 0
    alone = undisturbed(tmp_path, len(made), CONSTANT, "parallel.pipeline=1", "parallel.data=1")
    assert {each.step: each.loss for each in made} == pytest.approx(losses(alone), rel=1e-4)
