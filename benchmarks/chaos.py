"""Random faults with the shipped policy: on simulated clusters, or on real processes.

python -m benchmarks.chaos [--seeds 1000] [--live PLANS [--from-seed 0]]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from proof.report import report

JOB = Path(__file__).parent.parent / "examples" / "tiny.toml"


def simulated(seeds: int) -> dict[str, float]:
    """Seeds of the scenario ``chaos``, and the rules that were broken."""
    from phalanx.simulate.result import SeedResult
    from phalanx.simulate.runner import run_seeds
    from phalanx.simulate.scenario.load import load_scenario

    def tell(result: SeedResult) -> None:
        for violation in result.found:
            print(f"seed {result.seed}: {violation}", flush=True)

    played = run_seeds(load_scenario("chaos"), range(seeds), done=tell)
    print(f"{seeds} seeds: {played.summary.violations} violations")
    return {"seeds": seeds, "violations": played.summary.violations}


def live(plans: int, seed: int = 0) -> dict[str, float]:
    """Plans of fault on clusters of this machine; what leaks counts as a bad plan."""
    command = [sys.executable, "-m", "phalanx", "chaos", str(JOB), "--json"]
    command += ["--count", str(plans), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return judged(json.loads(done.stdout))


def judged(found: dict[str, Any]) -> dict[str, float]:
    """The figures of what ``phalanx chaos --json`` says."""
    if "outcomes" not in found:
        raise SystemExit(f"phalanx chaos refused: {json.dumps(found)}")
    bad = [outcome for outcome in found["outcomes"] if not outcome["good"]]
    for outcome in bad:
        print(json.dumps(outcome, indent=1))
    print(f"{len(found['outcomes'])} plans, {len(bad)} bad; left behind: {found['leaks']}")
    return {"plans": len(found["outcomes"]), "plans_bad": len(bad) + bool(found["leaks"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--live", type=int, metavar="PLANS", help="on real processes instead")
    parser.add_argument("--from-seed", type=int, default=0, help="of the first plan")
    asked = parser.parse_args()
    if asked.live:
        return report("chaos-live", live(asked.live, asked.from_seed))
    return report("chaos", simulated(asked.seeds))


if __name__ == "__main__":
    sys.exit(main())
