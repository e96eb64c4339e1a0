"""A job on one node: its spare keeps its snapshots too, and goes on from them if the node dies."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from phalanx.testing.chaos.verdict import orphans
from phalanx.testing.local_cluster import TrialCluster
from tests.control.jobs import assert_same, set_options, undisturbed, write_job
from tests.control.server.test_replay import END_SECONDS, reach
from tests.control.test_paths import PROMPT

STEPS = 20
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
        cluster.pace(job, 0.3)
        commits = cluster.commits(job, world_size=2)
        reach(cluster, commits, 6)
        (spare,) = cluster.job(job)["spares"]
        cluster.kill_node(cluster.node_of(0, job))
        before = commits.newest()
        cluster.wait(lambda: commits.first_after(1), "recovery on the spare", 90)
        first = commits.first_after(1)
        assert before is not None and first is not None
        # One more may have reached the spare that nobody heard of before its node was gone.
        assert first.step - before.step in (1, 2)
        assert cluster.job(job)["nodes"] == [spare]
        cluster.pace(job, 0.0)
        assert cluster.wait_ended(job, END_SECONDS) == "done"
        assert cluster.get(f"/v1/jobs/{job}")["lost_steps"] == 0
        assert cluster.job(job)["generation"] == 2
    assert_same(tmp_path / "runs" / "disturbed" / f"job-{job}", expected)
    assert orphans(tmp_path) == []


# Its second generation makes no step: whoever dies then leaves what the first one handed over.
PROGRAM = """
import os, time
import torch
import phalanx

worker, generation = phalanx.worker(), os.environ["PHALANX_GENERATION"]
state = {"x": torch.zeros(1000)}
step = worker.restore(state)
print(f"generation {generation} from step {step} with {state['x'].mean().item()}", flush=True)
while generation == "2":
    time.sleep(0.1)
while step < (6 if generation == "1" else 12):
    state["x"] += 1
    step += 1
    worker.snapshot(step, state)
    worker.stepped(step)
while generation == "1":
    time.sleep(0.1)
"""
STARTED = re.compile(r"generation (\d) from step (\d+) with (\S+)")
QUICK = """
[timeouts]
heartbeat_ns = 1_000_000_000
missed_heartbeats = 4
round_trip_ns = 500_000_000
reconnect_ns = 1_000_000_000
"""


def test_a_program_on_one_node_that_loses_its_rank_and_then_its_node_goes_on_on_its_spare(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with TrialCluster(tmp_path, nodes=2, policy=QUICK) as cluster:
        job = cluster.submit("--spares", "1", "--", sys.executable, "program.py")
        reach(cluster, cluster.commits(job, world_size=1), 6)
        (spare,) = cluster.job(job)["spares"]
        cluster.signal_worker(0, job, signal.SIGKILL)
        cluster.wait(lambda: len(starts(cluster, job)) == 2, "its next start", 60)
        node = cluster.node_of(0, job)
        cluster.kill_node(node)
        assert cluster.wait_ended(job, END_SECONDS) == "done"
        first, second, third = sorted(starts(cluster, job))
        assert first == ("1", node.name, "0", "0.0") and second == ("2", node.name, "6", "6.0")
        assert third == ("3", spare, "6", "6.0")
        assert cluster.get(f"/v1/jobs/{job}")["lost_steps"] == 0
    assert orphans(tmp_path) == []


def starts(cluster: TrialCluster, job: int) -> list[tuple[str, str, str, str]]:
    """Generation, node, step and state of each start of a program that it printed."""
    return [
        (generation, node.name, step, state)
        for node in cluster.local.nodes
        for path in node.state.glob(f"jobs/{job}/worker-*.log")
        for generation, step, state in STARTED.findall(path.read_text())
    ]
