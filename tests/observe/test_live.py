"""A real job on a real cluster of this machine: what is measured can be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.control.client import Client, ClientError
from phalanx.control.stage import Stage
from phalanx.train import StepRecord, read_records
from tests.control.jobs import write_job

STEPS = 24


class Done:
    """A finished job and its stage."""

    def __init__(self, stage: Stage, job: int, folder: Path) -> None:
        self.stage, self.job, self.folder = stage, job, folder

    def get(self, path: str) -> Any:
        return self.stage.get(path.format(job=self.job))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    root = tmp_path_factory.mktemp("observed")
    with Stage(root, nodes=2, gpus_per_node=2) as stage:
        job = stage.submit(str(write_job(root, "seen", STEPS)))
        assert stage.wait_ended(job, 120) == "done"
        folder = root / "runs" / "seen" / f"job-{job}"
        done = Done(stage, job, folder)
        stage.wait(lambda: len(steps_of(done)) == STEPS, "the last steps to be stored", 30)
        yield done


def steps_of(done: Done) -> list[int]:
    series = done.get("/v1/jobs/{job}/metrics?names=loss")["series"]
    return list(series["loss"]["step"]) if "loss" in series else []


def test_the_servers_curve_is_the_runs_own(done: Done) -> None:
    found = done.get("/v1/jobs/{job}/metrics?names=loss,tokens_per_second_per_gpu,nonsense")
    records = list(read_records(done.folder / "metrics" / "steps.jsonl", StepRecord))
    assert found["tier"] == "raw"
    assert found["series"]["loss"]["value"] == [record.loss for record in records]
    assert found["series"]["loss"]["time"] == sorted(found["series"]["loss"]["time"])
    assert "nonsense" not in found["series"]
    assert len(found["series"]["tokens_per_second_per_gpu"]["value"]) == STEPS


def test_every_rank_is_there_with_its_node_and_its_own_work(done: Done) -> None:
    found = done.get("/v1/jobs/{job}/ranks?parts=true")
    assert found["rows"] == "rank"
    assert found["ranks"] == [0, 1, 2, 3]
    assert len(set(found["nodes"])) == 2
    assert found["steps"] == list(range(1, STEPS + 1))
    for step, own in zip(found["step_seconds"], found["own_seconds"], strict=True):
        assert all(0 <= mine <= whole for whole, mine in zip(step, own, strict=True))
    assert len(found["parts"]["forward_seconds"]) == 4


def test_a_team_sees_nothing_of_anothers_metrics(
    done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"name": "eve", "role": "user", "team": "other"}
    made = done.stage.client.post("/v1/tokens", body, dict)
    monkeypatch.setenv("PHALANX_TOKEN", made["secret"])
    eve = Client(done.stage.url, done.stage.state)
    for path in ("metrics", "ranks"):
        with pytest.raises(ClientError) as refused:
            eve.get(f"/v1/jobs/{done.job}/{path}", dict)
        assert refused.value.status == 404
