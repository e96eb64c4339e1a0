"""Steps as jobs of Slurm: what is submitted, what became of it, and a real Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster.pipelines.description import SlurmSteps
from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError
from phalanx.pipelines.engines import slurm_steps
from phalanx.pipelines.engines.slurm_steps import (
    LATE_SECONDS,
    LOOK_SECONDS,
    SlurmExecutor,
    job_name,
    step_script,
)
from phalanx.pipelines.run.attempts import ProcessOrder
from phalanx.pipelines.run.commands import StepCommand
from phalanx.pipelines.run.session import PipelineSession
from phalanx.testing.slurm.sandbox import Sandbox
from tests.control.backends.conftest import make_sandbox  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[3]


class PlayedSlurm(SlurmCommands):
    """Says what it was scripted to say, and remembers what it was asked."""

    def __init__(self, *answers: str | Exception) -> None:
        self.calls: list[tuple[tuple[str, ...], str]] = []
        self._answers = list(answers)

    def run(self, *command: str, text: str | None = None, **_: object) -> str:
        self.calls.append((command, text or ""))
        if command[0] == "scancel":
            return ""
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def order(folder: Path, gpus: int = 0) -> ProcessOrder:
    command = StepCommand(["sh", "-c", 'echo "$WORD"; exit 3'], {"WORD": "it's over"})
    log = folder / "step.1.log"
    return ProcessOrder(command=command, work=folder / "work", log=log, gpus=gpus)


def test_a_job_asks_for_what_the_step_needs_and_leaves_its_exit_code(tmp_path: Path) -> None:
    slurm, now = PlayedSlurm("41;cluster\n", "41\n"), [0.0]
    settings = SlurmSteps(partition="gpu", options=("--mem=4G",))
    asked = order(tmp_path, gpus=2)
    step = SlurmExecutor(settings, slurm, lambda: now[0]).start(asked)
    command, script = slurm.calls[0]
    wanted = {"--gres=gpu:2", "--partition=gpu", "--mem=4G", "--no-requeue"}
    assert wanted <= set(command) and f"--job-name={job_name(asked.work)}" in command
    assert step.poll() is None and len(slurm.calls) == 1  # it is not asked at every look
    now[0] += LOOK_SECONDS
    assert step.poll() is None
    with asked.log.open("w") as log:
        subprocess.run(["sh"], input=script, text=True, stdout=log, check=True)
    assert step.poll() == "exit code 3: it's over"


def test_a_job_that_is_gone_without_a_word_is_lost_and_a_stopped_one_was_stopped(
    tmp_path: Path,
) -> None:
    away = SlurmError("squeue: Unable to contact slurm controller")
    slurm, now = PlayedSlurm("41\n", away, SlurmError("squeue: Invalid job id specified")), [0.0]
    executor = SlurmExecutor(SlurmSteps(), slurm, lambda: now[0])
    step = executor.start(order(tmp_path))
    for _ in range(2):
        now[0] += LOOK_SECONDS
        assert step.poll() is None  # the controller is away; then a file may be late
    now[0] += LATE_SECONDS
    assert step.poll() == "Slurm job 41 was lost"
    step.stop()
    assert step.poll() == "it was stopped" and slurm.calls[-1][0] == ("scancel", "41")


def test_what_slurm_refuses_has_failed_in_its_words(tmp_path: Path) -> None:
    slurm = PlayedSlurm(SlurmError("sbatch: error: invalid partition specified: x"))
    assert "invalid partition" in (
        SlurmExecutor(SlurmSteps(), slurm).start(order(tmp_path)).poll() or ""
    )


def test_jobs_of_a_lost_driver_are_ended_before_their_step_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_steps.time, "sleep", lambda seconds: None)
    slurm = PlayedSlurm("7\n8\n", "")
    SlurmExecutor(SlurmSteps(), slurm).end_leftovers(tmp_path)
    assert [command for command, _ in slurm.calls if command[0] == "scancel"] == [
        ("scancel", "7", "8")
    ]


def test_a_script_sets_the_step_s_variables(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh"], input=step_script(order(tmp_path)), text=True, capture_output=True
    )
    assert done.stdout == "it's over\n"


STEPS: dict[str, Any] = {
    "node": {
        "command": ["sh", "-c", "echo $SLURM_JOB_ID > {outputs.out}; echo ran >> ran"],
        "outputs": {"out": "node"},
    },
    "slow": {
        "command": [
            "sh",
            "-c",
            "until test -e go; do sleep 0.2; done; cat {inputs.of} > {outputs.out}",
        ],
        "inputs": {"of": "node.out"},
        "outputs": {"out": "slow"},
    },
    "bad": {"command": ["sh", "-c", "echo no luck; exit 3"], "after": ["slow"]},
}


@pytest.mark.soak
def test_a_real_slurm_runs_the_steps_and_a_killed_driver_s_job_is_not_left_running(
    make_sandbox: Callable[..., Sandbox],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_sandbox(nodes=2, gpus_per_node=0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = (
        "import json, sys; from phalanx.pipelines.run.session import PipelineSession;"
        "from phalanx.pipelines.engines.slurm_steps import SlurmExecutor;"
        "from phalanx.cluster.pipelines.description import SlurmSteps;"
        "PipelineSession({'name': 'p', 'steps': json.loads(sys.argv[1])})"
        ".run(SlurmExecutor(SlurmSteps()), lambda progress: None)"
    )
    import json

    driver = subprocess.Popen([sys.executable, "-c", program, json.dumps(STEPS)])
    logs = tmp_path / "runs/pipelines/p/runs/0001/logs"
    deadline = time.monotonic() + 120
    while not (logs / "slow.1.log").exists():
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    Path("go").touch()
    session = PipelineSession({"name": "p", "steps": STEPS})
    end = session.resume(SlurmExecutor(SlurmSteps()), lambda progress: None)
    tasks = end.machine.tasks
    assert {name: str(each.state) for name, each in tasks.items()} == {
        "node": "done",
        "slow": "done",
        "bad": "failed",
    }
    assert tasks["bad"].reason == "exit code 3: no luck" and Path("ran").read_text() == "ran\n"
    assert Path("runs/pipelines/p/outputs/slow").read_text().strip().isdigit()
