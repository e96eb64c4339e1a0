"""A one-GPU job that is killed goes on from host memory, in a process that stood by."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from phalanx.testing.local_cluster import TrialCluster
from phalanx.testing.local_processes import worker_pids
from tests.control.jobs import assert_same, generations, set_options, undisturbed, write_job

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(400)]

STEPS = 300
SETTINGS = (
    "train.device=cuda",
    "precision.compute=bfloat16",
    "parallel.data=1",
    "parallel.pipeline=1",
    "model.dim=256",
    "data.sequence=256",
)


def contexts(folder: Path, count: int) -> bool:
    """Whether so many processes have made a context and stood by."""
    log = folder / "standby-0.log"
    return log.exists() and log.read_text().count("a context stands by") >= count


def test_a_killed_worker_is_restored_from_host_memory(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, STEPS, *SETTINGS, forked=False)
    with TrialCluster(tmp_path, nodes=1) as cluster:
        path = write_job(tmp_path, "disturbed", STEPS)
        job = cluster.submit(str(path), *set_options(SETTINGS))
        commits = cluster.commits(job, world_size=1)
        folder = cluster.local.nodes[0].state / "jobs" / str(job)
        for generation in (1, 2):
            cluster.wait(partial(commits.first_after, generation - 1), "steps", 200)
            cluster.wait(partial(contexts, folder, generation), "a context that stands by", 60)
            before = commits.newest()
            assert before is not None
            cluster.signal_worker(0, job, signal.SIGKILL)
            cluster.wait(partial(commits.first_after, generation), "recovery", 60)
            after = commits.first_after(generation)
            assert after is not None and after.step >= before.step
        assert len(worker_pids(cluster.local.nodes[0], job)) == 1
        assert cluster.wait_ended(job, 200) == "done"
    run = tmp_path / "runs" / "disturbed" / f"job-{job}"
    assert set(generations(run).values()) == {1, 2, 3}
    assert_same(run, expected)
