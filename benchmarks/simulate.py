"""How fast months of a fleet are played: the two large scenarios and chaos.

    python -m benchmarks.simulate

Prints seconds of wall and CPU time a seed beside the bars; exits with 1 when the CPU time (what the
wall time is on an idle core) is above one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from phalanx.simulate.load import load_scenario
from phalanx.simulate.runner import run_seeds

# Scenario, seeds, seconds that one seed may take on an idle core, megabytes.
BARS = (
    ("llama3-54d", 3, 30.0, 2048.0),
    ("100k-1t", 1, 120.0, 4096.0),
    ("chaos", 100, 0.5, 2048.0),
)


def main() -> None:
    """Plays every scenario of the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = []
    for name, seeds, most_seconds, most_megabytes in BARS:
        report = run_seeds(load_scenario(name), range(seeds))
        mean, greatest = report.summary.mean, report.summary.greatest
        row: dict[str, Any] = {
            "scenario": name,
            "seeds": seeds,
            "wall_seconds": round(mean["wall_seconds"], 3),
            "cpu_seconds": round(greatest["cpu_seconds"] or mean["wall_seconds"], 3),
            "bar_seconds": most_seconds,
            "megabytes": round(greatest["peak_memory_mb"]),
            "bar_megabytes": most_megabytes,
            "events": round(mean["events"]),
            "interruptions": mean["interruptions"],
            "ettr": round(mean["ettr"], 4),
            "violations": report.summary.violations,
        }
        rows.append(row)
        print(json.dumps(row))
    folder = Path("runs/benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "simulate.json").write_text(json.dumps(rows, indent=2) + "\n")
    slow = [row for row in rows if row["cpu_seconds"] > row["bar_seconds"]]
    large = [row for row in rows if row["megabytes"] > row["bar_megabytes"]]
    sys.exit(1 if slow or large or any(row["violations"] for row in rows) else 0)


if __name__ == "__main__":
    main()
