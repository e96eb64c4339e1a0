"""From a kill to the next committed step at full size, beside torchrun on the same model.

    python -m benchmarks.recovery [--times 10] [--peers] [--json]

Four workers, two pipeline stages on two replicas each, one node a worker and one spare node.
``snapshots`` is what a snapshot of every step costs: its part of the step as the trainer measures
it, and the medians of whole steps with and without.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.control.stage import Commits, Stage
from phalanx.train import StepRecord, read_records

WORLD = 4
JOB = """
name = "{name}"
runs = "runs"

[model]
preset = "tiny"

[data]
sequence = 128

[parallel]
data = 2
pipeline = 2

[precision]
compute = "float32"

[schedule]
warmup_steps = 2

[train]
steps = {steps}
global_batch = 8
micro_batch = 2
device = "{device}"
deterministic = true

[checkpoint]
{checkpoint}

[log]
every = 1
tensorboard = false
communication_every = 0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="kills of each kind")
    parser.add_argument("--peers", action="store_true", help="torchrun too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(
        prefix="phalanx-recovery-", ignore_cleanup_errors=True
    ) as folder:
        root = Path(folder)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "worker": lambda: kills(root / "worker", options.times, "worker"),
            "node": lambda: kills(root / "node", max(1, options.times // 3), "node"),
            "snapshots": lambda: snapshot_cost(root / "cost"),
        }
        if options.peers:
            parts["torchrun"] = lambda: torchrun(root / "torchrun", options.times)
        results: dict[str, dict[str, Any]] = {}
        for name, measure in parts.items():
            load = os.getloadavg()[0]
            results[name] = {**measure(), "load": load}
            if not options.json:
                show(name, results[name])
    if options.json:
        print(json.dumps(results, indent=2))


def write_job(root: Path, name: str, steps: int, checkpoint: str = "every = 0") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"{name}.toml"
    path.write_text(JOB.format(name=name, steps=steps, device="cpu", checkpoint=checkpoint))
    return path


def kills(root: Path, times: int, what: str) -> dict[str, Any]:
    """Seconds from each SIGKILL to the next committed step, and the steps made again."""
    seconds, again = [], []
    spares = 0 if what == "worker" else times
    with Stage(root, nodes=WORLD, spares=spares) as stage:
        job = stage.submit(str(write_job(root, "killed", 10**6)))
        commits = stage.commits(job, WORLD)
        for number in range(times):
            settle(stage, commits, job, 3)
            generation, before = stage.job(job)["generation"], commits.newest()
            assert before is not None
            slot = number % WORLD
            if what == "worker":
                at = stage.signal_worker(slot, job, signal.SIGKILL)
            else:
                at = stage.kill_node(stage.node_of(slot, job))
            stage.wait(lambda g=generation: commits.first_after(g), "recovery", 60)  # type: ignore[misc]
            after = commits.first_after(generation)
            assert after is not None
            seconds.append(after.at - at)
            again.append(max(0, before.step - (after.step - 1)))
        folder = root / "runs" / "killed" / f"job-{job}"
        step = step_seconds(folder)
    return {"seconds": seconds, "steps_again": again, "step_seconds": step}


def settle(stage: Stage, commits: Commits, job: int, steps: int) -> None:
    """Until a generation has made a few steps of its own."""
    stage.wait(lambda: stage.job(job)["state"] == "running", "the job to run")
    generation = stage.job(job)["generation"]
    stage.wait(lambda: commits.first_after(generation - 1), "steps")
    first = commits.first_after(generation - 1)
    assert first is not None
    stage.wait(lambda: (new := commits.newest()) and new.step >= first.step + steps, "steps")


def step_seconds(folder: Path) -> float:
    records = list(read_records(folder / "metrics" / "steps.jsonl", StepRecord))
    return statistics.median(record.step_seconds for record in records)


def snapshot_cost(root: Path, steps: int = 60) -> dict[str, Any]:
    """Steps with a replicated snapshot each, and the same job without any."""
    with Stage(root, nodes=WORLD) as stage:
        job = stage.submit(str(write_job(root, "every-step", steps)))
        stage.wait_ended(job, 300)
    folder = root / "runs" / "every-step" / f"job-{job}"
    records = list(read_records(folder / "metrics" / "steps.jsonl", StepRecord))[5:]
    stalls = [record.parts.snapshot or 0.0 for record in records]
    plain = write_job(root, "plain", steps, 'every = 0\nmode = "sync"')
    command = [sys.executable, "-m", "phalanx", "train", str(plain)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (other,) = (root / "runs" / "plain").iterdir()
    without = list(read_records(other / "metrics" / "steps.jsonl", StepRecord))[5:]
    return {
        "stall_seconds": statistics.median(stalls),
        "step_seconds": statistics.median(record.step_seconds for record in records),
        "step_seconds_without": statistics.median(record.step_seconds for record in without),
    }


def torchrun(root: Path, times: int) -> dict[str, Any]:
    """Kills of a rank under torchrun, which restarts all and reads the last checkpoint."""
    job = write_job(
        root, "torchrun", 10**6, 'every = 1\nkeep = 2\nresume = "auto"\nkeeper_lease = 3.0'
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
    command += ["--max-restarts", str(times), "--monitor-interval", "0.1"]
    command += ["-m", "phalanx.train.worker", str(job)]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    seconds, known = [], []
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for _ in range(times):
            known = wait_for_checkpoint(root, process, known)
            time.sleep(1.0)
            at = time.monotonic()
            os.kill(rank_pid(process.pid), signal.SIGKILL)
            known = wait_for_checkpoint(root, process, known)
            seconds.append(time.monotonic() - at)
            known = known[:-1]  # the next kill is of the run that is there now
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {"seconds": seconds}


def wait_for_checkpoint(
    root: Path, process: subprocess.Popen[bytes], known: list[Path]
) -> list[Path]:
    """Until a run that was not known has completed a checkpoint of its own; all runs then."""
    deadline = time.monotonic() + 120
    while True:
        found = sorted((root / "runs" / "torchrun").glob("*"))
        new = [run for run in found if run not in known]
        if any(list(run.glob("checkpoints/step-*/manifest.json")) for run in new):
            return found
        if time.monotonic() > deadline or process.poll() is not None:
            raise TimeoutError((root / "log").read_text()[-3000:])
        time.sleep(0.02)


def rank_pid(parent: int) -> int:
    """The last rank's process."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[-1])


def show(name: str, found: dict[str, Any]) -> None:
    if name == "snapshots":
        stall, step = found["stall_seconds"], found["step_seconds"]
        text = f"stall {1e3 * stall:.1f} ms, {100 * stall / step:.1f} % of a step; steps take "
        text += f"{1e3 * step:.0f} ms, without them {1e3 * found['step_seconds_without']:.0f} ms"
    else:
        seconds = found["seconds"]
        text = f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s "
        text += f"of {len(seconds)} kills"
        if "steps_again" in found:
            text += f"; committed steps made again: {max(found['steps_again'])}"
            text += f"; a step takes {1e3 * found['step_seconds']:.0f} ms"
    print(f"{name:9} (load {found['load']:.1f}): {text}", flush=True)


if __name__ == "__main__":
    main()
