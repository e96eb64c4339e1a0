"""Two things die at the same instant: the next controller finds out what stands still, and why."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.control.backends.local import processes_of
from phalanx.testing.chaos.verdict import orphans
from phalanx.testing.local_cluster import Commits, TrialCluster
from phalanx.testing.local_processes import worker_pids
from tests.control.jobs import assert_same, undisturbed, write_job
from tests.control.server.test_replay import END_SECONDS, reach

# Far below the deadlines for a hang (a minute) and for silence (longer), on a busy machine too.
AT_ONCE_SECONDS = 45.0
PATIENT = "[spares]\nnodes = 2\n[timeouts]\nmissed_heartbeats = 60\n"
STEPS = 120


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TrialCluster]:
    """A cluster of four nodes and two spares."""
    with TrialCluster(tmp_path, nodes=4, spares=2, policy=PATIENT) as cluster:
        yield cluster
    assert orphans(tmp_path) == []


def running(cluster: TrialCluster, root: Path) -> tuple[int, Commits]:
    job = cluster.submit(str(write_job(root, "disturbed", STEPS)))
    commits = cluster.commits(job, world_size=4)
    reach(cluster, commits, 10)
    return job, commits


def goes_on(
    cluster: TrialCluster, job: int, commits: Commits, since: float, generation: int = 1
) -> None:
    cluster.wait(lambda: commits.first_after(generation), "recovery", 120)
    found = commits.first_after(generation)
    assert found is not None
    story = [str(event)[:300] for event in cluster.get(f"/v1/events?limit=40&job={job}")["events"]]
    assert found.at - since < AT_ONCE_SECONDS, "\n".join(story)
    assert cluster.get(f"/v1/jobs/{job}")["lost_steps"] == 0


def test_the_server_and_a_worker(cluster: TrialCluster, tmp_path: Path) -> None:
    job, commits = running(cluster, tmp_path)
    worker = worker_pids(cluster.node_of(1, job), job)[0]
    assert cluster.server is not None
    cluster.server.kill()
    os.kill(worker, signal.SIGKILL)
    cluster.server.wait()
    cluster.start_server()
    goes_on(cluster, job, commits, time.monotonic())
    assert cluster.job(job)["why"]["facts"]["cause"] == "worker_killed"  # and not a hang, or a node
    cluster.command("cancel", str(job))


@pytest.mark.soak
def test_the_server_and_a_node(cluster: TrialCluster, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, STEPS)
    job, commits = running(cluster, tmp_path)
    node = cluster.node_of(1, job)
    assert cluster.server is not None
    cluster.server.kill()
    cluster.kill_node(node)
    cluster.server.wait()
    cluster.start_server()
    goes_on(cluster, job, commits, time.monotonic())
    assert node.name not in cluster.job(job)["nodes"]
    assert cluster.wait_ended(job, END_SECONDS) == "done"
    assert_same(tmp_path / "runs" / "disturbed" / f"job-{job}", expected)


@pytest.mark.soak
@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
def test_a_node_and_the_spare_that_would_replace_it(
    cluster: TrialCluster, tmp_path: Path, frozen: bool
) -> None:
    """A spare that stands still keeps its connection: only that it does not answer betrays it."""
    expected = undisturbed(tmp_path, STEPS)
    job, commits = running(cluster, tmp_path)
    spares = [each for each in cluster.get("/v1/nodes")["nodes"] if each["state"] == "spare"]
    first = cluster.node(spares[0]["name"])
    if frozen:
        for pid in processes_of(first):
            os.kill(pid, signal.SIGSTOP)
    else:
        cluster.kill_node(first)
    goes_on(cluster, job, commits, cluster.kill_node(cluster.node_of(1, job)))
    if frozen:
        for pid in processes_of(first):
            os.kill(pid, signal.SIGCONT)
    assert cluster.wait_ended(job, END_SECONDS) == "done"
    assert_same(tmp_path / "runs" / "disturbed" / f"job-{job}", expected)


@pytest.mark.soak
def test_a_drain_and_a_worker_that_dies_in_it_lose_nothing(
    cluster: TrialCluster, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path, STEPS)
    job, commits = running(cluster, tmp_path)
    worker = worker_pids(cluster.node_of(2, job), job)[0]
    cluster.client.post(f"/v1/jobs/{job}/drain", None, dict)
    os.kill(worker, signal.SIGKILL)
    known = commits.newest()
    assert known is not None
    cluster.wait(lambda: cluster.job(job)["state"] == "pending", "the job to leave", 60)
    assert cluster.job(job)["durable"] >= known.step
    cluster.command("resume", str(job))
    assert cluster.wait_ended(job, END_SECONDS) == "done"
    assert cluster.get(f"/v1/jobs/{job}")["lost_steps"] == 0
    assert_same(tmp_path / "runs" / "disturbed" / f"job-{job}", expected)
