"""Chaos on a real Slurm: what is killed inside an allocation costs seconds and no step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from phalanx.cli.jobs.show import RankPlace, rank_places
from phalanx.control.backends.slurm.facts import topology
from phalanx.control.wire.api_types import JobDetail, NodeList
from phalanx.testing.engine_job import FAULT_KINDS
from phalanx.testing.slurm.job import ENDED, SlurmJob
from phalanx.testing.slurm.sandbox import Sandbox
from tests.control.jobs import (
    FEW_STEPS,
    assert_same,
    generations,
    set_options,
    undisturbed,
    write_job,
)

END_SECONDS = 240
SIX_RANKS = ("parallel.data=3", "train.global_batch=12")  # three replicas of two stages
PAIRS = ("--slot-gpus", "2", "--spares", "1")  # two ranks a node


def placed(sandbox: Sandbox, job: SlurmJob) -> list[RankPlace]:
    """Rank, node and leaf, as the command line shows them; leaves are those that Slurm names."""
    switches = topology(sandbox.run("scontrol", "show", "topology"))
    leaf_of = {node: each.name for each in switches if not each.level for node in each.nodes}
    detail = job.client.get("/v1/jobs/1", JobDetail)
    nodes = {node.name: node for node in job.client.get("/v1/nodes", NodeList).nodes}
    places = rank_places(detail, nodes)
    assert [place.rank for place in places] == list(range(job.world_size))
    assert all(place.leaf == leaf_of[place.node] for place in places)
    return places


def assert_together(places: list[str]) -> None:
    """No leaf or node is left and entered again: neighbours are neighbours."""
    assert len(list(groupby(places))) == len(set(places))


@pytest.mark.soak
def test_tensor_groups_share_a_node_and_stages_of_a_pipeline_a_leaf(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=4, gpus_per_node=2)  # two leaves of two nodes
    path = write_job(tmp_path, "placed", 1000)
    words = ["--slot-gpus", "2", *set_options(("parallel.tensor=2", "parallel.data=2"))]
    job = SlurmJob(sandbox, tmp_path, 8, str(path), *words)
    job.wait_running()
    places = placed(sandbox, job)
    assert [place.stage for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.node for place in places[::2]] == [place.node for place in places[1::2]]
    assert len({place.node for place in places}) == 4
    assert_together([place.leaf for place in places])
    by_stage = {stage: {p.leaf for p in places if p.stage == stage} for stage in (0, 1)}
    assert all(len(leaves) == 1 for leaves in by_stage.values())
    shown = subprocess.run(
        [sys.executable, "-m", "phalanx", "show", "1", "--ranks", "--state", str(job.state)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert all(f"{place.node}" in shown and place.leaf in shown for place in places)
    sandbox.run("scancel", str(job.number))


def test_a_killed_worker_and_a_killed_node_lose_nothing(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CHAOS", "1")
    sandbox = make_sandbox(nodes=3, gpus_per_node=2)
    expected = undisturbed(tmp_path, FEW_STEPS)
    job = SlurmJob(sandbox, tmp_path, 4, str(write_job(tmp_path, "disturbed", FEW_STEPS)), *PAIRS)
    job.wait_running()
    job.pace(1.0)  # both kills come before its end, although we may be late for many steps
    places = placed(sandbox, job)
    assert [place.stage for place in places] == [0, 0, 1, 1]
    assert_together([place.node for place in places])
    assert_together([place.leaf for place in places])
    commits = job.commits()
    for what in ("worker", "node"):
        job.apply_fault(what, commits, warm_steps=3)  # type: ignore[arg-type]
    job.pace(0.0)
    # Slurm itself waits another minute for the dead node's part of the step.
    ended = lambda: job.slurm_state() in ("COMPLETING", *ENDED)  # noqa: E731
    job.wait(ended, "the job to end", END_SECONDS)
    assert job.shown("ExitCode") == "0:0" and job.restarts() == 0, job.said()
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
    for what in FAULT_KINDS:
        job.apply_fault(what, commits)
    assert job.wait_ended(END_SECONDS) == "COMPLETED"
    assert job.restarts() == 0
    assert_same(job.run, expected)
    assert [name for name in job.sockets_left() if sandbox.node_runs(name)] == []
