"""Whatever is killed, the run goes on, and ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.testing.chaos.verdict import belonging, orphans
from phalanx.testing.local_cluster import Commits, TrialCluster
from phalanx.testing.local_processes import worker_pids
from tests.control.jobs import FEW_STEPS, assert_same, generations, undisturbed, write_job
from tests.control.servers import ServerProcess

END_SECONDS = 180


@pytest.fixture
def cluster(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TrialCluster]:
    """A cluster of four nodes and a spare; its policy may be given as the fixture's parameter."""
    monkeypatch.setenv("PHALANX_CHAOS", "1")  # workers let themselves be slowed down
    with TrialCluster(tmp_path, nodes=4, spares=1, policy=getattr(request, "param", "")) as cluster:
        yield cluster
    # Snapshots lie in memory without a name, and ports are held by processes: both go with them.
    assert orphans(tmp_path) == []


def test_a_killed_worker_and_a_killed_node_lose_nothing(
    cluster: TrialCluster, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path, FEW_STEPS)
    job = cluster.submit(str(write_job(tmp_path, "disturbed", FEW_STEPS)))
    cluster.pace(job, 0.35)  # both kills come before its end, however late we are
    commits = cluster.commits(job, world_size=4)
    reach(cluster, commits, 5)
    cluster.signal_worker(2, job, signal.SIGKILL)
    cluster.wait(lambda: commits.first_after(1), "recovery from a killed worker", 120)
    cluster.kill_node(cluster.node_of(0, job))  # the rendezvous was there, too
    cluster.wait(lambda: commits.first_after(2), "recovery from a killed node", 120)
    cluster.pace(job, 0.0)
    assert cluster.wait_ended(job, END_SECONDS) == "done"
    folder = tmp_path / "runs" / "disturbed" / f"job-{job}"
    made_by = generations(folder)
    assert set(made_by) == set(range(1, FEW_STEPS + 1))
    assert set(made_by.values()) == {1, 2, 3}
    assert_same(folder, expected)


@pytest.mark.soak
def test_with_a_snapshot_of_every_third_step_a_kill_costs_up_to_three(
    cluster: TrialCluster, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path)
    settings = ("--set", "checkpoint.memory_every=3")
    job = cluster.submit(str(write_job(tmp_path, "disturbed")), *settings)
    commits = cluster.commits(job, world_size=4)
    reach(cluster, commits, 6)
    cluster.signal_worker(2, job, signal.SIGKILL)
    cluster.wait(lambda: commits.first_after(1), "recovery from a killed worker", 120)
    assert cluster.wait_ended(job, END_SECONDS) == "done"
    folder = tmp_path / "runs" / "disturbed" / f"job-{job}"
    made_by = generations(folder)
    second = min(step for step, generation in made_by.items() if generation == 2)
    assert second % 3 == 1  # from a third step on
    assert_same(folder, expected)


@pytest.mark.soak
def test_a_killed_controller_is_not_noticed_by_workers(
    cluster: TrialCluster, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path)
    job = cluster.submit(str(write_job(tmp_path, "disturbed")))
    commits = cluster.commits(job, world_size=4)
    reach(cluster, commits, 5)
    cluster.kill_server()
    at = commits.newest()
    assert at is not None
    reach(cluster, commits, at.step + 10)
    cluster.start_server()
    assert cluster.wait_ended(job, END_SECONDS) == "done"
    folder = tmp_path / "runs" / "disturbed" / f"job-{job}"
    assert set(generations(folder).values()) == {1}
    assert_same(folder, expected)


# However long an agent takes to start on a busy machine, its node is not given up meanwhile.
PATIENT = """
[spares]
nodes = 1
[timeouts]
heartbeat_ns = 30_000_000_000
reconnect_ns = 60_000_000_000
"""


@pytest.mark.soak
@pytest.mark.parametrize("cluster", [PATIENT], indirect=True)
def test_a_restarted_agent_adopts_what_runs(cluster: TrialCluster, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, 120)
    job = cluster.submit(str(write_job(tmp_path, "disturbed", 120)))
    commits = cluster.commits(job, world_size=4)
    reach(cluster, commits, 5)
    node = cluster.node_of(1, job)
    cluster.kill_agent(node)
    cluster.restart_node(node)
    nodes = lambda: {each["name"]: each for each in cluster.get("/v1/nodes")["nodes"]}  # noqa: E731
    cluster.wait(lambda: nodes()[node.name]["connected"], "the agent to be back")
    # What it adopted it can also recover: its worker is killed next.
    cluster.signal_worker(1, job, signal.SIGKILL)
    cluster.wait(lambda: commits.first_after(1), "recovery", 120)
    assert cluster.wait_ended(job, END_SECONDS) == "done"
    folder = tmp_path / "runs" / "disturbed" / f"job-{job}"
    assert set(generations(folder).values()) == {1, 2}
    assert_same(folder, expected)


@pytest.mark.soak
def test_an_agent_that_comes_back_too_late_ends_what_its_node_kept(
    cluster: TrialCluster, tmp_path: Path
) -> None:
    job = cluster.submit(str(write_job(tmp_path, "disturbed", 400)))
    commits = cluster.commits(job, world_size=4)
    reach(cluster, commits, 5)
    node = cluster.node_of(1, job)
    cluster.kill_agent(node)
    # Its worker goes too: the job continues elsewhere, and only a keeper is left here.
    os.kill(worker_pids(node, job)[0], signal.SIGKILL)
    cluster.wait(lambda: commits.first_after(1), "recovery elsewhere", 120)
    assert node.name not in cluster.job(job)["nodes"]
    folder = node.state / "jobs" / str(job)
    assert belonging(folder)
    cluster.restart_node(node)
    cluster.wait(lambda: not belonging(folder), "the keeper to end", 30)
    cluster.command("cancel", str(job))


@pytest.mark.soak
def test_nodes_of_a_killed_server_work_on_and_are_adopted_by_the_next(tmp_path: Path) -> None:
    job = write_job(tmp_path, "orphaned", 10**6)
    settings = ("--set", "parallel.pipeline=1")
    with ServerProcess(tmp_path / "state", "--nodes", "2") as server:
        words = ("submit", str(job), *settings, "--state", str(server.state))
        command = [sys.executable, "-m", "phalanx", *words]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=120)
        server.wait_for("/v1/jobs/1", lambda answer: answer["job"]["committed"] >= 5)
        server.kill()
        server.start()
        before = server.call("GET", "/v1/jobs/1")[1]["job"]["step"]
        found = server.wait_for("/v1/jobs/1", lambda answer: answer["job"]["step"] > before + 5)
        assert (found["job"]["generation"], found["job"]["state"]) == (1, "running")
        server.stop()
    assert orphans(tmp_path) == []


def reach(cluster: TrialCluster, commits: Commits, step: int) -> None:
    cluster.wait(lambda: (found := commits.newest()) and found.step >= step, f"step {step}", 120)
