"""A small job for clusters of tests, the same without a cluster, and what both left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from phalanx.checkpoint import Checkpointer, latest, stored_tensors
from phalanx.train import StepRecord, read_records
from tests.commands import run_phalanx
from tests.shared_folder import made_once

STEPS = 60
FEW_STEPS = 24  # of jobs that are paced until something has happened to them
JOB = """
name = "{name}"
runs = "runs"

[model]
preset = "tiny"
dim = 64
layers = 2
ffn = 128
vocab = 512

[data]
sequence = 32

[parallel]
data = 2
pipeline = 2

[precision]
compute = "float32"

[schedule]
warmup_steps = 2

[train]
steps = {steps}
global_batch = 8
micro_batch = 2
device = "cpu"
deterministic = true

[checkpoint]
every = 0

[log]
every = 1
tensorboard = false
"""


def write_job(root: Path, name: str, steps: int = STEPS) -> Path:
    """A job file of two pipeline stages on two replicas each."""
    path = root / f"{name}.toml"
    path.write_text(JOB.format(name=name, steps=steps))
    return path


def undisturbed(root: Path, steps: int = STEPS, *settings: str, forked: bool = True) -> Path:
    """The run's folder of the same job, with other settings, without a cluster: only to be read."""

    def make(folder: Path) -> Path:
        return _run_alone(folder, steps, settings, forked)

    return made_once(f"undisturbed {steps} {settings}", root, make)


def _run_alone(root: Path, steps: int, settings: tuple[str, ...], forked: bool) -> Path:
    """A process that has used CUDA cannot be forked: there it has an interpreter of its own."""
    words = ("train", str(write_job(root, "undisturbed", steps)), *set_options(settings))
    if forked:
        done = run_phalanx(*words, folder=root, seconds=600)
    else:
        command = [sys.executable, "-m", "phalanx", *words]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return max((root / "runs" / "undisturbed").iterdir())  # where one has failed: the newest


def set_options(settings: tuple[str, ...]) -> list[str]:
    """Settings as options of the command line."""
    return [word for setting in settings for word in ("--set", setting)]


def losses(folder: Path) -> dict[int, float | None]:
    """The loss of every step; of one that was made again, the last."""
    records = read_records(folder / "metrics" / "steps.jsonl", StepRecord)
    return {record.step: record.loss for record in records}


def first_samples(folder: Path) -> dict[int, int]:
    """The first sample of every step."""
    records = read_records(folder / "metrics" / "steps.jsonl", StepRecord)
    return {record.step: record.first_sample for record in records}


def generations(folder: Path) -> dict[int, int]:
    """The generation that made each step."""
    records = read_records(folder / "metrics" / "steps.jsonl", StepRecord)
    return {record.step: record.generation for record in records}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All state of a run's last checkpoint."""
    path = latest(folder / "checkpoints")
    assert path is not None
    state = {name: torch.empty(s, dtype=d) for name, (s, d) in stored_tensors(path).items()}
    Checkpointer(folder / "checkpoints").load(path, state)
    return state


def assert_same(one: Path, other: Path) -> None:
    """Two runs have the same losses and end with the same state, to the bit."""
    assert losses(one) == losses(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
