"""Running gangs are held against what the planner expects of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster.jobs.job import Expected, GangShape
from phalanx.cluster.protocol.step_watch import StepWatch
from phalanx.control.server.agent_link.step_records import Metrics
from phalanx.control.server.expectation import Expectations
from phalanx.control.server.helper_process import Helper
from phalanx.control.server.history.run_history import RunHistory
from phalanx.control.wire.payload import Script, TrainingWork, encode_payload
from phalanx.observe.store.journal import Journal
from phalanx.observe.store.metric_store import MetricStore
from phalanx.observe.store.recorder import Recorder
from tests.cluster.drive import Drive

JOB = """
name = "planned"
[model]
preset = "llama3-8b"
[parallel]
data = 4
[data]
source = "synthetic"
"""


class Led:
    """A core with a running job, as the server's parts know it."""

    def __init__(self, root: Path, payload: str) -> None:
        drive = Drive()
        gang = GangShape(replicas=4, slot_gpus=2, slot_cpus=2)
        self.job = drive.running(gang=gang, payload=payload, expected=Expected(steps=100))
        self.core = drive.core
        assert self.job.placement is not None
        nodes = self.job.placement.nodes
        recorder = Recorder(MetricStore(root / "metrics.sqlite"), self.core.view.policy.price)
        self.metrics = Metrics(StepWatch(), lambda found: None, recorder)
        self.metrics.begin(self.job, [self.core.view.fleet.nodes[node].name for node in nodes])
        self.run_history = RunHistory(
            self.core, Journal(root / "runs.sqlite"), lambda kind, job, body: None
        )
        self.hub = SimpleNamespace(gangs=SimpleNamespace(metrics=self.metrics))
        self.controller = SimpleNamespace(memory=SimpleNamespace(placed={self.job.id: nodes}))

    @property
    def planned(self) -> float:
        assert self.metrics.recorder is not None
        return self.metrics.recorder.gangs[self.job.id].planned_step_seconds


def look(led: Any) -> None:
    helper = Helper()
    try:
        asyncio.run(Expectations(helper).look(led))
    finally:
        helper.close()


def test_a_gang_on_known_devices_is_held_against_its_plan(tmp_path: Path) -> None:
    led = Led(tmp_path, encode_payload(TrainingWork(toml=JOB, world_size=4)))
    assert led.planned == 0
    look(led)
    assert led.planned > 0
    run = led.run_history.run_of(led.job)
    assert run.plan["prediction"]["step_seconds"] == pytest.approx(led.planned)


def test_a_program_of_its_own_is_held_against_nothing(tmp_path: Path) -> None:
    led = Led(tmp_path, encode_payload(Script(argv=("true",))))
    look(led)
    assert led.planned == 0
