"""From a kill to the next committed step at full size, beside torchrun and torchft.

    python -m benchmarks.recovery [--times 10] [--peers] [--device cuda] [--only PARTS] [--json]

On CPU: four workers, two pipeline stages on two replicas each, one node a worker, spares for the
nodes that are killed. ``stopped`` is a rank under SIGSTOP: from the signal to the log's fact that
names it, beside the deadline that was derived. ``snapshots`` is what a snapshot of every step
costs: its part of the step as the trainer measures it, and medians of whole steps with and without,
of jobs that take turns on one cluster; once with short steps, once with those of the demo.

On CUDA: one worker on one GPU. Its process is killed, and one that stands by with a context made
goes on from shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.recovery_peers import torchft, torchrun
from phalanx.cluster.job import Expected
from phalanx.cluster.policy import TimeoutPolicy
from phalanx.cluster.timeouts import derive
from phalanx.control.stage import Commits, Stage
from phalanx.train import StepRecord, read_records

HANG_NS = 2_000_000_000  # the least; what is derived from the step is shown
POLICY = f"[spares]\nnodes = {{spares}}\n[timeouts]\nleast_hang_ns = {HANG_NS}\n"
JOB = """
name = "{name}"
runs = "runs"

[model]
{model}

[data]
sequence = {sequence}

[parallel]
{parallel}

[precision]
compute = "{compute}"

[schedule]
kind = "constant"
warmup_steps = 2

[train]
steps = {steps}
global_batch = {batch}
micro_batch = {micro_batch}
device = "{device}"
deterministic = true

[checkpoint]
{checkpoint}

[log]
every = 1
tensorboard = false
communication_every = 0
"""
CPU = {
    "model": 'preset = "tiny"',
    "sequence": "128",
    "batch": "8",
    "micro_batch": "2",
    "parallel": "data = 2\npipeline = 2",
    "compute": "float32",
    "device": "cpu",
}
# As examples/demo.toml has it: the same model and mesh, a longer step.
DEMO = {**CPU, "sequence": "256", "batch": "16", "micro_batch": "4"}
CUDA = {
    "model": 'preset = "tiny"\ndim = 1024\nlayers = 12\nffn = 4096\nvocab = 32000',
    "sequence": "1024",
    "batch": "8",
    "micro_batch": "2",
    "parallel": "data = 1",
    "compute": "bfloat16",
    "device": "cuda",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="kills of each kind")
    parser.add_argument("--peers", action="store_true", help="torchrun and torchft too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="some of the parts, with commas")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    with tempfile.TemporaryDirectory(
        prefix="phalanx-recovery-", ignore_cleanup_errors=True
    ) as folder:
        root = Path(folder)
        bench = Bench(root, CUDA if cuda else CPU, 1 if cuda else 4)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "snapshots": bench.snapshot_cost,
            "worker": lambda: bench.kills(options.times, "worker"),
        }
        if not cuda:
            parts["snapshots-demo"] = Bench(root / "demo", DEMO, 4).snapshot_cost
            parts["node"] = lambda: bench.kills(max(1, options.times // 3), "node")
            parts["stopped"] = lambda: bench.stops(max(1, options.times // 5))
        if options.peers:
            job = bench.job
            parts["torchrun"] = lambda: torchrun(root / "torchrun", job, bench.world, options.times)
            parts["torchft"] = lambda: torchft(root / "torchft", max(1, options.times // 3))
        if options.only:
            parts = {name: parts[name] for name in options.only.split(",")}
        results: dict[str, dict[str, Any]] = {}
        for name, measure in parts.items():
            load = os.getloadavg()[0]
            results[name] = {**measure(), "load": load}
            if not options.json:
                show(name, results[name])
    if options.json:
        print(json.dumps(results, indent=2))
    elif {"torchrun", "worker"} <= results.keys():
        ratio = median(results["torchrun"]) / median(results["worker"])
        print(f"torchrun takes {ratio:.1f} times as long as a killed worker here")


class Bench:
    """Jobs of one kind on stages of their own."""

    def __init__(self, root: Path, kind: dict[str, str], world: int) -> None:
        self.root, self.kind, self.world = root, kind, world

    def job(self, folder: Path, name: str, steps: int, checkpoint: str = "every = 0") -> Path:
        """A job file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.toml"
        path.write_text(JOB.format(name=name, steps=steps, checkpoint=checkpoint, **self.kind))
        return path

    def stage(self, folder: Path, spares: int = 0) -> Stage:
        policy = POLICY.format(spares=spares)
        return Stage(folder, nodes=self.world, spares=spares, policy=policy)

    def kills(self, times: int, what: str) -> dict[str, Any]:
        """Seconds from each SIGKILL to the next committed step, and the steps made again."""
        seconds, again, detected = [], [], []
        folder = self.root / what
        with self.stage(folder, 0 if what == "worker" else times) as stage:
            job = stage.submit(str(self.job(folder, "killed", 10**6)))
            commits = stage.commits(job, self.world)
            for number in range(times):
                settle(stage, commits, job, 3)
                generation, before = stage.job(job)["generation"], commits.newest()
                assert before is not None
                slot, since = number % self.world, time.time_ns()
                if what == "worker":
                    at = stage.signal_worker(slot, job, signal.SIGKILL)
                else:
                    at = stage.kill_node(stage.node_of(slot, job))
                after = recovered(stage, commits, generation)
                seconds.append(after.at - at)
                again.append(max(0, before.step - (after.step - 1)))
                detected.append(first_fact(stage, job, since, ("WorkerExited", "NodeSilent")))
            step = step_seconds(folder / "runs" / "killed" / f"job-{job}")
        return {
            "seconds": seconds,
            "steps_again": again,
            "step_seconds": step,
            "detected": detected,
        }

    def stops(self, times: int) -> dict[str, Any]:
        """Seconds until a stopped rank is named, and until the gang makes steps again."""
        seconds, detected, deadlines = [], [], []
        folder = self.root / "stopped"
        with self.stage(folder) as stage:
            job = stage.submit(str(self.job(folder, "stopped", 10**6)))
            commits = stage.commits(job, self.world)
            for number in range(times):
                settle(stage, commits, job, 3)
                generation, since = stage.job(job)["generation"], time.time_ns()
                measured = int(stage.job(job)["step_seconds"] * 1e9)
                deadline = derive(TimeoutPolicy(least_hang_ns=HANG_NS), Expected(), measured)
                at = stage.signal_worker(number % self.world, job, signal.SIGSTOP)
                seconds.append(recovered(stage, commits, generation).at - at)
                detected.append(first_fact(stage, job, since, ("NoProgress",)))
                deadlines.append(deadline.hang_ns / 1e9)
        return {"seconds": seconds, "detected": detected, "deadline": max(deadlines)}

    def snapshot_cost(self, steps: int = 40, rounds: int = 3) -> dict[str, Any]:
        """Jobs with a snapshot of every step, replicated where there is a neighbour, and without.

        They take turns on one cluster, so that both meet the same machine.
        """
        folder = self.root / "cost"
        never = f'interval = "off"\nmemory_every = {10**9}'
        found: dict[str, list[StepRecord]] = {"every-step": [], "never": []}
        with self.stage(folder) as stage:
            for _ in range(rounds):
                for name, checkpoint in (("every-step", "every = 0"), ("never", never)):
                    job = stage.submit(str(self.job(folder, name, steps, checkpoint)))
                    stage.wait_ended(job, 300)
                    found[name] += steps_of(folder / "runs" / name / f"job-{job}")
        times = {
            name: statistics.median(record.step_seconds for record in records)
            for name, records in found.items()
        }
        stalls = [record.parts.snapshot or 0.0 for record in found["every-step"]]
        return {
            "stall_seconds": statistics.median(stalls),
            "step_seconds": times["every-step"],
            "step_seconds_without": times["never"],
        }


