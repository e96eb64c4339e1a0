"""A server with a fresh state numbers its jobs from 1 again; old runs are not theirs."""

from __future__ import annotations

import json
import shutil
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


PROGRAM = """
ls $PHALANX_FOLDER; touch $PHALANX_FOLDER/own
case {word} in old) echo old > $PHALANX_RESULT;; esac
echo {word} ran as $TORCHELASTIC_RUN_ID
"""


def test_a_job_of_a_new_server_finds_nothing_of_an_old_ones_on_its_nodes(tmp_path: Path) -> None:
    """No log, no file and no result: the old job may have been another user's."""
    printed = []
    for word in ("old", "new"):
        with TrialCluster(tmp_path, nodes=1) as cluster:
            job = cluster.submit("--", "sh", "-c", PROGRAM.format(word=word))
            assert job == 1 and cluster.wait_ended(job, END_SECONDS) == "done"
            printed.append(json.loads(cluster.command("logs", str(job)))["text"].splitlines())
        shutil.rmtree(tmp_path / "server")  # the nodes keep their folders
    old, new = printed
    assert [line.split()[1] for line in new] == ["new"]
    assert old[-1].split()[-1] != new[-1].split()[-1]  # by which programs name their own folders
    jobs = cluster.local.nodes[0].state / "jobs"
    (aside,) = [each for each in jobs.iterdir() if each.is_dir() and each.name != "1"]
    assert aside.name.startswith("1-") and "old ran" in (aside / "worker-0.log").read_text()
    assert (aside / "work" / "own").exists() and not (jobs / "1" / "work" / "result-1").exists()
