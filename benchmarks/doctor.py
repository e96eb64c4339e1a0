"""How long ``phalanx doctor node`` takes, and how much of the checklist it decides.

python -m benchmarks.doctor
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median

from docs.generator.checklist import points
from proof.report import report

RUNS = 5


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    command = [sys.executable, "-m", "phalanx", "doctor", "node", "--json"]
    seconds, findings = [], []
    for _ in range(RUNS):
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds.append(time.monotonic() - began)
        findings = json.loads(done.stdout)["findings"]
    every = points()
    checked = sum(point.who == "node" and point.by == "checked" for point in every)
    served = sum(point.who == "tool" and point.served for point in every)
    print(f"{len(findings)} findings in {median(seconds):.2f} s (median of {RUNS})")
    figures = {"seconds": median(seconds), "checked": float(checked), "served": float(served)}
    return report("doctor", figures)


if __name__ == "__main__":
    sys.exit(main())
