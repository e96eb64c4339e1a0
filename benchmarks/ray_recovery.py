"""From harm to the next committed step on a Ray of several nodes on this machine.

    python -m benchmarks.ray_recovery

Needs root: Ray binds to the machine's addresses, so it runs in a network of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from proof.report import report
from tests.control.backends.test_ray import play
from tests.control.jobs import write_job

STEPS = 300


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-ray-", ignore_cleanup_errors=True) as name:
        root = Path(name)
        found = play("chaos", root, str(write_job(root, "disturbed", STEPS)))
    for faults, seconds in found["seconds"].items():
        print(f"{faults}: {seconds:.2f} s")
    return report("ray", found["seconds"])


if __name__ == "__main__":
    sys.exit(main())
