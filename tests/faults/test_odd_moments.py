"""Faults at moments that no table has: within a forming, beyond a lease, on shared nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from phalanx.testing.local_cluster import TrialCluster
from phalanx.testing.local_processes import worker_pids
from tests.control.jobs import assert_same, set_options, undisturbed, write_job
from tests.faults.test_combinations import fill, small_disk
from tests.faults.trial import SHORT_STEPS, Phase, Process, Trial, trial_cluster

pytestmark = pytest.mark.soak
GOES_ON_SECONDS = 60.0  # on a busy machine
SHORT_LEASE = """
[timeouts]
heartbeat_ns = 2_000_000_000
missed_heartbeats = 2
reconnect_ns = 1_000_000_000
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the job comes to when nothing happens to it."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), SHORT_STEPS)


def test_one_rank_killed_three_times_within_one_forming(tmp_path: Path, expected: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        with trial.phase(Phase.FORMING):
            for _ in range(3):
                killed = trial.pid(Process.WORKER)
                os.kill(killed, signal.SIGKILL)
                replaced = lambda: trial.pid(Process.WORKER) != killed  # noqa: B023, E731
                with suppress(TimeoutError):
                    cluster.wait(replaced, "its successor", 10)
        trial.goes_on(GOES_ON_SECONDS)
        trial.ends_like(expected)
        assert cluster.job(trial.job)["retries_used"] == 0
        trial.leaves_nothing()


def test_keepers_killed_while_replicas_are_sent_to_them(tmp_path: Path, expected: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        for slot in (1, 2):
            keeper = trial.pid(Process.KEEPER, slot)
            os.kill(keeper, signal.SIGSTOP)  # what is sent to it stays on its way
            time.sleep(0.7)
            os.kill(keeper, signal.SIGKILL)
            trial.goes_on(GOES_ON_SECONDS)
        trial.ends_like(expected)
        trial.leaves_nothing()


def test_an_agent_that_goes_on_after_its_lease_is_fenced_off(
    tmp_path: Path, expected: Path
) -> None:
    with trial_cluster(tmp_path, policy=SHORT_LEASE) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        agent = trial.pid(Process.AGENT)
        os.kill(agent, signal.SIGSTOP)
        trial.wait(lambda: cluster.job(trial.job)["generation"] >= 2, "another generation")
        trial.goes_on(GOES_ON_SECONDS)
        os.kill(agent, signal.SIGCONT)
        trial.ends_like(expected)
        trial.leaves_nothing()


def test_the_servers_disk_fills_up_while_a_gang_restores(tmp_path: Path, expected: Path) -> None:
    (tmp_path / "server").mkdir()
    with small_disk(tmp_path / "server") as ballast, trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        with trial.phase(Phase.RESTORING):
            fill(ballast)
        time.sleep(8.0)
        ballast.unlink()
        trial.goes_on(GOES_ON_SECONDS)
        trial.ends_like(expected)
        trial.leaves_nothing()


def test_a_drain_while_a_checkpoint_is_written(tmp_path: Path, expected: Path) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        with trial.phase(Phase.FLUSHING), trial.phase(Phase.DRAINING):
            pass
        trial.ends_like(expected)
        trial.leaves_nothing()


def test_two_jobs_that_share_their_nodes_lose_one_of_them(tmp_path: Path, expected: Path) -> None:
    """Each goes on from the memory of the others, though the other job starts there first."""
    with TrialCluster(tmp_path, nodes=4, gpus_per_node=2) as cluster:
        jobs = {}
        for name in ("one", "two"):
            options = ("--share", "--slot-gpus", "1", *set_options(("checkpoint.every=12",)))
            job = cluster.submit(str(write_job(tmp_path, name, SHORT_STEPS)), *options)
            cluster.pace(job, 0.4)
            jobs[job] = tmp_path / "runs" / name / f"job-{job}"
        for job in jobs:
            commits = cluster.commits(job, world_size=4)
            cluster.wait(lambda c=commits: c.next_after(4), "steps")  # type: ignore[misc]
        assert len({tuple(sorted(cluster.job(job)["nodes"])) for job in jobs}) == 1
        node = cluster.node_of(0, next(iter(jobs)))
        cluster.kill_node(node)
        time.sleep(3.0)
        cluster.restart_node(node)
        for job, folder in jobs.items():
            assert cluster.wait_ended(job, 240) == "done", cluster.job(job)
            assert_same(folder, expected)
            assert cluster.get(f"/v1/jobs/{job}")["lost_steps"] == 0


PRINTS = """
import os, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
for number in range(40):
    print(f"attempt {attempt} line {number}", flush=True)
    time.sleep(0.25)
print("the end", flush=True)
"""


def test_a_followed_log_has_each_line_once_whoever_is_killed(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    said = tmp_path / "said"
    with trial_cluster(tmp_path, nodes=2, spares=1) as cluster, said.open("w") as output:
        job = cluster.submit("--world-size", "2", "--", sys.executable, "prints.py")
        command = [sys.executable, "-m", "phalanx", "logs", "-f", str(job)]
        command += ["--state", str(cluster.state)]
        follower = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        cluster.wait(lambda: "line 3" in said.read_text(), "lines", 60)
        cluster.kill_server()
        cluster.start_server()
        other = cluster.node_of(1, job)
        assert worker_pids(other, job)
        cluster.kill_agent(other)
        cluster.restart_node(other)
        time.sleep(2.0)
        first = cluster.node_of(0, job)
        cluster.kill_node(first)
        assert cluster.wait_ended(job, 150) == "done", cluster.job(job)
        assert follower.wait(30) == 0
        cluster.restart_node(first)
    lines = [line for line in said.read_text().splitlines() if "attempt" in line]
    assert len(lines) == len(set(lines)) and "[0] the end\n" in said.read_text()
    assert {f"[0] attempt 1 line {number}" for number in range(40)} < set(lines)
