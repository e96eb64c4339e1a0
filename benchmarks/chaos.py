"""Random faults with the shipped policy: on simulated clusters, or on real processes.

python -m benchmarks.chaos [--seeds 1000] [--live PLANS]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from proof.report import report

JOB = Path(__file__).parent.parent / "examples" / "chaos.toml"


def simulated(seeds: int) -> dict[str, float]:
    """Seeds of the scenario ``chaos``, and the rules that were broken."""
    from phalanx.simulate.load import load_scenario
    from phalanx.simulate.runner import run_seeds

    played = run_seeds(load_scenario("chaos"), range(seeds))
    print(f"{seeds} seeds: {played.summary.violations} violations")
    return {"seeds": seeds, "violations": played.summary.violations}


def live(plans: int) -> dict[str, float]:
    """Plans of harm on clusters of this machine; what leaks counts as a bad plan."""
    command = [sys.executable, "-m", "phalanx", "chaos", str(JOB), "--count", str(plans), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    bad = [outcome for outcome in found["outcomes"] if not outcome["good"]]
    for outcome in bad:
        print(json.dumps(outcome, indent=1))
    print(f"{plans} plans, {len(bad)} bad; left behind: {found['leaks']}")
    return {"plans": len(found["outcomes"]), "plans_bad": len(bad) + bool(found["leaks"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--live", type=int, metavar="PLANS", help="on real processes instead")
    asked = parser.parse_args()
    if asked.live:
        return report("chaos-live", live(asked.live))
    return report("chaos", simulated(asked.seeds))


if __name__ == "__main__":
    sys.exit(main())
