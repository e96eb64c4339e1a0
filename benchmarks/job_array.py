"""An array of 10,000 jobs by the command line, against a real server with two nodes.

Timed is the whole command, the start of its process included, as a person waits for it; then `ps`
with all of them, running and pending, in the queue.

python -m benchmarks.job_array [--count 10000]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from phalanx.testing.local_cluster import TrialCluster
from proof.report import report

REPETITIONS = 5


def timed(state: Path, *words: str) -> tuple[float, str]:
    """Seconds that a command takes, and what it prints."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words[:1], "--state", str(state), *words[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"phalanx {words[0]}: {done.stderr}")
    return time.monotonic() - began, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="jobs of an array")
    options = parser.parse_args()
    submits, lists, cancels, lines = [], [], [], 0
    with (
        tempfile.TemporaryDirectory() as name,
        TrialCluster(Path(name) / "cluster", nodes=2) as cluster,
    ):
        for number in range(REPETITIONS):
            array = ("--array", f"0-{options.count - 1}", "--name", f"array-{number}")
            seconds, _ = timed(cluster.state, "submit", *array, "--", "sleep", "600")
            submits.append(seconds)
            seconds, shown = timed(cluster.state, "ps")
            lists.append(seconds)
            lines = max(lines, sum(f"array-{number}" in line for line in shown.splitlines()))
            first = next(line.split("-")[0] for line in shown.splitlines() if "array-" in line)
            cancels.append(timed(cluster.state, "cancel", "--array", first)[0])
            print(f"submit {submits[-1]:.2f} s, ps {lists[-1]:.2f} s, cancel {cancels[-1]:.2f} s")
    figures = {
        "submit_seconds": statistics.median(submits),
        "slowest_submit_seconds": max(submits),
        "list_seconds": statistics.median(lists),
        "cancel_seconds": statistics.median(cancels),
        "lines": lines,
        "jobs": options.count,
    }
    return report("job-array", figures)


if __name__ == "__main__":
    sys.exit(main())
