"""Speed of the planner: mappings evaluated in a second, and the time of every preset's search.

python -m benchmarks.plan            # medians of five, in CPU time: other load does not count
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from phalanx.config import PRESETS, ConfigError
from phalanx.plan import Pins, PlanQuestion, PlanRequest, calibrate, propose, search, understand
from proof.report import report

CLUSTERS = ("h100-64", "a100-512", "h100-1k", "h100-16k", "gb200-4608", "h100-100k")
ROUNDS = 5
RUNS = Path(__file__).parent.parent / "phalanx" / "plan" / "data" / "published_runs.csv"


def seconds_of_search(question: PlanQuestion) -> float:
    """Median time from a question to its plan."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        propose(question)
        found.append(time.process_time() - began)
    return statistics.median(found)


def held_out() -> dict[str, float]:
    """Errors of step times, each project predicted by constants that were fitted without it."""
    calibration = calibrate(RUNS)
    left_out = calibration.left_out
    figures = {"rows": sum(errors["n"] for errors in left_out.values())}
    for kind in ("dense", "moe"):
        found = [errors for name, errors in left_out.items() if name.endswith(f":{kind}")]
        runs = sum(errors["n"] for errors in found)
        figures[f"{kind}_error"] = sum(e["mape"] * e["n"] for e in found) / runs
        print(f"{kind} runs of projects left out: {figures[f'{kind}_error']:.1%} of {runs:.0f}")
        unseen = calibration.unseen[kind]
        figures[f"unnamed_{kind}_error"] = unseen["mape"]
        figures[f"unnamed_{kind}_covered"] = unseen["coverage80"]
        print(f"  unnamed too: {unseen['mape']:.1%}, {unseen['coverage80']:.0%} in the interval")
    for name, ordering in (("", calibration.ordering), (", unnamed", calibration.unseen_ordering)):
        assert ordering is not None
        figures["pairs_in_order"] = min(ordering.right, figures.get("pairs_in_order", 1.0))
        figures["regret"] = max(ordering.regret, figures.get("regret", 0.0))
        print(
            f"order of measured mappings{name}: {ordering.right:.0%} of {ordering.pairs} pairs, "
            f"regret {ordering.regret:.1%}"
        )
    memory = calibration.unseen_memory
    assert memory is not None
    figures["false_oom"] = memory.false_oom / memory.ran
    print(f"  unnamed: {figures['false_oom']:.1%} of {memory.ran} runs that ran do not fit")
    return figures


def main() -> int:
    """Print both tables, then what projects that a fit has not seen are predicted to take."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    figures: dict[str, float] = {}
    for model, on in (("llama3-70b", "h100-1k"), ("llama3-405b", "h100-16k")):
        question = understand(PlanRequest(model=model, cluster=on, tokens="1T", offload="none"))
        rates = []
        for _ in range(ROUNDS):
            began = time.process_time()
            result = search(
                question.workload, question.cluster, pins=Pins(**question.pins), exhaustive=True
            )
            rates.append(result.considered / (time.process_time() - began))
        rate = statistics.median(rates)
        print(f"{model} on {on}, every mapping evaluated: {rate:,.0f} a second")
        figures["mappings_per_second"] = min(rate, figures.get("mappings_per_second", rate))
    slowest = 0.0
    for model in PRESETS:
        for on in CLUSTERS:
            try:
                seconds = seconds_of_search(
                    understand(PlanRequest(model=model, cluster=on, tokens="1T"))
                )
            except ConfigError as error:
                print(f"{model:18} {on:11} {error.problems[0].rule[:60]}")
                continue
            slowest = max(slowest, seconds)
            print(f"{model:18} {on:11} {seconds:.2f} s")
    print(f"slowest search: {slowest:.2f} s")
    figures["slowest_seconds"] = slowest
    figures |= held_out()
    return report("plan", figures)


if __name__ == "__main__":
    sys.exit(main())
