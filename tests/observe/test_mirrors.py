"""A job of the server with a worker killed in it: its mirrors hold the whole curve."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from phalanx.testing.local_cluster import TrialCluster
from tests.control.jobs import losses, write_job
from tests.train.test_trackers_soak import READ_WANDB, needs, read_back

STEPS = 24
NAME = "mirrored"
DATABASE = "curves.db"  # not where mlflow writes by itself

# MLflow makes its tables at first use, which processes that start at a time do not survive.
CREATE_MLFLOW = """
import json, sys, mlflow
print(json.dumps(len(mlflow.MlflowClient(tracking_uri=sys.argv[1]).search_experiments())))
"""

# Prints the loss by step over all runs of the experiment: a killed process leaves its run behind.
READ_MLFLOW = """
import json, sys, mlflow
client, found = mlflow.MlflowClient(tracking_uri=sys.argv[1]), {}
experiment = client.get_experiment_by_name("mirrored")
for run in client.search_runs([experiment.experiment_id]):
    for each in client.get_metric_history(run.info.run_id, "train/loss"):
        found[each.step] = each.value
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose rank 0 was killed, with every mirror that is installed."""
    root = tmp_path_factory.mktemp("mirrored")
    database = f"sqlite:///{root / DATABASE}"
    settings = ["--set", "log.tensorboard=true"]
    for name in ("wandb", "mlflow"):
        if importlib.util.find_spec(name) is not None:
            settings += ["--set", f"log.{name}=true"]
            if name == "mlflow":
                read_back(CREATE_MLFLOW, database)
    settings += ["--set", "backend.environment.WANDB_MODE=offline"]
    settings += ["--set", f"backend.environment.MLFLOW_TRACKING_URI={database}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CHAOS", "1")  # workers let themselves be slowed down
        with TrialCluster(root, nodes=2, gpus_per_node=2) as cluster:
            job = cluster.submit(str(write_job(root, NAME, STEPS)), *settings)
            cluster.pace(job, 0.25)  # a worker is killed long before the last step
            commits = cluster.commits(job, 4)
            cluster.wait(lambda: (n := commits.newest()) and n.step >= 6, "some steps")
            cluster.signal_worker(0, job, signal.SIGKILL)
            cluster.pace(job, 0.0)
            assert cluster.wait_ended(job, 120) == "done"
            assert cluster.job(job)["generation"] == 2  # a rank was killed, and no other process
    return root / "runs" / NAME / f"job-{job}"


def test_tensorboard_has_every_step_of_the_job(mirrored: Path) -> None:
    found = EventAccumulator(str(mirrored / "metrics" / "tensorboard"))
    found.Reload()
    told = {event.step: event.value for event in found.Scalars("train/loss")}
    assert told == pytest.approx(losses(mirrored), rel=1e-6)
    assert sorted(told) == list(range(1, STEPS + 1))


@needs("wandb")
def test_wandb_has_every_step_of_the_job(mirrored: Path) -> None:
    rows = [
        row
        for stored in mirrored.glob("logs/wandb/offline-run-*/*.wandb")
        for row in read_back(READ_WANDB, stored)["history"]
    ]
    told = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert told.items() <= losses(mirrored).items()
    assert max(told) == STEPS


@needs("mlflow")
def test_mlflow_has_every_step_of_the_job(mirrored: Path) -> None:
    database = mirrored.parents[2] / DATABASE
    told = {int(k): v for k, v in read_back(READ_MLFLOW, f"sqlite:///{database}").items()}
    assert told.items() <= losses(mirrored).items()
    assert max(told) == STEPS
