"""What the same bits on every number of replicas cost: steps with virtual replicas and without.

    python -m benchmarks.virtual_replicas [--steps 12]

The demo's model and batch on four ranks of this machine (gloo, CPU): its own mesh of two stages
with two replicas each, and four replicas with nothing, gradients, and weights sharded. Two trainers
take turns, step by step. Then the same job on one, two and four replicas: are its bits the same?
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import structs

from phalanx.config import Job, check, load_job, resolve
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer
from proof.report import report
from tests.ranks import run_ranks

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
RANKS, VIRTUAL, WARM_STEPS, COMPARED_STEPS = 4, 4, 3, 6
MESHES = {
    "demo": {"data": 2, "pipeline": 2},
    "zero0": {"data": 4, "pipeline": 1, "zero": 0},
    "zero2": {"data": 4, "pipeline": 1, "zero": 2},
    "zero3": {"data": 4, "pipeline": 1, "zero": 3},
}


def demo_on(ranks: int, axes: dict[str, int], virtual: int) -> Job:
    """The demo's job over a made-up corpus."""
    job = load_job(DEMO)
    job = structs.replace(
        job,
        data=structs.replace(job.data, source="synthetic", path=""),
        parallel=structs.replace(job.parallel, **axes),
        train=structs.replace(job.train, virtual_replicas=virtual),
    )
    job = resolve(job, ranks)
    check(job, ranks)
    return job


def make_trainer(job: Job) -> Trainer:
    device = torch.device("cpu")
    return Trainer(job, build_mesh(job, device), device)


def timed_steps(axes: dict[str, int], steps: int) -> tuple[list[float], list[float]]:
    """On one rank: seconds of ordinary steps and of those with virtual replicas, in turn."""
    trainers = [make_trainer(demo_on(RANKS, axes, virtual)) for virtual in (0, VIRTUAL)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(steps + WARM_STEPS):
        for trainer, taken in zip(trainers, seconds, strict=True):
            dist.barrier()
            began = time.perf_counter()
            trainer.train_step()
            if number >= WARM_STEPS:
                taken.append(time.perf_counter() - began)
    for trainer in trainers:
        trainer.close()
    return seconds


def losses(ranks: int) -> list[str]:
    """On one rank: the losses of the first steps, to the bit."""
    trainer = make_trainer(demo_on(ranks, {"data": ranks, "pipeline": 1}, VIRTUAL))
    found = [float(trainer.train_step().loss).hex() for _ in range(COMPARED_STEPS)]
    trainer.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="timed, of each kind and mesh")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for name, axes in MESHES.items():
        plain, virtual = run_ranks(RANKS, timed_steps, axes, options.steps)[0]
        ratio = statistics.median(a / b for a, b in zip(plain, virtual, strict=True))
        figures[f"speed_{name}"] = ratio
        before, after = statistics.median(plain), statistics.median(virtual)
        print(f"{name}: a step {before:.3f} s, with virtual replicas {after:.3f} s, {ratio:.2f}x")
    found = [run_ranks(ranks, losses, ranks)[0] for ranks in (1, 2, 4)]
    figures["identical"] = float(found[0] == found[1] == found[2])
    print(f"{COMPARED_STEPS} losses on 1, 2 and 4 replicas identical: {bool(figures['identical'])}")
    return report("virtual-replicas", figures)


if __name__ == "__main__":
    sys.exit(main())
