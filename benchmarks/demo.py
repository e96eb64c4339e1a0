"""The demo as a newcomer runs it: how long it takes, and whether kills change its curve.

python -m benchmarks.demo
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from proof.report import report


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    began = time.monotonic()
    command = [sys.executable, "-m", "phalanx", "demo", "--json", "--no-keep"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    records = [json.loads(line) for line in done.stdout.splitlines()]
    outcomes = [record for record in records if record.get("kind") == "recovery"]
    if not outcomes:
        raise SystemExit(f"exit code {done.returncode}: {done.stderr}")
    (outcome,) = outcomes
    worker, node = outcome["incidents"]
    print(f"worker {worker['resumed']:.2f} s, node {node['resumed']:.2f} s, in all {seconds:.0f} s")
    figures = {
        "identical": float(outcome["identical"]),
        "worker_seconds": worker["resumed"],
        "node_seconds": node["resumed"],
        "seconds": seconds,
    }
    return report("demo", figures)


if __name__ == "__main__":
    sys.exit(main())
