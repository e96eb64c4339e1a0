"""Changes of a job that runs: asked about, carried out, and the measured step beside the answer.

    python -m benchmarks.what_if
    python -m benchmarks.what_if --only-speed        # how soon a 16,384-GPU job has its answer

A small job trains on a local cluster: one node, two ranks, a core each. For each change the server
is asked what it would make of the job as it runs then; the change is carried out at a step
boundary, and when enough steps of it are made, their median is the measured step. It is inside when
it lies in the 80 % interval of the answer. Steps are counted over all changes: none may be missing,
or made twice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1"}

from msgspec import structs
from rich.console import Console
from rich.table import Table

from benchmarks.page import served
from benchmarks.played_fleet import play
from phalanx.config import job_from_table, resolve
from phalanx.control.client.client import Client
from phalanx.control.server.http.submission import RequestedWork, submission
from phalanx.control.wire.api_types import Done
from phalanx.plan.search.what_if import JobChange, WhatIf
from phalanx.testing.local_cluster import TrialCluster
from phalanx.train import StepRecord, read_records
from proof.report import report

JOB = """
name = "changed"
runs = "runs"
[model]
preset = "tiny"
[data]
sequence = 256
[parallel]
data = 2
zero = 1
[precision]
compute = "float32"
[train]
steps = 1000000
global_batch = 16
micro_batch = 4
device = "cpu"
[checkpoint]
interval = "off"
[log]
every = 1
tensorboard = false
"""
# Each from what the one before left.
CHANGES: dict[str, tuple[str, ...]] = {
    "ZeRO 3": ("parallel.zero=3",),
    "tensor 2": ("parallel.zero=1", "parallel.tensor=2"),
    "context 2": ("parallel.tensor=1", "parallel.context=2"),
    "pipeline 2": ("parallel.context=1", "parallel.pipeline=2"),
    "interleaved": ("parallel.schedule=interleaved", "parallel.virtual_stages=2"),
    "one rank": (
        "--gpus=1",
        "parallel.pipeline=1",
        "parallel.schedule=1f1b",
        "parallel.virtual_stages=1",
    ),
    "two replicas": ("--gpus=2",),
    "micro-batch 1": ("train.micro_batch=1",),
    "micro-batch 8": ("train.micro_batch=8",),
    "recompute": ("memory.recompute=full",),
    "checkpoints": ("--interval=10",),
    "bfloat16": ("--precision=bfloat16",),
}
GIANT = {
    "name": "giant",
    "model": {"preset": "llama3-405b"},
    "data": {"sequence": 8192},
    "parallel": {"tensor": 8, "pipeline": 16, "zero": 1},
    "memory": {"recompute": "full"},
    "train": {"steps": 100_000, "global_batch": 4096, "device": "cuda"},
}
GIANT_GPUS = 16_384
QUESTIONS = {
    "half the GPUs": JobChange(gpus=GIANT_GPUS // 2),
    "tensor 4": JobChange(settings=("parallel.tensor=4",)),
    "a checkpoint every 300 s": JobChange(interval_seconds=300.0),
    "two spares": JobChange(spares=2),
    "fp8": JobChange(precision="fp8"),
    "the best mapping": JobChange(search=True),
}
REPEATS = 3


class Trial(NamedTuple):
    """One change: what was said of it, and what it came to."""

    name: str
    low: float  # seconds of a step
    predicted: float
    high: float
    measured: float
    away_seconds: float  # from the order to the next step

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


def words(asked: tuple[str, ...]) -> list[str]:
    """A change as options of the command line."""
    split = [each.split("=", 1) if each.startswith("--") else ["--set", each] for each in asked]
    return [word for pair in split for word in pair]


class ChangedJob:
    """The job on its cluster."""

    def __init__(self, trial: TrialCluster, number: int, steps: int) -> None:
        self._cluster, self._job, self._steps = trial, str(number), steps

    def shown(self) -> dict[str, Any]:
        return self._cluster.job(int(self._job))

    def wait_steps(self, generation: int) -> None:
        """Until a generation runs that is not older, and has made enough steps."""
        self._cluster.wait(lambda: self._runs(generation), "the job to run", 180)
        until = self.shown()["step"] + self._steps
        self._cluster.wait(lambda: self.shown()["step"] >= until, "steps", 600)

    def _runs(self, generation: int) -> bool:
        shown = self.shown()
        return bool(shown["generation"] >= generation and shown["state"] == "running")

    def ask(self, *options: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._cluster.command("what-if", self._job, *options))
        return answer

    def change(self, name: str, asked: tuple[str, ...]) -> Trial:
        """Ask, carry out, measure."""
        answer = self.ask(*words(asked))["then"]["step_seconds"]
        generation, before = self.shown()["generation"], self.shown()["step"]
        began = time.monotonic()
        self._cluster.command("replan", self._job, *words(asked), "--apply")
        self._cluster.wait(lambda: self._runs(generation + 1), "the changed job", 180)
        self._cluster.wait(lambda: self.shown()["step"] > before, "a step", 180)
        away = time.monotonic() - began
        self.wait_steps(generation + 1)
        measured = self.ask()["now"]["step_seconds"]["mid"]
        return Trial(name, answer["low"], answer["mid"], answer["high"], measured, away)


def changed_steps(root: Path) -> tuple[int, int]:
    """Steps that were made, and those that are missing or were made twice."""
    (folder,) = (root / "runs" / "changed").iterdir()
    made = [each.step for each in read_records(folder / "metrics" / "steps.jsonl", StepRecord)]
    return len(made), len(made) - len(set(made)) + max(made) - len(set(made))


def carried_out(steps: int) -> tuple[list[Trial], int]:
    """All changes, and steps that were lost or made twice."""
    with tempfile.TemporaryDirectory(prefix="phalanx-what-if-") as folder:
        root = Path(folder)
        (root / "job.toml").write_text(JOB)
        with TrialCluster(root, nodes=1, gpus_per_node=2) as trial:
            job = ChangedJob(trial, trial.submit(str(root / "job.toml")), steps)
            job.wait_steps(1)
            trials = []
            for name, asked in CHANGES.items():
                trials.append(job.change(name, asked))
                print(f"{name}: {trials[-1].measured:.3f} s", file=sys.stderr)
            trial.command("cancel", "1")
            return trials, changed_steps(root)[1]


def answer_seconds() -> tuple[float, dict[str, float]]:
    """Over HTTP: the first answer about the large job, and by question the least of a few times.

    The first one starts the planner's process, too. No agent is there: the job forms for ever.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-what-if-") as folder:
        state = Path(folder)
        play(state, nodes=GIANT_GPUS // 8 + 100, events=1)
        with served(state) as url:
            client = Client(url, state)
            job = resolve(job_from_table(GIANT), GIANT_GPUS)
            made = submission(RequestedWork(job=job, ranks=GIANT_GPUS), 8)
            number = client.post("/v1/jobs", structs.replace(made, confirmed=True), Done).jobs[0]

            def ask(change: JobChange) -> float:
                began = time.perf_counter()
                client.post(f"/v1/jobs/{number}/what-if", change, WhatIf)
                return time.perf_counter() - began

            first = ask(JobChange())
            taken = {
                name: min(ask(change) for _ in range(REPEATS)) for name, change in QUESTIONS.items()
            }
    return first, taken


def show(trials: list[Trial], taken: dict[str, float]) -> None:
    """Tables for people."""
    table = Table("CHANGE", "PREDICTED s", "80 %", "MEASURED s", "", "AWAY s")
    for each in trials:
        between = f"{each.low:.3f} to {each.high:.3f}"
        told = "inside" if each.inside else "outside"
        row = (f"{each.predicted:.3f}", between, f"{each.measured:.3f}", told)
        table.add_row(each.name, *row, f"{each.away_seconds:.1f}")
    speed = Table("QUESTION ABOUT 16,384 GPUs", "ANSWER s")
    for name, seconds in taken.items():
        speed.add_row(name, f"{seconds:.3f}")
    for each_table in ([table] if trials else []) + [speed]:
        Console().print(each_table)


def main() -> int:
    """The benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="that a change is measured by")
    parser.add_argument("--only-speed", action="store_true")
    asked = parser.parse_args()
    first, taken = answer_seconds()
    figures = {"answer": max(taken.values()), "first_answer": first}
    trials: list[Trial] = []
    if not asked.only_speed:
        trials, wrong = carried_out(asked.steps)
        figures |= {
            "changes": len(trials),
            "inside": sum(each.inside for each in trials),
            "steps_wrong": wrong,
        }
    show(trials, taken)
    return report("what-if", figures)


if __name__ == "__main__":
    sys.exit(main())
