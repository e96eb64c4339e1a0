"""`phalanx tune` on the demo's job from bad settings, against settings tuned by hand.

    python -m benchmarks.tune
    python -m benchmarks.tune --job examples/llama3-1b.toml --bad train.compile=off \\
        --hand train.micro_batch=4 --minutes 4 --rounds 1

The search starts from micro-batch 1, full recompute and GPipe. Then what it found, what a person
would choose and the bad settings run in turn, a trial each, several times; medians count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from proof.report import report

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
SYNTHETIC = (
    "data.source=synthetic",
    "data.path=",
    "data.validation_fraction=0",
    "train.validate_every=0",
)
BAD = ("train.micro_batch=1", "memory.recompute=full")
BAD_DEMO = ("parallel.schedule=gpipe", "data.prefetch=0")
HAND = ("train.micro_batch=4", "memory.recompute=none", "parallel.schedule=1f1b", "data.prefetch=4")
STEPS = 16


def overrides(values: tuple[str, ...]) -> list[str]:
    """Settings as options of the command line."""
    return [word for value in values for word in ("--set", value)]


def step_seconds(job: Path, values: tuple[str, ...], runs: Path) -> float:
    """Median step of a run of the job, without its first steps."""
    plain = ("checkpoint.interval=off", "checkpoint.every=0", "checkpoint.at_end=false")
    extra = (*plain, f"runs={runs}", f"train.steps={STEPS}", "train.validate_every=0")
    command = [sys.executable, "-m", "phalanx", "train", str(job), "--json"]
    command += overrides((*values, *extra, "schedule.warmup_steps=0"))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [record["step_seconds"] for record in records if record.get("kind") == "step"]
    return float(statistics.median(steps[3:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=Path, help="another job than the demo's")
    parser.add_argument("--bad", action="append", default=[], help="a bad setting more")
    parser.add_argument("--hand", action="append", help="a setting tuned by hand")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    job = options.job or DEMO
    shared = () if options.job else SYNTHETIC
    bad = (*shared, *BAD, *(options.bad if options.job else BAD_DEMO))
    hand = (*shared, *(options.hand or HAND))
    with tempfile.TemporaryDirectory() as folder:
        runs, tuned = Path(folder) / "runs", Path(folder) / "tuned.toml"
        command = [sys.executable, "-m", "phalanx", "tune", str(job), "--json"]
        command += ["--minutes", str(options.minutes), "--folder", f"{folder}/tune"]
        command += ["--write", str(tuned), *overrides(bad)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        sides = {"bad": (job, bad), "tuned": (tuned, ()), "hand": (job, hand)}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, (path, values) in sides.items():
                taken[name].append(step_seconds(path, values, runs))
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    print({name: f"{value * 1e3:.1f} ms" for name, value in seconds.items()}, found["changes"])
    figures = {
        "of_hand_tuned": seconds["hand"] / seconds["tuned"],
        "of_original": seconds["bad"] / seconds["tuned"],
        "trials": len(found["trials"]),
        "minutes": found["spent_seconds"] / 60,
    }
    return report("tune-gpu" if options.job else "tune", figures)


if __name__ == "__main__":
    sys.exit(main())
