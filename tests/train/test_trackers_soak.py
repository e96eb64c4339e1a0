"""W&B and MLflow as they are installed: a run is read back from what they stored."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.train.report.records import CheckpointRecord, read_records
from tests.train.forked_runs import Run, small_job, start

__all__ = ["start"]

Start = Callable[..., Run]

# Every record is logged late and a checkpoint comes before the steps that led to it.
SETTINGS = {"log__every": 4, "checkpoint__every": 3}

# Prints {"job": configuration, "history": [rows]} from W&B's own file: a log of 32 KiB blocks as
# LevelDB writes it, of protocol buffers.
READ_WANDB = """
import json, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

def records(log):
    at, whole = 7, b""
    while at < len(log):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        whole += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # complete, or the last part
            yield Record.FromString(whole)
            whole = b""

job, history = {}, []
for record in records(Path(sys.argv[1]).read_bytes()):
    job |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
    row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
    history += [row] if row else []
print(json.dumps({"job": job, "history": history}))
"""

# Prints {"job": configuration, "status": …, "history": {metric: [[step, value], …]}}.
READ_MLFLOW = """
import json, mlflow
experiment = mlflow.get_experiment_by_name("try")
client = mlflow.MlflowClient()
(run,) = client.search_runs([experiment.experiment_id])
history = {
    name: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, name)]
    for name in run.data.metrics
}
job = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/job.json")
print(json.dumps({"job": job, "status": run.info.status, "history": history}))
"""


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(
        missing, reason=f"{package} is not installed; `make soak` installs it"
    )


def read_back(script: str, *arguments: object) -> Any:
    """In a process of its own: the packages start threads, and this process forks ranks."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def losses(run: Run) -> list[tuple[int, float | None]]:
    return [(record.step, record.loss) for record in run.steps]


@pytest.mark.soak
@needs("wandb")
def test_wandb_keeps_every_record_of_a_run(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = start(small_job(tmp_path, log__wandb="true", **SETTINGS))
    assert run.wait() == 0
    assert run.exit.details == {}, run.exit
    (stored,) = run.folder.logs.glob("wandb/offline-run-*/*.wandb")
    found = read_back(READ_WANDB, stored)
    assert found["job"]["train"]["steps"] == 6
    rows = found["history"]
    stored_losses = [(r["step"], r["train/loss"]) for r in rows if "train/loss" in r]
    assert stored_losses == losses(run)
    saved = [row["step"] for row in rows if "checkpoint/seconds" in row]
    assert saved == [3, 6]


@pytest.mark.soak
@needs("wandb")
def test_without_a_wandb_login_the_run_goes_on_and_says_so(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    run = start(small_job(tmp_path, log__wandb="true"))
    assert run.wait() == 0
    assert len(run.steps) == 6
    assert "API key" in str(run.exit.details["Wandb failed"])
    assert "warning: Wandb failed" in run.text


@pytest.mark.soak
@needs("mlflow")
def test_mlflow_keeps_every_record_of_a_run(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # artifacts go to ./mlruns
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = start(small_job(tmp_path, log__mlflow="true", **SETTINGS))
    assert run.wait() == 0
    assert run.exit.details == {}, run.exit
    found = read_back(READ_MLFLOW)
    assert found["status"] == "FINISHED"
    assert found["job"]["train"]["steps"] == 6
    history = found["history"]
    assert sorted(map(tuple, history["train/loss"])) == losses(run)
    saved = list(read_records(run.folder.metrics / "checkpoints.jsonl", CheckpointRecord))
    assert sorted(step for step, _ in history["checkpoint/seconds"]) == [r.step for r in saved]


@pytest.mark.soak
@needs("mlflow")
def test_a_store_that_mlflow_refuses_does_not_end_the_run(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = f"file://{tmp_path / 'mlruns'}"  # MLflow 3 wants a database
    monkeypatch.setenv("MLFLOW_TRACKING_URI", files)
    run = start(small_job(tmp_path, log__mlflow="true"))
    assert run.wait() == 0
    assert len(run.steps) == 6
    assert "file" in str(run.exit.details["Mlflow failed"])
