"""A job on one node: its spare keeps its snapshots too, and goes on from them if the node dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.testing.chaos.verdict import orphans
from phalanx.testing.local_cluster import TrialCluster
from tests.control.jobs import assert_same, set_options, undisturbed, write_job
from tests.control.server.test_replay import END_SECONDS, reach
from tests.control.test_paths import PROMPT

STEPS = 30
ONE_NODE = ("parallel.data=2", "parallel.pipeline=1")


def test_a_job_on_one_node_goes_on_from_the_memory_of_its_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed(tmp_path, STEPS, *ONE_NODE)
    monkeypatch.setenv("PHALANX_CHAOS", "1")  # workers let themselves be slowed down
    path = str(write_job(tmp_path, "disturbed", STEPS))
    policy = PROMPT.format(spares=0)
    with TrialCluster(tmp_path, nodes=2, gpus_per_node=2, policy=policy) as cluster:
        job = cluster.submit(path, *set_options(ONE_NODE), "--spares", "1")
        cluster.pace(job, 0.2)
        commits = cluster.commits(job, world_size=2)
        reach(cluster, commits, 8)
        (spare,) = cluster.job(job)["spares"]
        cluster.kill_node(cluster.node_of(0, job))
        before = commits.newest()
        cluster.wait(lambda: commits.first_after(1), "recovery on the spare", 90)
        first = commits.first_after(1)
        assert before is not None and first is not None and first.step == before.step + 1
        assert cluster.job(job)["nodes"] == [spare]
        cluster.pace(job, 0.0)
        assert cluster.wait_ended(job, END_SECONDS) == "done"
        assert cluster.get(f"/v1/jobs/{job}")["lost_steps"] == 0
        assert cluster.job(job)["generation"] == 2
    assert_same(tmp_path / "runs" / "disturbed" / f"job-{job}", expected)
    assert orphans(tmp_path) == []
