"""Predicted against measured steps on one GPU, after `phalanx plan calibrate --measure` on it.

    python -m benchmarks.plan_gpu [--kernels]

The calibration times a few large operations and two steps of a small model; every shape below is
then predicted from it and trained for some steps, in a process of its own. `--kernels` adds where
the device's time of a step went, by kernel, to compare with the parts of the prediction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from phalanx.config import PRESETS, Data, Job, Memory, Optimizer, Schedule, Train, resolve
from phalanx.hardware import cluster
from phalanx.parallel.mesh import build_mesh
from phalanx.plan import mapping_of, predict, shipped, workload_of
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.measured import constants_from
from phalanx.train.calibrate.microbench import measure_device
from phalanx.train.trainer import Trainer
from proof.report import report

BAR = 0.05  # of the measured step
WARM_STEPS, STEPS = 2, 6
MOST_KERNELS = 40


@dataclass(frozen=True)
class Shape:
    """One job on one GPU."""

    preset: str
    sequence: int
    batch: int
    micro_batch: int
    recompute: str = "none"
    state: str = "float32"

    @property
    def name(self) -> str:
        words = (self.preset, f"sequence {self.sequence:,}", f"micro-batch {self.micro_batch}")
        return ", ".join(words) + f", {self.recompute} recompute"


SHAPES = (
    Shape("llama3-1b", 4096, 16, 4),
    Shape("llama3-1b", 8192, 4, 2),
    Shape("llama3-1b", 32768, 1, 1, recompute="selective"),
    Shape("llama3-3b", 8192, 4, 2),
    Shape("llama3-3b", 4096, 8, 4, recompute="full"),
    Shape("llama3-8b", 8192, 4, 1, recompute="selective", state="int8"),
)


def make_job(shape: Shape) -> Job:
    job = Job(
        name="plan-gpu",
        model=PRESETS[shape.preset],
        data=Data(source="synthetic", sequence=shape.sequence),
        schedule=Schedule(kind="constant"),
        memory=Memory(recompute=shape.recompute),  # type: ignore[arg-type]
        optimizer=Optimizer(state=shape.state),  # type: ignore[arg-type]
        train=Train(steps=1000, global_batch=shape.batch, micro_batch=shape.micro_batch),
    )
    return resolve(job, 1)


def measure(job: Job, *, kernels: bool) -> tuple[float, dict[str, float]]:
    """Seconds of a step, and milliseconds of the device by kernel."""
    device = torch.device("cuda", 0)
    trainer = Trainer(job, build_mesh(job, device), device)
    for _ in range(WARM_STEPS):
        trainer.train_step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        trainer.train_step()
        trainer.timer.close_step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / STEPS
    found: dict[str, float] = {}
    if kernels:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            trainer.train_step()
            torch.cuda.synchronize()
        rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
        found = {row.key[:90]: row.self_device_time_total / 1e3 for row in rows[:MOST_KERNELS]}
    return seconds, found


def compare(number: int, constants: Constants, *, kernels: bool) -> dict[str, Any]:
    shape = SHAPES[number]
    command = [sys.executable, "-m", "benchmarks.plan_gpu", "--serve", str(number)]
    command += ["--kernels"] if kernels else []
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise SystemExit(f"{shape.name} ended with {ran.returncode}; see its output above")
    seconds, found = json.loads(ran.stdout.splitlines()[-1])
    job = make_job(shape)
    planned = predict(workload_of(job), mapping_of(job), cluster("h200-8"), constants=constants)
    row = {
        "shape": shape.name,
        "measured_ms": 1e3 * seconds,
        "predicted_ms": 1e3 * planned.step_seconds,
        "error": planned.step_seconds / seconds - 1,
        "parts_ms": {name: 1e3 * part for name, part in planned.parts.items() if part},
        "kernels_ms": found,
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        job = make_job(SHAPES[options.serve])
        print(json.dumps(measure(job, kernels=options.kernels)))
        return 0
    measured = measure_device()
    print(measured, file=sys.stderr, flush=True)
    constants = constants_from(measured, shipped())
    rows = [compare(n, constants, kernels=options.kernels) for n in range(len(SHAPES))]
    table = Table(title=f"steps on one {measured.device}")
    for column in ("shape", "measured ms", "predicted ms", "error"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for row in rows:
        cells = (row["measured_ms"], row["predicted_ms"])
        table.add_row(row["shape"], *(f"{cell:,.0f}" for cell in cells), f"{row['error']:+.1%}")
    Console().print(table)
    errors = [abs(row["error"]) for row in rows]
    figures = {
        "shapes": len(errors),
        "within": sum(error <= BAR for error in errors),
        "worst_error": max(errors),
        "mean_error": statistics.mean(errors),
    }
    return report("plan-gpu", figures)


if __name__ == "__main__":
    sys.exit(main())