def recovered(stage: Stage, commits: Commits, generation: int) -> Any:
    """The first step that a later generation made and committed."""
    stage.wait(lambda: commits.first_after(generation), "recovery", 120)
    return commits.first_after(generation)


def settle(stage: Stage, commits: Commits, job: int, steps: int) -> None:
    """Until a generation has made a few steps of its own."""
    stage.wait(lambda: stage.job(job)["state"] == "running", "the job to run")
    generation = stage.job(job)["generation"]
    stage.wait(lambda: commits.first_after(generation - 1), "steps")
    first = commits.first_after(generation - 1)
    assert first is not None
    stage.wait(lambda: (new := commits.newest()) and new.step >= first.step + steps, "steps")


def first_fact(stage: Stage, job: int, since_ns: int, kinds: tuple[str, ...]) -> float:
    """Seconds from a moment to the first fact of these kinds in the log."""
    events = stage.get("/v1/events?limit=200")["events"]
    found = [e["time_ns"] for e in events if e["kind"] in kinds and e["time_ns"] >= since_ns]
    return (min(found) - since_ns) / 1e9 if found else float("nan")


def steps_of(folder: Path) -> list[StepRecord]:
    return list(read_records(folder / "metrics" / "steps.jsonl", StepRecord))[5:]


def step_seconds(folder: Path) -> float:
    return statistics.median(record.step_seconds for record in steps_of(folder))


def median(found: dict[str, Any]) -> float:
    return statistics.median(found["seconds"]) if found.get("seconds") else float("nan")


def show(name: str, found: dict[str, Any]) -> None:
    if "skipped" in found:
        text = f"skipped: {found['skipped']}"
    elif name.startswith("snapshots"):
        stall, step = found["stall_seconds"], found["step_seconds"]
        text = f"stall {1e3 * stall:.2f} ms, {100 * stall / step:.1f} % of a step; steps take "
        without = found["step_seconds_without"]
        text += f"{1e3 * step:.1f} ms, without them {1e3 * without:.1f} ms: {step / without:.3f}"
    else:
        seconds = found["seconds"]
        text = f"median {median(found):.2f} s, worst {max(seconds):.2f} s of {len(seconds)}"
        if "detected" in found:
            text += f"; detected after {statistics.median(found['detected']):.2f} s"
            text += f" (worst {max(found['detected']):.2f})"
        if "deadline" in found:
            text += f", derived deadline {found['deadline']:.2f} s"
        if "steps_again" in found:
            text += f"; committed steps made again: {max(found['steps_again'])}"
            text += f"; a step takes {1e3 * found['step_seconds']:.0f} ms"
    print(f"{name:14} (load {found['load']:.1f}): {text}", flush=True)


if __name__ == "__main__":
    main()
