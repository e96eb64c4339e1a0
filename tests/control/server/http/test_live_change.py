"""What the server knows of a running job when it is asked about a change of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.control.server.http.live_change import own_steps, price_change, running_job
from phalanx.control.wire.payload import Script, Train, encode_payload
from phalanx.observe.store.metric_store import MetricStore
from phalanx.plan.search.what_if import JobChange, OwnSteps, WhatIf
from tests.cluster.drive import Drive

JOB = """
name = "x"
[model]
preset = "llama3-8b"
[data]
source = "synthetic"
[train]
steps = 1000
global_batch = 32
device = "cuda"
"""


def test_a_job_is_priced_with_its_devices_and_its_own_steps(tmp_path: Path) -> None:
    drive = Drive()
    job = drive.running(payload=encode_payload(Train(toml=JOB, world_size=16)))
    steps = own_steps(MetricStore(tmp_path / "metrics.sqlite"), job)
    assert steps == OwnSteps(seconds=5.0, done=150)  # the core's: nobody recorded more
    running = running_job(drive.core, job, steps)
    assert running.devices.gpu.key == "h100" and running.devices.gpus == 16
    assert running.interval_seconds == 500.0
    found = price_change(running, JobChange(gpus=8), tmp_path)
    assert isinstance(found, WhatIf) and found.then.gpus == 8
    assert found.now.step_seconds.mid == pytest.approx(5.0)
    refused = price_change(running, JobChange(settings=("train.steps=-1",)), tmp_path)
    assert isinstance(refused, str) and "train.steps" in refused


def test_a_program_of_ones_own_cannot_be_asked_about() -> None:
    drive = Drive()
    job = drive.running(payload=encode_payload(Script(argv=("true",))))
    with pytest.raises(ConfigError, match="cannot see inside"):
        running_job(drive.core, job, OwnSteps())
