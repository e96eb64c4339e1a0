"""The test suite's own duration, and how many tests passed.

python -m benchmarks.suite [-m MARK] [PATH …]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time

from proof.report import report

COUNT = re.compile(r"([\d,]+) (passed|failed|errors?|skipped)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", dest="mark", help="tests with this mark instead of the usual ones")
    parser.add_argument("paths", nargs="*")
    asked = parser.parse_args()
    runner = "pytest" if asked.paths else "tests.run"  # all of them, files side by side
    command = [sys.executable, "-m", runner, *asked.paths]
    command += ["-m", asked.mark] if asked.mark else []
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    minutes = (time.monotonic() - began) / 60
    print("\n".join(done.stdout.splitlines()[-30:]))
    lines = [line for line in done.stdout.splitlines() if COUNT.search(line)]
    if not lines:
        raise SystemExit(f"exit code {done.returncode}, and no test was counted")
    counts = {word: int(number.replace(",", "")) for number, word in COUNT.findall(lines[-1])}
    failed = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    figures = {"passed": counts.get("passed", 0), "failed": failed, "minutes": minutes}
    return report("gpu-tests" if asked.mark == "gpu" else "suite", figures)


if __name__ == "__main__":
    sys.exit(main())
