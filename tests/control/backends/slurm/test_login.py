"""A job led from the login node: any node may be lost; a leader that is killed leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.control.backends.lead import AGAIN, CANCELLED
from phalanx.control.backends.local import LocalNode
from phalanx.testing.engine_job import EngineJob, wait
from phalanx.testing.slurm.sandbox import Sandbox
from phalanx.train import StepRecord, read_records
from tests.control.jobs import assert_same, generations, set_options, undisturbed, write_job


class LedJob(EngineJob):
    """A submission that stays in the foreground."""

    world_size = 4

    def __init__(self, sandbox: Sandbox, root: Path, steps: int, *settings: str) -> None:
        self.sandbox, self.root = sandbox, root
        self.output = root / "submit.log"
        words = [str(write_job(root, "led", steps)), "--slot-gpus", "1", "--spares", "1", "--json"]
        words += set_options(("backend.controller=here", *settings))
        with self.output.open("wb") as errors:
            self.leader = subprocess.Popen(
                [sys.executable, "-m", "phalanx", "submit", "--backend", "slurm", *words],
                cwd=root,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **sandbox.environment},
            )

    @property
    def state(self) -> Path:
        return self.root / "runs" / "led" / "slurm-1" / "control"

    def nodes(self) -> list[LocalNode]:
        return [LocalNode(path.name, path) for path in sorted((self.state / "nodes").glob("*"))]

    def said(self) -> str:
        return self.output.read_text()

    def job(self) -> dict[str, Any]:
        assert self.leader.poll() is None, self.said()
        return super().job()

    def kill_node(self, name: str) -> float:
        at = time.monotonic()
        self.sandbox.kill_node(name)
        return at


@pytest.fixture
def led(make_sandbox: Callable[..., Sandbox], tmp_path: Path) -> Iterator[LedJob]:
    job = LedJob(make_sandbox(nodes=5, gpus_per_node=1), tmp_path, 80)
    yield job
    job.leader.kill()
    job.leader.wait()


@pytest.mark.soak
def test_the_first_node_may_be_lost_without_a_requeue(led: LedJob, tmp_path: Path) -> None:
    led.wait_running()
    commits = led.commits()
    led.reach(commits, 5)
    generation, held = led.job()["generation"], led.job()["nodes"]
    led.kill_node("n1")  # where a batch script would be
    if "n1" in held:
        led.wait(lambda: commits.first_after(generation), "recovery from the first node's loss")
    said, _ = led.leader.communicate(timeout=240)
    assert led.leader.returncode == 0, led.said()
    found = json.loads(said)
    assert found["allocations"] == [1]
    assert set(generations(Path(found["run"])).values()) == ({1, 2} if "n1" in held else {1})
    assert_same(Path(found["run"]), undisturbed(tmp_path, 80))
    assert led.sandbox.run("squeue", "--noheader", "--states=RUNNING,PENDING").strip() == ""


@pytest.mark.soak
def test_an_allocation_is_given_back_when_its_leader_is_killed(led: LedJob) -> None:
    led.wait_running()
    led.leader.kill()
    led.leader.wait()
    wait(lambda: not led.sandbox.run("squeue", "--noheader").strip(), "the allocation to end", 60)
    wait(lambda: not led.sandbox.job_processes(), "its processes to end", 60)


@pytest.mark.soak
def test_a_cancelled_allocation_is_the_end_and_no_other_is_asked_for(led: LedJob) -> None:
    led.wait_running()
    led.sandbox.run("scancel", "1")
    said, _ = led.leader.communicate(timeout=240)
    assert led.leader.returncode == CANCELLED, led.said()
    assert json.loads(said)["allocations"] == [1]
    wait(lambda: not led.sandbox.job_processes(), "its processes to end", 60)


@pytest.mark.soak
def test_a_time_limit_is_the_end_of_a_turn_and_ctrl_c_of_the_job(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=5, gpus_per_node=1)
    limits = ("backend.hours=0.03", "backend.slurm.signal_seconds=60")
    led = LedJob(sandbox, tmp_path, 100_000, *limits)
    led.wait(lambda: led.job().get("generation", 0) >= 2, "its second turn", 400)
    led.wait_running()
    led.reach(led.commits(), 1)
    led.leader.send_signal(signal.SIGINT)
    said, _ = led.leader.communicate(timeout=240)
    assert led.leader.returncode == AGAIN, led.said()
    found = json.loads(said)
    assert len(found["allocations"]) == 2, led.said()
    assert led.said().count("is on disk") == 2
    made = list(read_records(Path(found["run"]) / "metrics" / "steps.jsonl", StepRecord))
    assert {record.generation for record in made} == {1, 2}
    assert len(made) == len({record.step for record in made})  # nothing was made twice
    assert sandbox.run("squeue", "--noheader", "--states=RUNNING,PENDING").strip() == ""
