"""Sweeps: successive halving against the whole grid for real, and 10,000 trials through the core.

27 learning rates and weight decays of a tiny model on two CPU nodes: by successive halving, whose
driver is killed at random moments, and then all of them to the end. Time is what trials held ranks
for. The simulated sweep runs on a fleet of 512 GPUs that fail, with a played loss.

python -m benchmarks.sweep [--trials 10000]
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import msgspec

from phalanx.control.client.client import Client
from phalanx.control.client.sweep_run import ranked, sweep_trials
from phalanx.control.wire.api_types import SweepList, TrialOut
from phalanx.data import ShardWriter
from phalanx.plan.sweeps.machine import rung_shape
from phalanx.simulate.scenario.scenario import FleetPart, Scenario
from phalanx.simulate.sweep import PlayedSweep, play_sweep
from phalanx.testing.local_cluster import TrialCluster
from proof.report import report

CORPUS_BYTES = 2_000_000
STEPS, FIRST_STEPS, REDUCTION = 1620, 180, 3
KILL_SECONDS = (4.0, 20.0)

JOB = """
name = "sweep"
[model]
dim = 48
layers = 2
heads = 2
ffn = 128
vocab = 256
[data]
source = "shards"
path = "corpus"
sequence = 64
validation_fraction = 0.02
[precision]
compute = "float32"
[schedule]
warmup_steps = 20
[train]
steps = {steps}
global_batch = 8
micro_batch = 8
device = "cpu"
validate_every = {first}
validate_samples = 64
compare_every = 0
[checkpoint]
interval = "off"
memory_every = 1000000
[log]
every = 20
tensorboard = false
"""
SWEEP = """
name = "{name}"
job = "job.toml"
metric = "validation_loss"
at_once = 2
ranks = 1
[method]
kind = "{kind}"
trials = 27
{more}
[parameters."optimizer.learning_rate"]
log_range = [5e-4, 5e-2]
[parameters."optimizer.weight_decay"]
range = [0.0, 0.5]
"""


def write_corpus(folder: Path) -> None:
    """Bytes of the standard library as tokens."""
    with ShardWriter(folder, 256, 0) as writer:
        left = CORPUS_BYTES
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text = path.read_bytes()[:left]
            writer.write(list(text))
            writer.end_document()
            left -= len(text)
            if left <= 0:
                break
        writer.finish()


def prepare(root: Path, steps: int, first: int) -> None:
    """The job, its corpus, and a sweep of either kind."""
    write_corpus(root / "corpus")
    (root / "job.toml").write_text(JOB.format(steps=steps, first=first))
    (root / "all.toml").write_text(SWEEP.format(name="all", kind="sobol", more=""))
    rungs = f"first_steps = {first}\nreduction = {REDUCTION}"
    (root / "halving.toml").write_text(SWEEP.format(name="halving", kind="asha", more=rungs))


def run_sweep(root: Path, state: Path, name: str, draws: random.Random | None = None) -> int:
    """Run a sweep to its end; with draws it is killed again and again. How often."""
    kills = 0
    command = [sys.executable, "-m", "phalanx", "sweep", "run", f"{name}.toml"]
    while True:
        driver = subprocess.Popen(
            [*command, "--state", str(state)], cwd=root, stdout=subprocess.DEVNULL
        )
        try:
            code = driver.wait(draws.uniform(*KILL_SECONDS) if draws is not None else None)
        except subprocess.TimeoutExpired:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            kills += 1
            continue
        if code:
            raise SystemExit(f"the sweep {name} ended with {code}")
        return kills


def trials_of(client: Client, name: str) -> list[TrialOut]:
    """All jobs of a sweep."""
    (key,) = (
        each.sweep
        for each in client.get("/v1/sweeps", SweepList).sweeps
        if each.sweep.startswith(f"{name}.")
    )
    return sweep_trials(client, key)


def rank_seconds(trials: list[TrialOut]) -> float:
    """What jobs held ranks for."""
    return sum(each.ran_seconds * each.ranks for each in trials)


def real_sweep(root: Path, steps: int, first: int, seed: int) -> dict[str, float]:
    """Both sweeps on a cluster of two nodes."""
    prepare(root, steps, first)
    with TrialCluster(root / "cluster", nodes=2) as cluster:
        began = time.monotonic()
        kills = run_sweep(root, cluster.state, "halving", random.Random(seed))
        print(f"halving: {time.monotonic() - began:.0f} s, {kills} kills", flush=True)
        run_sweep(root, cluster.state, "all")
        print(f"both: {time.monotonic() - began:.0f} s", flush=True)
        halving = trials_of(cluster.client, "halving")
        grid = trials_of(cluster.client, "all")
    best, wanted = next(ranked(halving, "lower")), next(ranked(grid, "lower"))
    assert best.value is not None and wanted.value is not None
    for name, each in (("halving", best), ("all", wanted)):
        print(f"{name}: {msgspec.json.encode(each.settings).decode()} {each.value:.4f}")
    twice = len(halving) - len({(each.trial, each.rung) for each in halving})
    return {
        "loss_above_best": best.value / wanted.value - 1,
        "time_share": rank_seconds(halving) / rank_seconds(grid),
        "step_share": sum(_steps(each) for each in halving) / (steps * len(grid)),
        "kills": kills,
        "twice": twice,
    }


def _steps(trial: TrialOut) -> float:
    """Steps that a trial's job made itself."""
    return trial.steps - (trial.steps // REDUCTION if trial.rung else 0)


def simulated_sweep(trials: int, seed: int) -> dict[str, float]:
    """A large sweep through the core."""
    draws = random.Random(seed)
    quality = [draws.random() for _ in range(trials)]
    noise = [draws.gauss(0.0, 0.02) for _ in range(trials)]

    def loss(trial: int, steps: int) -> float:
        return 2.0 + quality[trial] + (3.0 + 10 * noise[trial]) / math.sqrt(steps)

    shape = rung_shape(trials, 100, 2700, 3)
    scenario = Scenario(fleet=FleetPart(gpus=512), days=1.0)
    began = time.process_time()
    made = play_sweep(scenario, seed, PlayedSweep(trials=trials, shape=shape, at_once=512), loss)
    seconds = time.process_time() - began
    best = min(loss(trial, 2700) for trial in range(trials))
    whole = trials * 2700 / 3600
    print(
        f"simulated: {made.jobs} jobs, {made.events} events, {seconds:.1f} s of CPU, "
        f"{made.hours:.1f} h, {made.gpu_hours:.0f} of {whole:.0f} GPU-hours, rungs {made.counts}"
    )
    return {
        "simulated_trials": made.counts[0],
        "simulated_cpu_seconds": seconds,
        "simulated_above_best": made.best_loss / best - 1,
        "simulated_violations": len(made.violations),
        "simulated_wrong_rungs": sum(
            a != b for a, b in zip(made.counts, shape.trials, strict=True)
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000, help="of the simulated sweep")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a real trial")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    figures = simulated_sweep(options.trials, options.seed)
    with tempfile.TemporaryDirectory() as name:
        first = FIRST_STEPS * options.steps // STEPS
        figures |= real_sweep(Path(name), options.steps, first, options.seed)
    return report("sweep", figures)


if __name__ == "__main__":
    sys.exit(main())
