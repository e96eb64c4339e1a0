"""Predicted against measured steps of the demo's model on CPU cores, after calibration on them.

    python -m benchmarks.plan_cpu
    python -m benchmarks.plan_cpu --out constants-cpu.toml     # for the server's state folder

One gang of two forked ranks, a core each, holds a trainer for each mesh and lets them take turns.
Two steps of plain data parallelism, with large and with small micro-batches, and two all-gathers
are the calibration; the other meshes are predicted from it. The least of several steps counts:
whoever else uses the cores only ever adds time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # before torch is imported

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from phalanx.config import Job, check, job_from_table, load_job, resolve
from phalanx.hardware import ClusterFile, make_cluster
from phalanx.parallel import build_mesh
from phalanx.plan import constants_toml, mapping_of, predict, shipped, workload_of
from phalanx.plan.evidence.cpu import MeasuredLink, MeasuredStep, cpu_constants
from phalanx.train.trainer import Trainer
from proof.report import report
from tests.ranks import run_ranks

RANKS = 2
DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
CALIBRATION: dict[str, dict[str, Any]] = {
    "data, micro-batch 4": {"parallel": {"data": 2, "zero": 0}},
    "data, micro-batch 1": {"parallel": {"data": 2, "zero": 0}, "train": {"micro_batch": 1}},
}
MESHES: dict[str, dict[str, Any]] = {
    "data, ZeRO 1": {"parallel": {"data": 2, "zero": 1}},
    "data, ZeRO 2": {"parallel": {"data": 2, "zero": 2}},
    "data, ZeRO 3": {"parallel": {"data": 2, "zero": 3}},
    "tensor": {"parallel": {"tensor": 2, "zero": 1}},
    "context": {"parallel": {"context": 2, "zero": 1}},
    "pipeline, 1f1b": {"parallel": {"pipeline": 2, "zero": 1}},
    "pipeline, gpipe": {"parallel": {"pipeline": 2, "zero": 1, "schedule": "gpipe"}},
    "pipeline, interleaved": {"parallel": {"pipeline": 2, "zero": 1, "schedule": "interleaved"}},
}
BAR = 0.15  # of the measured step
SMALL, LARGE, REPEATS = 1 << 12, 1 << 23, 60  # bytes of the all-gathers, and how many of each


def make_job(changes: dict[str, dict[str, Any]]) -> Job:
    """The demo's job on another mesh, with synthetic samples."""
    demo = load_job(DEMO)
    table = {
        "model": {"preset": demo.model.preset},
        "data": {"sequence": demo.data.sequence, "prefetch": 0},
        "precision": {"compute": demo.precision.compute},
        "parallel": changes["parallel"],
        "train": {
            "steps": 1000,
            "global_batch": demo.train.global_batch,
            "micro_batch": demo.train.micro_batch,
            "device": "cpu",
            **changes.get("train", {}),
        },
    }
    job = resolve(job_from_table(table), RANKS)
    check(job, RANKS)
    return job


def measure(rounds: int) -> tuple[dict[str, list[float]], dict[int, list[float]]]:
    """On a rank: seconds of every step by mesh, and of every all-gather by its bytes."""
    warnings.simplefilter("ignore")  # torch's advice to authors
    device = torch.device("cpu")
    trainers = {}
    for name, changes in {**CALIBRATION, **MESHES}.items():
        job = make_job(changes)
        trainers[name] = Trainer(job, build_mesh(job, device), device)
        trainers[name].train_step()
    steps: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            dist.barrier()
            began = time.perf_counter()
            trainer.train_step()
            steps[name].append(time.perf_counter() - began)
    gathers: dict[int, list[float]] = {}
    for nbytes in (SMALL, LARGE):
        own, gathered = torch.zeros(nbytes // 8), torch.zeros(nbytes // 4)
        for _ in range(REPEATS):
            dist.barrier()
            began = time.perf_counter()
            dist.all_gather_into_tensor(gathered, own)
            gathers.setdefault(nbytes, []).append(time.perf_counter() - began)
    for trainer in trainers.values():
        trainer.close()
    return steps, gathers


def least(by_rank: list[list[float]]) -> float:
    """The shortest of the steps, each as long as its slowest rank."""
    slowest: list[float] = [max(times) for times in zip(*by_rank, strict=True)]
    return min(slowest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the calibrated constants")
    options = parser.parse_args()
    ranks = run_ranks(RANKS, measure, options.rounds, timeout_seconds=550.0)
    seconds = {name: least([steps[name] for steps, _ in ranks]) for name in ranks[0][0]}
    gathers = {nbytes: least([found[nbytes] for _, found in ranks]) for nbytes in (SMALL, LARGE)}
    on = make_cluster(
        f"cpu-{RANKS}", ClusterFile(gpu="cpu", gpus=RANKS, gpus_per_node=1, domain_gpus=RANKS)
    )
    known = []
    for name, changes in CALIBRATION.items():
        job = make_job(changes)
        known.append(MeasuredStep(workload_of(job), mapping_of(job), seconds[name]))
    link = MeasuredLink(
        small_bytes=SMALL,
        small_seconds=gathers[SMALL],
        large_bytes=LARGE,
        large_seconds=gathers[LARGE],
    )
    constants = cpu_constants((known[0], known[1]), link, on, shipped("cpu"))
    if options.out is not None:
        options.out.write_text(constants_toml(constants))
    table = Table(title=f"steps of the demo's model on {RANKS} cores")
    for column in ("mesh", "measured ms", "predicted ms", "error"):
        table.add_column(column, justify="left" if column == "mesh" else "right")
    errors = {}
    for name, changes in MESHES.items():
        job = make_job(changes)
        found = predict(workload_of(job), mapping_of(job), on, constants=constants)
        errors[name] = found.step_seconds / seconds[name] - 1
        cells = (seconds[name] * 1e3, found.step_seconds * 1e3)
        table.add_row(name, *(f"{value:.1f}" for value in cells), f"{errors[name]:+.1%}")
    Console().print(table)
    worst = max(abs(error) for error in errors.values())
    mean = sum(abs(error) for error in errors.values()) / len(errors)
    within = sum(abs(error) <= BAR for error in errors.values())
    figures = {"meshes": len(errors), "worst_error": worst, "mean_error": mean, "within": within}
    return report("plan-cpu", figures)


if __name__ == "__main__":
    sys.exit(main())
