"""Chaos on a real Slurm: what is killed inside an allocation costs seconds and no step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from phalanx.cli.jobs import rank_places
from phalanx.control.api_types import JobDetail, NodeList
from phalanx.control.backends.slurm.facts import topology
from phalanx.control.backends.slurm.sandbox import Sandbox
from phalanx.control.backends.slurm.stage import SlurmJob
from phalanx.control.backends.stage import HARMS
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
    job = SlurmJob(sandbox, tmp_path, 4, str(write_job(tmp_path, "disturbed")), *SMALL)
    job.wait_running()
    assert_placed_by_leaf(sandbox, job)
    commits = job.commits()
    for what in ("worker", "node"):
        job.harm(what, commits)  # type: ignore[arg-type]
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
    job = SlurmJob(sandbox, tmp_path, 6, str(path), *words, *set_options(SIX_RANKS))
    job.wait_running()
    commits = job.commits()
    for what in HARMS:
        job.harm(what, commits)
    assert job.wait_ended(END_SECONDS) == "COMPLETED"
    assert job.restarts() == 0
    assert_same(job.run, expected)
    assert [name for name in job.sockets_left() if sandbox.node_runs(name)] == []
