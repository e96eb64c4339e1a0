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
from phalanx.testing.local_cluster import Commits, Stage
from phalanx.testing.local_processes import worker_pids
from tests.control.jobs import assert_same, undisturbed, write_job
from tests.control.server.test_replay import END_SECONDS, reach

# Far below the deadlines for a hang (a minute) and for silence (21 s), on a busy machine too.
AT_ONCE_SECONDS = 18.0
STEPS = 120


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A cluster of four nodes and two spares."""
    with Stage(tmp_path, nodes=4, spares=2) as stage:
        yield stage
    assert orphans(tmp_path) == []


def running(stage: Stage, root: Path) -> tuple[int, Commits]:
    job = stage.submit(str(write_job(root, "disturbed", STEPS)))
    commits = stage.commits(job, world_size=4)
    reach(stage, commits, 10)
    return job, commits


def goes_on(stage: Stage, job: int, commits: Commits, since: float, generation: int = 1) -> None:
    stage.wait(lambda: commits.first_after(generation), "recovery", 120)
    found = commits.first_after(generation)
    assert found is not None
    story = [str(event)[:300] for event in stage.get(f"/v1/events?limit=40&job={job}")["events"]]
    assert found.at - since < AT_ONCE_SECONDS, "\n".join(story)
    assert stage.get(f"/v1/jobs/{job}")["lost_steps"] == 0


def test_the_server_and_a_worker(stage: Stage, tmp_path: Path) -> None:
    job, commits = running(stage, tmp_path)
    worker = worker_pids(stage.node_of(1, job), job)[0]
    assert stage.server is not None
    stage.server.kill()
    os.kill(worker, signal.SIGKILL)
    stage.server.wait()
    stage.start_server()
    goes_on(stage, job, commits, time.monotonic())
    assert stage.job(job)["why"]["facts"]["cause"] == "worker_killed"  # and not a hang, or a node
    stage.command("cancel", str(job))


@pytest.mark.soak
def test_the_server_and_a_node(stage: Stage, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, STEPS)
    job, commits = running(stage, tmp_path)
    node = stage.node_of(1, job)
    assert stage.server is not None
    stage.server.kill()
    stage.kill_node(node)
    stage.server.wait()
    stage.start_server()
    goes_on(stage, job, commits, time.monotonic())
    assert node.name not in stage.job(job)["nodes"]
    assert stage.wait_ended(job, END_SECONDS) == "done"
    assert_same(tmp_path / "runs" / "disturbed" / f"job-{job}", expected)


@pytest.mark.soak
@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
def test_a_node_and_the_spare_that_would_replace_it(
    stage: Stage, tmp_path: Path, frozen: bool
) -> None:
    """A spare that stands still keeps its connection: only that it does not answer betrays it."""
    expected = undisturbed(tmp_path, STEPS)
    job, commits = running(stage, tmp_path)
    spares = [each for each in stage.get("/v1/nodes")["nodes"] if each["state"] == "spare"]
    first = stage.node(spares[0]["name"])
    if frozen:
        for pid in processes_of(first):
            os.kill(pid, signal.SIGSTOP)
    else:
        stage.kill_node(first)
    goes_on(stage, job, commits, stage.kill_node(stage.node_of(1, job)))
    if frozen:
        for pid in processes_of(first):
            os.kill(pid, signal.SIGCONT)
    assert stage.wait_ended(job, END_SECONDS) == "done"
    assert_same(tmp_path / "runs" / "disturbed" / f"job-{job}", expected)


@pytest.mark.soak
def test_a_drain_and_a_worker_that_dies_in_it_lose_nothing(stage: Stage, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, STEPS)
    job, commits = running(stage, tmp_path)
    worker = worker_pids(stage.node_of(2, job), job)[0]
    stage.client.post(f"/v1/jobs/{job}/drain", None, dict)
    os.kill(worker, signal.SIGKILL)
    known = commits.newest()
    assert known is not None
    stage.wait(lambda: stage.job(job)["state"] == "pending", "the job to leave", 60)
    assert stage.job(job)["durable"] >= known.step
    stage.command("resume", str(job))
    assert stage.wait_ended(job, END_SECONDS) == "done"
    assert stage.get(f"/v1/jobs/{job}")["lost_steps"] == 0
    assert_same(tmp_path / "runs" / "disturbed" / f"job-{job}", expected)
