"""What the server knows of a running job when it is asked about a change of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.protocol.events import Scale
from phalanx.config import ConfigError
from phalanx.control.server.http.live_change import own_steps, price_change, running_job
from phalanx.control.wire.payload import Script, TrainingWork, encode_payload
from phalanx.observe.store.metric_store import MetricStore
from phalanx.observe.store.recorder import owner_of
from phalanx.observe.store.tables import Column
from phalanx.plan.search.what_if import JobChange, OwnSteps, PricedChange
from tests.cluster.drive import SECOND, Drive

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
    job = drive.running(payload=encode_payload(TrainingWork(toml=JOB, world_size=16)))
    steps = own_steps(MetricStore(tmp_path / "metrics.sqlite"), job)
    assert steps == OwnSteps(seconds=5.0, done=150)  # the core's: nobody recorded more
    running = running_job(drive.core, job, steps)
    assert running.devices.gpu.key == "h100" and running.devices.gpus == 16
    assert running.interval_seconds == 500.0
    found = price_change(running, JobChange(gpus=8), tmp_path)
    assert isinstance(found, PricedChange) and found.answer.then.gpus == 8
    assert found.answer.now.step_seconds.mid == pytest.approx(5.0)
    assert (found.ranks, found.job.parallel.data) == (8, 8)
    refused = price_change(running, JobChange(settings=("train.steps=-1",)), tmp_path)
    assert isinstance(refused, str) and "train.steps" in refused


def test_an_elastic_job_is_priced_with_the_replicas_that_it_has() -> None:
    drive = Drive()
    gang = GangShape(replicas=16, least_replicas=8, most_replicas=16, slot_gpus=8)
    job = drive.running(gang=gang, payload=encode_payload(TrainingWork(toml=JOB, world_size=16)))
    drive.tell(Scale(job=job.id, replicas=8))
    drive.run(job)
    running = running_job(drive.core, job, OwnSteps())
    assert running.ranks == 8 and running.devices.gpus == 8 and "data = 8" in running.toml


def test_steps_of_an_earlier_generation_say_nothing(tmp_path: Path) -> None:
    drive, store = Drive(), MetricStore(tmp_path / "metrics.sqlite")
    drive.wait(1000 * SECOND)
    job = drive.running(payload=encode_payload(TrainingWork(toml=JOB, world_size=16)))
    table = store.table(owner_of(job.id), "scalars", 0, [Column("step_seconds")])
    begun = job.gang.since_ns
    for step, seconds in enumerate([9.0] * 20 + [2.0] * 20):
        table.append(begun + (step - 20) * SECOND + 1, step, {"step_seconds": seconds})
    store.flush()
    assert own_steps(store, job).seconds == pytest.approx(2.0)


def test_a_program_of_ones_own_cannot_be_asked_about() -> None:
    drive = Drive()
    job = drive.running(payload=encode_payload(Script(argv=("true",))))
    with pytest.raises(ConfigError, match="cannot see inside"):
        running_job(drive.core, job, OwnSteps())
