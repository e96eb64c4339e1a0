"""What Muon's steps cost on four ranks: the demo's model with Muon and with AdamW.

    python -m benchmarks.muon [--steps 12]

The demo's model and batch on four ranks of this machine (gloo, CPU): its own mesh of two stages
with two replicas each, and four replicas with nothing, gradients, and weights sharded. Two trainers
take turns, step by step. Processor time of a step is shown for each rank: what others do on the
machine does not count in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch.distributed as dist
from msgspec import structs

from benchmarks.virtual_replicas import MESHES, RANKS, WARM_STEPS, demo_on, make_trainer
from phalanx.config import Job
from proof.report import report
from tests.ranks import run_ranks

KINDS = ("adamw", "muon")


class StepCost(NamedTuple):
    """Of one kind of steps on one rank, each step's."""

    seconds: list[float]
    processor_seconds: list[float]


def job_with(kind: Any, axes: dict[str, int]) -> Job:
    job = demo_on(RANKS, axes, 0)
    return structs.replace(job, optimizer=structs.replace(job.optimizer, kind=kind))


def timed_steps(axes: dict[str, int], steps: int) -> list[StepCost]:
    """On one rank: steps with AdamW and with Muon, in turn."""
    trainers = [make_trainer(job_with(kind, axes)) for kind in KINDS]
    costs = [StepCost([], []) for _ in KINDS]
    for number in range(steps + WARM_STEPS):
        for trainer, cost in zip(trainers, costs, strict=True):
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            trainer.train_step()
            if number >= WARM_STEPS:
                cost.seconds.append(time.perf_counter() - began)
                cost.processor_seconds.append(time.process_time() - worked)
    for trainer in trainers:
        trainer.close()
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="timed, of each kind and mesh")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for name, axes in MESHES.items():
        ranks = run_ranks(RANKS, timed_steps, axes, options.steps)
        adamw, muon = ranks[0]
        pairs = zip(muon.seconds, adamw.seconds, strict=True)
        ratio = statistics.median(after / before for after, before in pairs)
        worked = [[statistics.median(kind.processor_seconds) for kind in rank] for rank in ranks]
        figures[f"step_{name}"] = ratio
        figures[f"processor_{name}"] = sum(rank[1] for rank in worked) / sum(
            rank[0] for rank in worked
        )
        before, after = statistics.median(adamw.seconds), statistics.median(muon.seconds)
        print(f"{name}: a step {before:.3f} s, with Muon {after:.3f} s, {ratio:.2f}x")
        for kind, times in zip(KINDS, zip(*worked, strict=True), strict=True):
            shown = ", ".join(f"{each:.3f}" for each in times)
            print(f"  processor seconds a step by rank, {kind}: {shown}", flush=True)
    return report("muon", figures)


if __name__ == "__main__":
    sys.exit(main())
