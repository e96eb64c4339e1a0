"""What the recomputation of gradients finds in a sharded job, and what it costs.

    python -m benchmarks.verification [--steps 20] [--flips 20]

Four ranks of this machine (gloo, CPU), weights sharded over all of them (ZeRO 3). First bits of
gradients are flipped, each drawn: parameter, element, bit, rank and micro-batch. Then a larger
model, with one micro-batch a step, which is where a recomputation costs most: every other step is
verified, and its time is compared with that of its neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch.distributed as dist

from phalanx.config.resolve import VERIFY_EVERY
from phalanx.train.optim.verification import GradientVerification
from proof.report import report
from tests.ranks import run_ranks
from tests.train.verified_steps import (
    Flips,
    make_flipped_steps,
    make_trainer,
    verified_step,
)

RANKS, SEED, WARM_STEPS = 4, 7, 4
LARGER = {"dim": 128, "layers": 4, "heads": 4, "ffn": 512, "vocab": 1024}


def flip(flips: int) -> Flips:
    """On one rank."""
    return make_flipped_steps(make_trainer(RANKS), flips, SEED)


def timed_steps(steps: int) -> tuple[list[float], list[float]]:
    """On one rank: seconds of steps without and with a recomputation, in turn."""
    trainer = make_trainer(
        RANKS,
        model=LARGER,
        data={"sequence": 256},
        train={"global_batch": 2 * RANKS, "steps": 2 * steps + WARM_STEPS},
    )
    verification = GradientVerification(trainer, 1)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * steps + WARM_STEPS):
        verified = number % 2
        dist.barrier()
        began = time.perf_counter()
        if verified:
            verified_step(trainer, verification)
        else:
            trainer.train_step()
        if number >= WARM_STEPS:
            seconds[verified].append(time.perf_counter() - began)
    trainer.close()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="timed, of each kind")
    parser.add_argument("--flips", type=int, default=20)
    options = parser.parse_args()
    made: Flips = run_ranks(RANKS, flip, options.flips)[0]
    pairs = list(zip(made.named, made.culprits, strict=True))
    caught = sum(bool(named) for named, _ in pairs)
    right = sum(named == (culprit,) for named, culprit in pairs)
    print(f"{caught} of {len(pairs)} flipped gradients found, {right} times the right rank named")
    plain, verified = run_ranks(RANKS, timed_steps, options.steps)[0]
    step = statistics.median(plain)
    more = statistics.median(b - a for a, b in zip(plain, verified, strict=True))
    share = more / (VERIFY_EVERY * step)
    print(f"a step {step:.4f} s, verified {more:.4f} s more: {share:.2%} at every {VERIFY_EVERY}th")
    figures = {
        "flips": len(pairs),
        "caught": caught,
        "named": right,
        "false_alarms": made.alarms,
        "step_seconds": step,
        "verification_seconds": more,
        "cost_share": share,
    }
    return report("verification", figures)


if __name__ == "__main__":
    sys.exit(main())
