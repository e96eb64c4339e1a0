"""A node is lost and none is spare: a job goes on with another mapping, and loses no step.

When the node is back it returns to its own mapping at a step boundary, and loses none either.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.control.backends.local import LocalNode
from phalanx.testing.local_cluster import TrialCluster
from phalanx.train import StepRecord
from tests.control.jobs import losses, undisturbed, write_job
from tests.control.test_replan import CONSTANT, LEAST_STEP, steps_made

pytestmark = pytest.mark.timeout(300)

STEPS = 100_000
POLICY = "[recovery]\nwait_ns = 0\ngrow_after_ns = 1_000_000_000\n"
AGREES = 400  # steps of the undisturbed run that it is compared with


def two_nodes(root: Path, mesh: str) -> Path:
    """A job whose state lies across two nodes, and nowhere whole."""
    path = write_job(root, "remapped", STEPS)
    text = path.read_text().replace("data = 2\npipeline = 2", mesh)
    text = text.replace("[schedule]", '[schedule]\nkind = "constant"')  # however many follow
    path.write_text(text.replace("deterministic = true", "deterministic = false"))
    return path


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first steps of the same job on one rank."""
    root = tmp_path_factory.mktemp("alone")
    return undisturbed(root, AGREES, CONSTANT, "parallel.data=1", "parallel.pipeline=1")


def made_by(root: Path, generation: int) -> list[StepRecord]:
    return [each for each in steps_made(root, "remapped") if each.generation == generation]


def comes_back(cluster: TrialCluster, job: int, gone: LocalNode, own_seconds: float) -> None:
    """The lost node is there again, and the job has made steps with its own mapping.

    On cores that all nodes share one rank is as fast as two: it is held up, so that it is not.
    """
    cluster.pace(job, 4 * own_seconds)
    cluster.wait(lambda: cluster.job(job)["step_seconds"] > 2 * own_seconds, "slower steps", 120)
    cluster.restart_node(gone)
    cluster.wait(cluster.readmit, "the node to be let in", 120)
    cluster.wait(
        lambda: cluster.job(job)["generation"] == 3 and len(made_by(cluster.root, 3)) > 10,
        "steps with its own mapping",
        120,
    )


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("data = 1\npipeline = 2", id="pp2"),
        pytest.param("data = 2\nzero = 3", id="fsdp2", marks=pytest.mark.soak),
    ],
)
def test_a_job_on_two_nodes_goes_on_with_one_and_returns(
    tmp_path: Path, same: Path, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CHAOS", "1")  # workers let themselves be slowed down
    with TrialCluster(tmp_path, nodes=2, policy=POLICY) as cluster:
        job = cluster.submit(str(two_nodes(tmp_path, mesh)))
        cluster.pace(job, LEAST_STEP)
        # The first steps are slow, and count less and less.
        cluster.wait(lambda: cluster.job(job)["step"] > 60, "steps", 120)
        own = cluster.job(job)
        gone = cluster.node_of(1, job)
        cluster.kill_node(gone)
        cluster.wait(
            lambda: cluster.job(job)["generation"] == 2 and len(made_by(tmp_path, 2)) > 20,
            "steps with another mapping",
            120,
        )
        shown = cluster.job(job)
        assert shown["why"]["facts"]["rung"] == "remap" and len(shown["nodes"]) == 1
        assert cluster.get(f"/v1/jobs/{job}")["lost_steps"] == 0
        (ready,) = [e for e in cluster.events("GangReady", job) if e["generation"] == 2]
        assert ready["step"] > 10, "from memory: there is no checkpoint"
        comes_back(cluster, job, gone, own["step_seconds"])
        shown = cluster.job(job)
        assert len(shown["nodes"]) == 2 and shown["replicas"] == own["replicas"]
        assert cluster.get(f"/v1/jobs/{job}")["lost_steps"] == 0
        (drained,) = cluster.events("GangDrained", job)
        (again,) = [e for e in cluster.events("GangReady", job) if e["generation"] == 3]
        assert again["step"] == drained["step"], "at a step boundary, from that very step"
        cluster.command("cancel", str(job))
        made = steps_made(tmp_path, "remapped")
    kept = {each.step: each for each in made}
    assert list(kept) == list(range(1, len(kept) + 1))
    assert all(each.first_sample == 8 * (each.step - 1) for each in made), "with its own samples"
    known, by = losses(same), {each.generation for each in made if each.step <= AGREES}
    assert by == {1, 2, 3}, "both mappings are compared, and its own once more"
    steps = [each.step for each in made]
    assert len(steps) - len(kept) <= 1, "no step but the one that was cut off is made twice"
    for step in range(1, min(AGREES, len(kept)) + 1):
        assert kept[step].loss == pytest.approx(known[step], rel=2e-3), step
