"""Chaos on a real Slurm: what is killed inside an allocation costs seconds and no step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from phalanx.cli.jobs import rank_places
from phalanx.control.api_types import JobDetail, NodeList
from phalanx.control.backends.slurm.facts import topology
from phalanx.control.backends.slurm.sandbox import Sandbox
from phalanx.control.backends.slurm.stage import SlurmJob
from tests.control.jobs import (
    assert_same,
    generations,
    set_options,
    undisturbed,
    write_job,
)

END_SECONDS = 240
SIX_RANKS = ("parallel.data=3", "train.global_batch=12")  # three replicas of two stages
SMALL = ("--slot-gpus", "1", "--spares", "1")  # one rank a node


def reach(job: SlurmJob, commits: object, step: int) -> None:
    newest = lambda: (found := commits.newest()) and found.step >= step  # type: ignore[attr-defined]  # noqa: E731
    job.wait(newest, f"step {step}")


def other_slot(job: SlurmJob) -> int:
    """A slot that is not on the node of the script, whose loss ends the allocation."""
    return next(s for s, name in enumerate(job.job()["nodes"]) if name != job.batch_host())


def assert_placed_by_leaf(sandbox: Sandbox, job: SlurmJob) -> None:
    """Ranks stand below the leaves that Slurm's own topology names, neighbours together."""
    switches = topology(sandbox.run("scontrol", "show", "topology"))
    leaf_of = {node: each.name for each in switches if not each.level for node in each.nodes}
    detail = job.client.get("/v1/jobs/1", JobDetail)
    nodes = {node.name: node for node in job.client.get("/v1/nodes", NodeList).nodes}
    places = rank_places(detail, nodes)
    assert [place.rank for place in places] == [0, 1, 2, 3]
    assert [place.stage for place in places] == [0, 0, 1, 1]
    assert all(place.leaf == leaf_of[place.node] for place in places)
    leaves = [place.leaf for place in places]
    assert len(list(groupby(leaves))) == len(set(leaves))  # no leaf is left and entered again


def test_a_killed_worker_and_a_killed_node_lose_nothing(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=5, gpus_per_node=1)
    expected = undisturbed(tmp_path)
    job = SlurmJob(sandbox, tmp_path, str(write_job(tmp_path, "disturbed")), *SMALL)
    job.wait_running()
    assert_placed_by_leaf(sandbox, job)
    commits = job.commits(4)
    reach(job, commits, 5)
    job.signal_worker(other_slot(job), signal.SIGKILL)
    job.wait(lambda: commits.first_after(1), "recovery from a killed worker", 60)
    job.kill_node(job.node_of(other_slot(job)).name)
    job.wait(lambda: commits.first_after(2), "recovery from a killed node", 60)
    assert job.wait_ended(END_SECONDS) == "COMPLETED"
    assert job.restarts() == 0
    assert set(generations(job.run).values()) == {1, 2, 3}
    assert_same(job.run, expected)


@pytest.mark.soak
def test_worker_node_hang_and_controller_on_eight_nodes(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=8, gpus_per_node=1)
    expected = undisturbed(tmp_path, 250, *SIX_RANKS)
    (tmp_path / "policy.toml").write_text("[timeouts]\nleast_hang_ns = 2_000_000_000\n")
    path = write_job(tmp_path, "disturbed", 250)
    words = ["--slot-gpus", "1", "--spares", "2", "--policy", str(tmp_path / "policy.toml")]
    job = SlurmJob(sandbox, tmp_path, str(path), *words, *set_options(SIX_RANKS))
    job.wait_running()
    commits = job.commits(6)
    for generation, harm in enumerate(("worker", "node", "hang"), start=1):
        start = commits.newest()
        reach(job, commits, (start.step if start else 0) + 10)
        if harm == "node":
            job.kill_node(job.node_of(other_slot(job)).name)
        else:
            how = signal.SIGSTOP if harm == "hang" else signal.SIGKILL
            job.signal_worker(other_slot(job), how)
        job.wait(lambda g=generation: commits.first_after(g), f"recovery from {harm}", 120)  # type: ignore[misc]
        job.wait_running()
    before = commits.newest()
    assert before is not None
    job.kill_controller()
    reach(job, commits, before.step + 5)
    assert job.wait_ended(END_SECONDS) == "COMPLETED"
    assert job.restarts() == 0
    assert_same(job.run, expected)
