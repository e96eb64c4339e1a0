"""How fast months of a fleet are played: the two large scenarios and chaos.

    python -m benchmarks.simulate [--quick | --many-jobs]

Prints seconds of wall and CPU time a seed beside the bars; exits with 1 when the CPU time (what the
wall time is on an idle core) is above one. ``--quick``: two days of the largest fleet alone, which
show a loop over pairs of its nodes. ``--many-jobs``: eleven months of Meta's RSC-1 at its full size
alone, some 277,000 jobs of a node and more; ten minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from phalanx.simulate.runner import run_seeds
from phalanx.simulate.scenario.load import load_scenario
from proof.report import report

SEEDS = {"llama3-54d": 3, "100k-1t": 1, "chaos": 100}
QUICK, QUICK_DAYS = "100k-1t", 2
MANY_JOBS, MANY_JOBS_GPUS = "rsc-11mo", 16_384


def main() -> int:
    """Plays every scenario of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quick", action="store_true", help="two days of the largest fleet")
    group.add_argument("--many-jobs", action="store_true", help="all of RSC-1; ten minutes")
    asked = parser.parse_args()
    claim, seeds_of, changes = "simulate", SEEDS, list[str]()
    if asked.quick:
        claim, seeds_of, changes = "simulate-quick", {QUICK: 1}, [f"days={QUICK_DAYS}"]
    elif asked.many_jobs:
        claim, seeds_of = "simulate-many-jobs", {MANY_JOBS: 1}
        changes = [f"fleet.gpus={MANY_JOBS_GPUS}"]
    rows = []
    figures: dict[str, float] = {"violations": 0}
    for name, seeds in seeds_of.items():
        played = run_seeds(load_scenario(name, changes), range(seeds))
        mean, greatest = played.summary.mean, played.summary.greatest
        row: dict[str, Any] = {
            "scenario": name,
            "seeds": seeds,
            "wall_seconds": round(mean["wall_seconds"], 3),
            "cpu_seconds": round(greatest["cpu_seconds"] or mean["wall_seconds"], 3),
            "megabytes": round(greatest["peak_memory_mb"]),
            "events": round(mean["events"]),
            "jobs": round(mean.get("jobs", 0)),
            "interruptions": mean["interruptions"],
            "ettr": round(mean["ettr"], 4),
            "violations": played.summary.violations,
        }
        rows.append(row)
        print(json.dumps(row))
        figures["violations"] += row["violations"]
        key = name.replace("-", "_")
        figures[f"{key}_seconds"] = row["cpu_seconds"]
        figures[f"{key}_ettr"] = row["ettr"]
        figures[f"{key}_interruptions"] = row["interruptions"]
        figures[f"{key}_jobs"] = row["jobs"]
    folder = Path("runs/benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "simulate.json").write_text(json.dumps(rows, indent=2) + "\n")
    return report(claim, figures)


if __name__ == "__main__":
    sys.exit(main())
