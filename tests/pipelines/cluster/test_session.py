"""Pipelines through a real server: it is killed, nobody watches, and all is done once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.cluster.jobs.job import JobState
from phalanx.cluster.pipelines.machine import TaskProgress
from phalanx.config.rules.text import name_problems
from phalanx.control.client.client import Client, ClientError
from phalanx.control.wire.api_types import JobList
from phalanx.pipelines.cluster.session import ClusterSession, job_name
from phalanx.pipelines.run.manifest import PipelineManifest
from phalanx.pipelines.run.session import PipelineSession
from phalanx.testing.local_cluster import TrialCluster

SCORE = """echo "{{\\"scores\\": {{\\"loss\\": $1.5}}}}" > $2"""
WAITS = "until test -e go; do sleep 0.05; done"
STEPS: dict[str, Any] = {
    "slow": {
        "command": ["sh", "-c", f"echo ran >> slow.txt; {WAITS}; cat {{inputs.raw}} > $OUT"],
        "environment": {"OUT": "{outputs.out}"},
        "inputs": {"raw": "raw.txt"},
        "outputs": {"out": "slow"},
    },
    "part": {
        "for_each": {"n": [1, 2]},
        "command": ["sh", "-c", SCORE, "sh", "{n}", "{outputs.scores}"],
        "inputs": {"slow": "slow.out"},
        "outputs": {"scores": "scores/{n}.json"},
        "scores": ["loss"],
    },
    "best": {"kind": "best", "inputs": {"scores": "part.scores"}, "by": "part.loss"},
    "gate": {"kind": "gate", "model": "toy", "require": ["best.loss <= released + 0.5 %"]},
    "flaky": {
        "command": ["sh", "-c", "test -e tried || {{ touch tried; echo no luck; exit 3; }}"],
        "retries": 1,
        "backoff_seconds": 0.1,
        "after": ["gate"],
    },
    "ask": {"kind": "approval", "question": "release it?", "after": ["flaky"]},
    "pair": {
        "command": ["sh", "-c", "mkdir -p $0; echo $RANK > $0/$RANK", "{outputs.out}"],
        "gpus": 2,
        "outputs": {"out": "pair"},
        "after": ["ask"],
    },
    "register": {
        "kind": "register",
        "model": "toy",
        "inputs": {"checkpoint": "slow.out", "scores": "best.scores"},
        "after": ["pair"],
    },
}


def silent(progress: TaskProgress) -> None:
    """Nobody looks."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrialCluster]:
    monkeypatch.chdir(tmp_path)
    Path("raw.txt").write_text("raw\n")
    with TrialCluster(tmp_path / "cluster", nodes=2) as running:
        yield running


def served(client: Client, steps: dict[str, Any]) -> ClusterSession:
    return ClusterSession(PipelineSession({"name": "served", "steps": steps}), client)


@pytest.mark.parametrize("value", ["text/a.txt", "two\nlines", "long " * 100])
def test_jobs_of_a_task_have_a_name_that_a_job_may_have(value: str) -> None:
    name = job_name("served", f"count[file={value}]")
    assert name.startswith("served.count[file=") and list(name_problems("name", name)) == []


@pytest.mark.soak
def test_a_run_goes_on_past_its_server_and_whoever_asked_for_it(cluster: TrialCluster) -> None:
    session = served(cluster.client, STEPS)
    started = session.begin(session.request())
    with pytest.raises(ClientError, match="uses"):
        session.begin(session.request())
    cluster.wait(lambda: Path("slow.txt").exists(), "the first step runs")
    cluster.kill_server()
    Path("go").touch()
    cluster.start_server()
    later = served(cluster.client, STEPS)  # somebody else, who knows the folder alone
    end = later.follow(later.newest(), silent)
    tasks = end.machine.tasks
    assert end.state == "asking", {name: each.reason for name, each in tasks.items()}
    assert later.questions() == {"ask": "release it?"}
    assert tasks["flaky"].attempts == 2 and tasks["best"].result.scores == {"loss": 1.5}
    cluster.kill_server()
    cluster.start_server()
    later.answer("ask", approved=True)
    written = Path(f"runs/pipelines/served/runs/server-{started.pipeline:04d}/manifest.json")
    cluster.wait(written.exists, "the manifest is there, and nobody has looked")
    end = later.follow(started.pipeline, silent)
    assert end.state == "done", {name: each.reason for name, each in tasks.items()}
    assert Path("slow.txt").read_text() == "ran\n"
    assert Path("runs/pipelines/served/outputs/slow").read_text() == "raw\n"
    ranks = Path("runs/pipelines/served/outputs/pair").iterdir()
    assert sorted(path.name for path in ranks) == ["0", "1"]
    assert Path("runs/models/toy").exists()
    assert end.manifest is not None
    manifest = msgspec.json.decode(end.manifest.read_bytes(), type=PipelineManifest)
    assert [each.path for each in manifest.raw["raw.txt"].files] == [
        str(Path("raw.txt").absolute())
    ]
    before = len(cluster.client.get("/v1/jobs", JobList, state="all").jobs)
    again = later.follow(later.begin(later.request()).pipeline, silent)
    states = {str(each.state) for each in again.machine.tasks.values()}
    assert states == {"cached", "done"}  # gates decide anew
    jobs = cluster.client.get("/v1/jobs", JobList, state="all").jobs
    assert len(jobs) == before + 2  # which read the release, and wrote the manifest
    assert [job.state for job in jobs].count(JobState.FAILED) == 1
