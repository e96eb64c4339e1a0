"""Steps as jobs of a server: an interrupted run finds its jobs again, and submits none twice."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.control.client.client import Client
from phalanx.control.wire.api_types import JobDetail, JobList
from phalanx.pipelines.description import pipeline_from_table
from phalanx.pipelines.events import TaskState
from phalanx.pipelines.graph import TaskGraph
from phalanx.pipelines.machine import TaskProgress
from phalanx.pipelines.run.attempts import TaskOrder
from phalanx.pipelines.run.commands import step_command
from phalanx.pipelines.run.server_jobs import JobAttempt, ServerExecutor
from phalanx.pipelines.run.session import PipelineSession
from phalanx.testing.local_cluster import TrialCluster
from tests.control.servers import PlayedAgent, ServerProcess

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a played node of two GPUs; its jobs make steps until they are cancelled."""
    with ServerProcess(tmp_path_factory.mktemp("server")) as running:
        agent = PlayedAgent([running.url], (running.state / "join.token").read_text().strip(), "n0")
        agent.steps_until = 10**6
        threading.Thread(target=lambda: asyncio.run(agent.run()), daemon=True).start()
        running.wait_for("/v1/status", lambda status: status["connected"] == 1)
        yield running


def order(name: str, **step: Any) -> TaskOrder:
    table = {"name": "x", "steps": {"a": {"outputs": {"run": "run"}, **step}}}
    (task,) = TaskGraph(pipeline_from_table(table)).in_order
    work = Path("work").absolute()
    return TaskOrder(
        task=task, name=name, command=step_command(task, {}, work), work=work, log=work / "log"
    )


def test_a_job_is_found_by_its_name_while_it_lives_and_after_its_end_by_its_own_run_alone(
    server: ServerProcess,
) -> None:
    executor = ServerExecutor(Client(server.url, server.state))
    before = time.time() - 3600
    waiting = executor.start(order("p.a.0", command=["true"], gpus=2))
    assert waiting.poll() is None
    found = executor.adopt("p.a.0", time.time() + 3600, Path())
    assert isinstance(found, JobAttempt) and isinstance(waiting, JobAttempt)
    assert found.number == waiting.number
    assert executor.adopt("p.a.1", before, Path()) is None
    found.stop()
    server.wait_for(f"/v1/jobs/{found.number}", lambda body: body["job"]["ended_ns"])
    assert "cancelled" in (found.poll() or "")
    assert executor.adopt("p.a.0", before, Path()) is not None
    assert executor.adopt("p.a.0", time.time() + 3600, Path()) is None


def test_a_train_step_is_a_job_of_the_trainer_in_its_work_folder(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = '[model]\npreset = "tiny"\n[train]\ndevice = "cpu"\n[parallel]\ndata = 2\n'
    Path("job.toml").write_text(text)
    client = Client(server.url, server.state)
    made = ServerExecutor(client).start(order("p.train.0", kind="train", job="job.toml"))
    assert isinstance(made, JobAttempt)
    detail = client.get(f"/v1/jobs/{made.number}", JobDetail)
    assert detail.job.name == "p.train.0" and detail.job.replicas == 2
    made.stop()


def test_what_a_server_or_a_job_file_refuses_has_failed_with_its_words(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    executor = ServerExecutor(Client(server.url, server.state))
    refused = executor.start(order("p.b.0", kind="train", job="none.toml"))
    assert "no such file" in (refused.poll() or "")


@pytest.mark.soak
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
