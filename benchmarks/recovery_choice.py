"""Ways out of failures by predicted loss, beside a fixed order of rungs, on simulated fleets.

    python -m benchmarks.recovery_choice

Every scenario is played twice with the same faults: once the core takes the way out that it
predicts to lose the least GPU time, once the first that there is of in place (unless the node
failed lately), swap, shrink and requeue. Effective time is the share of all GPU time, waiting
included, that went into steps that are kept. What a decision takes is measured on the gang of
98,304 GPUs, by a core that has played for a while and by one that was just restored.

Where replacements need ten minutes to start, the same gang is played twice more: it goes on without
them, and it waits for them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.cluster.core import Core
from phalanx.cluster.ledger.buckets import TRAINING
from phalanx.cluster.recovery.options import ways_without
from phalanx.simulate.result import SeedResult
from phalanx.simulate.runner import played, run_seed
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.scenario.scenario import Scenario
from proof.report import report

# Jobs on parts of a node have nothing to choose: they start again where they are, or elsewhere.
WHOLE_NODES = ("workload.least_gpus=8",)
FULL = ("workload.utilisation=1.2", "fleet.spare_nodes=0")
# Name, scenario, what is changed of it, seeds: at least 200 incidents each.
FLEETS = (
    ("98,304 GPUs", "100k-1t", ("days=3",), 4),
    ("98,304 GPUs, no spares", "100k-1t", ("days=3", "fleet.spare_nodes=0"), 4),
    ("2,048 GPUs, many jobs", "multi-tenant", WHOLE_NODES, 9),
    ("2,048 GPUs, more jobs than room, no spares", "multi-tenant", (*WHOLE_NODES, *FULL), 9),
)
SLOW_STARTS = ("days=1", "fleet.spares_warm=false", "restart.start_seconds=600")
SLOW_SEEDS = 2
LOST_TOGETHER = (1, 4, 32)  # nodes: one, a rack, a leaf
DECISIONS = 20  # of each size


def effective(scenario: Scenario, result: SeedResult) -> float:
    """Share of all GPU time that went into kept steps.

    Steps of a gang that has shrunk take longer: those of one job count what they would have taken.
    """
    if scenario.workload.kind == "one-job":
        return result.steps * scenario.job.step_seconds / (result.days * 86400)
    return sum(result.buckets.get(name, 0.0) for name in TRAINING)


def compared(name: str, scenario: str, changes: tuple[str, ...], seeds: int) -> dict[str, Any]:
    """One fleet under both orders."""
    asked = {
        order: load_scenario(scenario, [*changes, f"policy.order={order}"])
        for order in ("predicted", "fixed")
    }
    orders = {
        order: [run_seed(world, seed) for seed in range(seeds)] for order, world in asked.items()
    }
    shares = {
        order: [effective(asked[order], one) for one in results]
        for order, results in orders.items()
    }
    gains = [mine / other - 1 for mine, other in zip(*shares.values(), strict=True)]
    return {
        "fleet": name,
        "incidents": sum(one.interruptions for one in orders["predicted"]),
        "predicted": statistics.fmean(shares["predicted"]),
        "fixed": statistics.fmean(shares["fixed"]),
        "gain": statistics.fmean(gains),
        "worst_seed": min(gains),
        "violations": sum(one.violations for each in orders.values() for one in each),
        "rungs": {
            order: _added([one.rungs for one in results]) for order, results in orders.items()
        },
    }


def _added(tables: list[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: sum(table.get(name, 0) for table in tables) for name in names}


def going_on() -> dict[str, float]:
    """Effective time where replacements start slowly: waiting for them, and going on without."""
    shares = {}
    for way, more in (("waits", ["policy.start_wait_seconds=600"]), ("goes_on", [])):
        world = load_scenario("100k-1t", [*SLOW_STARTS, *more])
        results = [run_seed(world, seed) for seed in range(SLOW_SEEDS)]
        assert not any(one.violations for one in results)
        shares[way] = statistics.fmean(effective(world, one) for one in results)
    return shares


def decision_ms(changes: tuple[str, ...]) -> list[float]:
    """CPU milliseconds in which every way out is priced for a gang of 98,304 GPUs."""
    world = played(load_scenario("100k-1t", ["days=0.1", *changes]), seed=1)[1]
    return _decisions(world.core) + _decisions(Core.restore(world.core.snapshot()))


def _decisions(core: Core) -> list[float]:
    (job,) = (core.view.jobs[number] for number in core.view.active)
    assert job.placement is not None
    taken = []
    for count in LOST_TOGETHER:
        for turn in range(DECISIONS):
            first = turn * len(job.placement.nodes) // DECISIONS
            nodes = job.placement.nodes[first : first + count]
            began = time.process_time()
            ways = ways_without(core._ctx, job, nodes, "node_silent")
            taken.append(1e3 * (time.process_time() - began))
            assert ways
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/recovery_choice.json"))
    asked = parser.parse_args()
    rows = []
    for fleet in FLEETS:
        rows.append(compared(*fleet))
        print(json.dumps(rows[-1]), flush=True)
    slow = going_on()
    print(json.dumps(slow), flush=True)
    taken = decision_ms(()) + decision_ms(("fleet.spare_nodes=0",))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"fleets": rows, "slow_starts": slow, "decision_ms": taken}
    asked.out.write_text(json.dumps(found, indent=2) + "\n")
    figures = {
        "incidents": min(row["incidents"] for row in rows),
        "gain_mean": statistics.fmean(row["gain"] for row in rows),
        "gain_least": min(row["gain"] for row in rows),
        "slow_starts_points": 100 * (slow["goes_on"] - slow["waits"]),
        "decision_ms": max(taken),
        "violations": sum(row["violations"] for row in rows),
    }
    return report("recovery-choice", figures)


if __name__ == "__main__":
    sys.exit(main())
