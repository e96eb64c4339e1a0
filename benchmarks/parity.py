"""Whether meshes train as one process does: greatest differences of losses and gradient norms.

    python -m benchmarks.parity [--all]

A sample of the meshes that `tests/parallel/test_parity.py` compares one by one: every axis, alone
and together with another.
"""

from __future__ import annotations

import argparse
import sys

from phalanx.train.parity.prove import train
from proof.report import report
from tests.parallel.test_parity import MESHES, job_of_mesh, reference_of_mesh
from tests.ranks import run_ranks

STEPS = 10
SAMPLE = (
    "ddp2",
    "zero2",
    "hsdp2x2",
    "tp2xfsdp2",
    "pp4-1f1b",
    "pp4-zero-bubble",
    "pp2xfsdp2",
    "cp2-ring",
    "cp2xtp2-ulysses",
    "ep2-bias",
    "ep2xfsdp2",
    "moe-pp2-zero-bubble",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every mesh of the tests")
    names = tuple(MESHES) if parser.parse_args().all else SAMPLE
    greatest_loss = greatest_norm = 0.0
    for name in names:
        ranks, _, _ = MESHES[name]
        reference = reference_of_mesh(name, STEPS)
        pairs = [
            (step, expected)
            for found in run_ranks(ranks, train, job_of_mesh(name, STEPS))
            for step, expected in zip(found, reference, strict=True)
        ]
        loss = max(abs(step[0] / expected[0] - 1) for step, expected in pairs)
        norm = max(abs(step[1] / expected[1] - 1) for step, expected in pairs)
        greatest_loss, greatest_norm = max(greatest_loss, loss), max(greatest_norm, norm)
        print(f"{name:24} losses within {loss:.1e}, gradient norms within {norm:.1e}", flush=True)
    figures = {
        "meshes": len(names),
        "loss_difference": greatest_loss,
        "norm_difference": greatest_norm,
    }
    return report("parity", figures)


if __name__ == "__main__":
    sys.exit(main())
