"""Speed of the planner: mappings evaluated in a second, and the time of every preset's search.

python -m benchmarks.plan            # medians of five, in CPU time: other load does not count
"""

from __future__ import annotations

import argparse
import statistics
import time

from phalanx.config import PRESETS, ConfigError
from phalanx.plan import Pins, Question, Request, propose, search, understand

CLUSTERS = ("h100-64", "a100-512", "h100-1k", "h100-16k", "gb200-4608", "h100-100k")
ROUNDS = 5


def seconds_of_search(question: Question) -> float:
    """Median time from a question to its plan."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        propose(question)
        found.append(time.process_time() - began)
    return statistics.median(found)


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for model, on in (("llama3-70b", "h100-1k"), ("llama3-405b", "h100-16k")):
        question = understand(Request(model=model, cluster=on, tokens="1T", offload="none"))
        rates = []
        for _ in range(ROUNDS):
            began = time.process_time()
            result = search(
                question.workload, question.cluster, pins=Pins(**question.pins), exhaustive=True
            )
            rates.append(result.considered / (time.process_time() - began))
        rate = statistics.median(rates)
        print(f"{model} on {on}, every mapping evaluated: {rate:,.0f} a second")
    slowest = 0.0
    for model in PRESETS:
        for on in CLUSTERS:
            try:
                seconds = seconds_of_search(
                    understand(Request(model=model, cluster=on, tokens="1T"))
                )
            except ConfigError as error:
                print(f"{model:18} {on:11} {error.problems[0].rule[:60]}")
                continue
            slowest = max(slowest, seconds)
            print(f"{model:18} {on:11} {seconds:.2f} s")
    print(f"slowest search: {slowest:.2f} s")


if __name__ == "__main__":
    main()
