"""A server with a fresh state numbers its jobs from 1 again; old runs are not theirs."""

from __future__ import annotations

from pathlib import Path

from phalanx.testing.local_cluster import TrialCluster
from tests.control.jobs import assert_same, losses, undisturbed, write_job
from tests.control.server.test_replay import END_SECONDS


def test_a_job_of_a_new_server_begins_in_a_folder_of_its_own(tmp_path: Path) -> None:
    steps, runs = 4, tmp_path / "runs"
    expected = undisturbed(tmp_path, steps)
    for server in ("old", "new"):
        root = tmp_path / server
        root.mkdir()
        path = str(write_job(root, "same", steps))
        with TrialCluster(root, nodes=1, gpus_per_node=4) as cluster:
            job = cluster.submit(path, "--set", f"runs={runs}")
            assert job == 1
            assert cluster.wait_ended(job, END_SECONDS) == "done", cluster.job(job)
    one, other = sorted((runs / "same").iterdir())
    assert one.name == "job-1" and other.name.startswith("job-1-")
    for folder in (one, other):
        assert sorted(losses(folder)) == list(range(1, steps + 1))
        assert_same(expected, folder)
