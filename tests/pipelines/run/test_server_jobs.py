"""Steps as jobs of a server: an interrupted run finds its jobs again, and submits none twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from phalanx.control.wire.api_types import JobList
from phalanx.pipelines.events import TaskState
from phalanx.pipelines.machine import TaskProgress
from phalanx.pipelines.run.server_jobs import ServerExecutor
from phalanx.pipelines.run.session import PipelineSession
from phalanx.testing.local_cluster import TrialCluster

STEPS: dict[str, Any] = {
    "slow": {
        "command": ["sh", "-c", "until test -e go; do sleep 0.05; done; echo x > {outputs.out}"],
        "outputs": {"out": "slow"},
    },
    "next": {
        "command": ["cp", "{inputs.slow}", "{outputs.out}"],
        "inputs": {"slow": "slow.out"},
        "outputs": {"out": "next"},
    },
    "bad": {"command": ["sh", "-c", "exit 3"], "after": ["next"]},
}


class DriverLost(Exception):  # noqa: N818 - what the test plays
    """The driver of the run is gone."""


def lose_driver(progress: TaskProgress) -> None:
    if progress.state is TaskState.RUNNING:
        raise DriverLost


def test_a_job_is_found_again_by_a_resumed_run_and_by_one_that_knows_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with TrialCluster(tmp_path / "cluster", nodes=1) as cluster:
        session = PipelineSession({"name": "served", "steps": STEPS})
        for _ in range(2):
            with pytest.raises(DriverLost):
                session.run(ServerExecutor(cluster.client), lose_driver)
        shutil.rmtree(session.workspace.runs / "0001")  # the server's log is enough
        Path("go").touch()
        end = session.resume(ServerExecutor(cluster.client), lambda progress: None)
        jobs = cluster.client.get("/v1/jobs", JobList, state="all").jobs
    tasks = end.machine.tasks
    assert {name: str(each.state) for name, each in tasks.items()} == {
        "slow": "done",
        "next": "done",
        "bad": "failed",
    }
    assert tasks["bad"].reason.startswith("job 3 failed")
    assert Path("runs/pipelines/served/outputs/next").read_text() == "x\n"
    assert len(jobs) == 3 and tasks["slow"].attempts == 2
