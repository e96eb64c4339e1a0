"""The test suite's own duration, and how many tests passed.

    python -m benchmarks.suite [--gpu [--alone]]

`--gpu` runs the tests of a CUDA device instead: files side by side, each in a process of its own;
with `--alone` those that measure time there, which have the device to themselves. What each
process printed is kept whole below runs/suite/.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proof.report import report

COUNT = re.compile(r"([\d,]+) (passed|failed|errors?|skipped)")
GPU_TESTS = Path(__file__).parent.parent / "tests" / "gpu"
LOGS = Path("runs") / "suite"
SIDE_BY_SIDE = 8  # processes that share a device: each holds a context and a small model
NOTHING_CHOSEN = 5  # pytest's exit code
SHOWN_LINES = 80


def counted(runner: str, *options: str) -> Counter[str]:
    """How many tests passed and failed in one process; its last lines are printed."""
    command = [sys.executable, "-m", runner, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == NOTHING_CHOSEN:
        return Counter()
    LOGS.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", " ".join(options[-2:])) or runner
    (LOGS / f"{name}.log").write_text(done.stdout)
    print("\n".join(done.stdout.splitlines()[-SHOWN_LINES:]), flush=True)
    lines = [line for line in done.stdout.splitlines() if COUNT.search(line)]
    if not lines:
        raise SystemExit(f"exit code {done.returncode}, and no test was counted: {options}")
    counts = {word: int(number.replace(",", "")) for number, word in COUNT.findall(lines[-1])}
    failed = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    return Counter(passed=counts.get("passed", 0), failed=failed)


def gpu_suite(*, alone: bool) -> Counter[str]:
    """The tests of a CUDA device: those that need it alone, or all others."""
    files = sorted(map(str, GPU_TESTS.glob("test_*.py")))
    chosen = "gpu and alone" if alone else "gpu and not alone"
    with ThreadPoolExecutor(1 if alone else SIDE_BY_SIDE) as pool:
        return sum(pool.map(lambda file: counted("pytest", "-m", chosen, file), files), Counter())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="the tests of a CUDA device")
    parser.add_argument("--alone", action="store_true", help="of those, what measures time there")
    asked = parser.parse_args()
    began = time.monotonic()
    counts = gpu_suite(alone=asked.alone) if asked.gpu else counted("tests.run", "--strict")
    minutes = (time.monotonic() - began) / 60
    figures = {"passed": counts["passed"], "failed": counts["failed"], "minutes": minutes}
    claim = ("gpu-tests-alone" if asked.alone else "gpu-tests") if asked.gpu else "suite"
    return report(claim, figures)


if __name__ == "__main__":
    sys.exit(main())
