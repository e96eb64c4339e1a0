"""Predicted against measured steps of the demo's model on CPU cores, after calibration on them.

    python -m benchmarks.plan_cpu
    python -m benchmarks.plan_cpu --out constants-cpu.toml     # for the server's state folder

One gang of two forked ranks, a core each, holds a trainer for each mesh and lets them take turns.
Two steps of plain data parallelism, with large and with small micro-batches, and collectives of two
sizes and attention alone are the calibration; the other meshes are predicted from it. The least of
several rounds counts: whoever else uses the cores only ever adds time. A collective is measured
behind some compute, as it stands in a step: one rank always comes last, and the threads that move
bytes have gone to sleep.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # before torch is imported

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from phalanx.config import Job, check, job_from_table, load_job, resolve
from phalanx.hardware import ClusterFile, make_cluster
from phalanx.parallel import build_mesh
from phalanx.parallel.collectives import gather, scatter_sum
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
SMALL, LARGE, REPEATS = 1 << 12, 1 << 21, 20  # bytes of the collectives, and how many in a row
COMPUTE_SIDE, PRODUCTS = 192, 6  # of what is computed before each


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


def measure(rounds: int) -> dict[str, list[float]]:
    """On a rank: seconds of a step of each mesh, and of parts alone, by name, in every round."""
    warnings.simplefilter("ignore")  # torch's advice to authors
    device = torch.device("cpu")
    trainers = {}
    for name, changes in {**CALIBRATION, **MESHES}.items():
        job = make_job(changes)
        trainers[name] = Trainer(job, build_mesh(job, device), device)
        trainers[name].train_step()
    works = {name: trainer.train_step for name, trainer in trainers.items()} | alone()
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            dist.barrier()
            began = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - began)
    for trainer in trainers.values():
        trainer.close()
    return taken


def alone() -> dict[str, Callable[[], Any]]:
    """Parts of a step, each REPEATS times: compute, then a collective; attention."""
    group = dist.group.WORLD
    assert group is not None
    factor = torch.rand(COMPUTE_SIDE, COMPUTE_SIDE)
    works: dict[str, Callable[[], Any]] = {"compute": lambda: None, "attention": attention_work()}
    for nbytes in (SMALL, LARGE):
        whole = torch.zeros(4, nbytes // 256, 16)  # as of a micro-batch, cut along its sequence
        part = whole.chunk(RANKS, dim=1)[0].contiguous()
        works[f"gather {nbytes}"] = partial(gather, part, 1, group)
        works[f"scatter {nbytes}"] = partial(scatter_sum, whole, 1, group)

    def repeated(work: Callable[[], Any], products: int) -> None:
        for _ in range(REPEATS):
            for _ in range(products):
                torch.mm(factor, factor)
            work()

    return {
        name: partial(repeated, work, 0 if name == "attention" else PRODUCTS)
        for name, work in works.items()
    }


def attention_work() -> Callable[[], Any]:
    """Attention of a layer and micro-batch of the first calibration, forward and backward."""
    job = make_job(next(iter(CALIBRATION.values())))
    model, batch, sequence = job.model, job.train.micro_batch, job.data.sequence
    q, k, v = (
        torch.rand(batch, heads, sequence, model.head_dim, requires_grad=True)
        for heads in (model.heads, model.kv_heads, model.kv_heads)
    )

    def work() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()

    return work


def attentions() -> int:
    """How often a rank does that work in a step."""
    job = make_job(next(iter(CALIBRATION.values())))
    return job.model.layers * job.train.global_batch // (job.parallel.data * job.train.micro_batch)


def slowest(by_rank: list[list[float]]) -> list[float]:
    """Each round as long as on its slowest rank."""
    return [max(times) for times in zip(*by_rank, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the calibrated constants")
    options = parser.parse_args()
    ranks = run_ranks(RANKS, measure, options.rounds, timeout_seconds=550.0)
    taken = {name: slowest([found[name] for found in ranks]) for name in ranks[0]}
    seconds = {name: min(times) for name, times in taken.items()}
    # A step has hundreds of collectives: in its best round, too, they take what they usually do.
    usual = {name: statistics.median(times) for name, times in taken.items()}
    collectives = {
        nbytes: (usual[f"gather {nbytes}"] + usual[f"scatter {nbytes}"]) / 2 - usual["compute"]
        for nbytes in (SMALL, LARGE)
    }
    attention = seconds["attention"] / REPEATS * attentions()
    on = make_cluster(
        f"cpu-{RANKS}", ClusterFile(gpu="cpu", gpus=RANKS, gpus_per_node=1, domain_gpus=RANKS)
    )
    known = []
    for name, changes in CALIBRATION.items():
        job = make_job(changes)
        known.append(MeasuredStep(workload_of(job), mapping_of(job), seconds[name], attention))
    link = MeasuredLink(
        small_bytes=SMALL,
        small_seconds=collectives[SMALL] / REPEATS,
        large_bytes=LARGE,
        large_seconds=collectives[LARGE] / REPEATS,
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
