"""One job with a killed rank, and everybody whom Phalanx tells of it: each has all of it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytest.importorskip("opentelemetry.sdk", reason="pip install 'phalanx[otel]'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from phalanx.checkpoint.format.tier import open_tier
from phalanx.testing.local_cluster import TrialCluster
from tests.control.jobs import losses, set_options, write_job
from tests.object_store import BUCKET, S3Server, credentials
from tests.observe.test_mirrors import CREATE_MLFLOW, DATABASE, NAME, READ_MLFLOW, STEPS
from tests.receivers import HttpReceiver, Prometheus
from tests.train.test_trackers_soak import READ_WANDB, needs, read_back

ARCHIVE = f"s3://{BUCKET}/archive"
LAST = f"step-{STEPS:08}"
RULES = resources.files("phalanx.observe") / "monitoring" / "alerts.yml"


def settings(database: str) -> list[str]:
    """Of a job that tells everybody."""
    mirrors = [f"log.{name}=true" for name in ("tensorboard", "wandb", "mlflow")]
    saves = ["checkpoint.every=8", "checkpoint.keep=1", f"checkpoint.archive.url={ARCHIVE}"]
    variables = ["WANDB_MODE=offline", f"MLFLOW_TRACKING_URI={database}"]
    return set_options((*mirrors, *saves, *(f"backend.environment.{each}" for each in variables)))


@pytest.mark.soak
@pytest.mark.timeout(600)
@needs("wandb")
@needs("mlflow")
def test_every_client_has_the_whole_of_a_job_with_a_killed_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 (SeaweedFS), Prometheus, OTLP, web hooks, TensorBoard, MLflow and W&B, at a time."""
    monkeypatch.setenv("PHALANX_CHAOS", "1")  # workers let themselves be slowed down
    database = f"sqlite:///{tmp_path / DATABASE}"
    read_back(CREATE_MLFLOW, database)
    storage = S3Server(tmp_path / "s3")
    keys = [
        word for pair in credentials(storage.port).items() for word in ("--env", "=".join(pair))
    ]
    with ExitStack() as stack:
        storage.start()
        stack.callback(storage.kill)
        collector, hook = (stack.enter_context(HttpReceiver()) for _ in range(2))
        told = ("--otlp", collector.url, "--webhook", f"{hook.url}/hook")
        cluster = TrialCluster(tmp_path, nodes=2, gpus_per_node=2, server_options=told)
        with cluster:
            path = str(write_job(tmp_path, NAME, STEPS))
            job = cluster.submit(path, *settings(database), *keys)
            cluster.pace(job, 0.25)
            commits = cluster.commits(job, 4)
            cluster.wait(lambda: (n := commits.newest()) and n.step >= 6, "some steps")
            cluster.signal_worker(0, job, signal.SIGKILL)
            cluster.wait(lambda: cluster.job(job)["generation"] == 2, "the next generation")
            assert {"phalanx_job_step", "phalanx_job_loss"} <= scraped(cluster, job, tmp_path)
            cluster.pace(job, 0.0)
            assert cluster.wait_ended(job, 240) == "done", cluster.job(job)["why"]["text"]
            cluster.wait(lambda: states(hook.got) == ["done"], "the web hook", 30)
        check_archive(f"{ARCHIVE}/{NAME}/job-{job}", credentials(storage.port))
    check_mirrors(tmp_path / "runs" / NAME / f"job-{job}", database)
    assert {f"job {NAME}", "pending", "running", "restoring"} <= spans(collector.got)


def states(messages: list[bytes]) -> list[str]:
    """In which jobs ended, by what a web hook was told."""
    decoded = [json.loads(each) for each in messages]
    return [each["state"] for each in decoded if each["kind"] == "job"]


def check_archive(url: str, keys: dict[str, str]) -> None:
    """Checkpoints were copied, and what the newest one's name promises is there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in keys.items():
            patch.setenv(name, value)
        copies = open_tier(url).names()  # by step and, if it is not the first, generation
        assert len(copies) > 1 and copies[-1].split(".")[0] == LAST
        # Not forked from here: this process has threads of the store's client by now.
        command = [sys.executable, "-m", "phalanx", "ckpt", "verify", f"{url}/{copies[-1]}"]
        verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def scraped(cluster: TrialCluster, job: int, folder: Path) -> set[str]:
    """Series of a job, as Prometheus has them; where that is not installed, its client's parser."""
    token = (cluster.state / "admin.token").read_text().strip()
    if shutil.which("prometheus") is not None:
        target = cluster.url.removeprefix("http://")
        with Prometheus(folder / "prometheus", target, token, RULES.read_text()) as prometheus:
            found = prometheus.series(f'{{job_id="{job}"}}')
        return {series["metric"]["__name__"] for series in found}
    asked = urllib.request.Request(f"{cluster.url}/metrics")
    asked.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(asked, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {each.name for each in samples if each.labels.get("job_id") == str(job)}


def check_mirrors(run: Path, database: str) -> None:
    """TensorBoard, W&B and MLflow have every step with its loss."""
    board = EventAccumulator(str(run / "metrics" / "tensorboard"))
    board.Reload()
    shown = {event.step: event.value for event in board.Scalars("train/loss")}
    assert shown == pytest.approx(losses(run), rel=1e-6) and len(shown) == STEPS
    rows = [
        row
        for stored in run.glob("logs/wandb/offline-run-*/*.wandb")
        for row in read_back(READ_WANDB, stored)["history"]
    ]
    logged = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert logged.items() <= losses(run).items() and max(logged) == STEPS
    tracked = {int(step): loss for step, loss in read_back(READ_MLFLOW, database).items()}
    assert tracked.items() <= losses(run).items() and max(tracked) == STEPS


def spans(requests: list[bytes]) -> set[str]:
    """Names of the spans that a collector was sent."""
    return {
        span.name
        for data in requests
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
