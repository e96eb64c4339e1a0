"""The stages of a job on a cluster are changed while it trains, and a worker is killed after it.

What it reads and learns is, to the bit, what a job reads and learns that had these stages from the
beginning.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.testing.local_cluster import TrialCluster
from tests.control.jobs import (
    assert_same,
    first_samples,
    undisturbed,
    write_job,
)
from tests.data.corpora import write_corpus

pytestmark = pytest.mark.timeout(300)

STEPS = 36
SLOW = 1.0  # seconds: so that the orders come before the steps that they are about


def blend(root: Path) -> tuple[str, ...]:
    """Settings of two sources, of which the run begins with one."""
    settings = ["parallel.pipeline=1", "data.source=shards"]
    for name, tokens, weight in (("web", 40_000, 1), ("code", 30_000, 0)):
        write_corpus(root / name, tokens, vocab=512)
        settings += [f"data.blend.{name}.path={root / name}", f"data.blend.{name}.weight={weight}"]
    return tuple(settings)


def test_stages_are_changed_while_the_job_trains_and_hold_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CHAOS", "1")  # workers let themselves be slowed down
    settings = blend(tmp_path)
    with TrialCluster(tmp_path, nodes=2) as cluster:
        overrides = [word for each in settings for word in ("--set", each)]
        job = cluster.submit(str(write_job(tmp_path, "restaged", STEPS)), *overrides)
        cluster.pace(job, SLOW)
        cluster.wait(lambda: cluster.job(job)["step"] > 2, "steps", 120)
        asked = ("--after-step", "20", "--weight", "web=1", "--weight", "code=3")
        longer = ("--sequence", "64", "--global-batch", "4")
        answer = json.loads(cluster.command("what-if", str(job), *asked, *longer))
        assert answer["stages"]["made_before"] == 20 and len(answer["stages"]["now"]) == 1
        assert not cluster.events("Replan", job), "it was only asked"
        cluster.command("replan", str(job), *asked, *longer, "--apply")
        cluster.wait(lambda: cluster.job(job)["generation"] == 2, "the changed job to form", 120)
        cluster.wait(lambda: cluster.job(job)["state"] == "running", "the changed job to run", 120)
        dropped = ("--after-step", "24", "--weight", "code=1", "--apply")
        cluster.command("replan", str(job), *dropped)
        cluster.wait(lambda: cluster.job(job)["generation"] == 3, "the second change", 120)
        cluster.wait(lambda: cluster.job(job)["state"] == "running", "the second change", 120)
        cluster.command("replan", str(job), "--undo", "--apply")
        cluster.wait(lambda: cluster.job(job)["generation"] == 4, "the first stages", 120)
        cluster.wait(lambda: cluster.job(job)["state"] == "running", "the first stages", 120)
        with pytest.raises(RuntimeError, match=r"step 2 would be another one.* is step"):
            cluster.command("replan", str(job), "--after-step", "1", "--weight", "web=1", "--apply")
        cluster.wait(lambda: cluster.job(job)["step"] > 21, "the stage", 120)
        cluster.signal_worker(1, job)
        cluster.wait(lambda: cluster.job(job)["generation"] == 5, "a new generation", 120)
        cluster.pace(job, 0.0)
        assert cluster.wait_ended(job, 180) == "done"
        changes = [each["change"] for each in cluster.events("Replan", job)]
        assert [each["made_before"] for each in changes] == [20, 24, 24, 1], "the refused one too"
        assert cluster.get(f"/v1/jobs/{job}")["lost_steps"] == 0
    (made,) = (tmp_path / "runs" / "restaged").iterdir()
    first = 20 * 8
    stages = (
        f"data.stages=[{{tokens = {first * 32}, weights = {{web = 1, code = 3}}}}]",
        f"train.sequence_stages=[{{after_tokens = {first * 32}, sequence = 64, global_batch = 4}}]",
    )
    alone = undisturbed(tmp_path, STEPS, *settings, *stages)
    assert_same(made, alone)
    assert first_samples(made) == first_samples(alone)
