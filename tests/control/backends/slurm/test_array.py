"""Work units on Slurm: what is submitted, when it is over, the corpus of one machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.control.backends.slurm.array import MOST_UNANSWERED, SlurmArray
from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError
from phalanx.data import read_manifest
from phalanx.data.prepare.engine import LocalEngine
from phalanx.data.prepare.recipe import SlurmSettings
from phalanx.data.prepare.run import prepare
from phalanx.testing.slurm.sandbox import Sandbox
from tests.commands import run_phalanx
from tests.data.prepare.raw import recipe, recipe_file, write_raw

ROOT = Path(__file__).parents[4]


class PlayedSlurm(SlurmCommands):
    """Says what it was scripted to say, and remembers what it was asked."""

    def __init__(self, *queues: str | BaseException) -> None:
        self.calls: list[tuple[tuple[str, ...], str]] = []
        self._queues = list(queues)

    def run(self, *command: str, text: str = "", **_: object) -> str:
        self.calls.append((command, text))
        if command[0] == "sbatch":
            return "41;cluster\n"
        answer = self._queues.pop(0) if command[0] == "squeue" else ""
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_an_array_does_shares_of_the_units_and_is_waited_for(tmp_path: Path) -> None:
    slurm = PlayedSlurm("41_0\n41_1\n", "41_1\n", "")
    slept: list[float] = []
    settings = SlurmSettings(partition="cpu", options=("--mem=4G",))
    SlurmArray(settings, 3, slurm, slept.append).run(tmp_path / "filter.json", 2, lambda: None)
    command, script = slurm.calls[0]
    assert {"--array=0-1", "--partition=cpu", "--mem=4G", "--requeue"} <= set(command)
    assert not any(word.startswith("--account") for word in command)
    assert f'data prepare --unit {tmp_path}/filter.json:"$SLURM_ARRAY_TASK_ID"/2' in script
    assert len(slept) == 2


def test_an_array_that_slurm_has_forgotten_is_over(tmp_path: Path) -> None:
    slurm = PlayedSlurm(SlurmError("squeue: slurm_load_jobs error: Invalid job id specified"))
    SlurmArray(SlurmSettings(), 1, slurm).run(tmp_path / "filter.json", 1, lambda: None)


def test_an_array_outlives_a_controller_of_slurm_that_is_restarted(tmp_path: Path) -> None:
    away = SlurmError("squeue: Unable to contact slurm controller")
    slept: list[float] = []
    slurm = PlayedSlurm("41_0\n", *[away] * MOST_UNANSWERED, "41_0\n", *[away] * 2, "")
    SlurmArray(SlurmSettings(), 1, slurm, slept.append).run(tmp_path / "a.json", 1, lambda: None)
    assert sum(slept) > 600 and slurm.calls[-1][0][0] == "squeue"
    lost = PlayedSlurm(*[away] * (MOST_UNANSWERED + 1))
    with pytest.raises(SlurmError, match="Unable to contact"):
        SlurmArray(SlurmSettings(), 1, lost, slept.append).run(tmp_path / "b.json", 1, lambda: None)
    assert lost.calls[-1][0] == ("scancel", "41")


def test_an_interrupt_takes_the_array_along(tmp_path: Path) -> None:
    slurm = PlayedSlurm(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        SlurmArray(SlurmSettings(), 1, slurm).run(tmp_path / "filter.json", 1, lambda: None)
    assert slurm.calls[-1][0] == ("scancel", "41")


def test_a_real_slurm_makes_the_corpus_that_one_machine_makes(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sandbox(nodes=2, gpus_per_node=0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "corpus"
    write_raw(folder / "raw")
    path = recipe_file(folder)
    done = run_phalanx("data", "prepare", str(path), "--engine", "slurm", "--workers", "2")
    assert done.returncode == 0, done.stderr
    phases = folder / "out" / "work" / "phases"
    for phase in ("filter", "exact", "candidates", "verify"):
        assert list((phases / phase).glob("*.out")), f"{phase} was done by Slurm's tasks"
    alone = recipe(folder, overrides=[f"out={tmp_path / 'alone'}"])
    prepare(alone, folder, LocalEngine(1))
    assert read_manifest(folder / "out") == read_manifest(tmp_path / "alone")


@pytest.mark.soak
def test_a_killed_node_s_units_are_done_on_others(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=4, gpus_per_node=0, cpus_per_node=1)
    folder = tmp_path / "corpus"
    write_raw(folder / "raw")
    command = ["data", "prepare", str(recipe_file(folder)), "--engine", "slurm", "--workers", "4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "phalanx", *command], env=environment) as running:
        deadline = time.monotonic() + 200
        while not sandbox.job_processes("n2"):
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.05)
        sandbox.kill_node("n2")
        assert running.wait(600) == 0
    alone = recipe(folder, overrides=[f"out={tmp_path / 'alone'}"])
    prepare(alone, folder, LocalEngine(1))
    assert read_manifest(folder / "out") == read_manifest(tmp_path / "alone")
