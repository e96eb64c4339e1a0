"""From a kill to the next committed step at full size, beside torchrun and torchft.

    python -m benchmarks.recovery [--times 10] [--peers] [--device cuda] [--only PARTS] [--json]

On CPU: four workers, two pipeline stages on two replicas each, one node a worker. Each fault
(worker, node, keeper, agent, controller, zygote: SIGKILL; stopped: SIGSTOP of a worker) is done
``--times`` times to one job, slot after slot; what was killed is started again a second later, so a
node that was replaced becomes the next one's spare. ``detected`` is when the log knew.

``snapshots`` is what a snapshot of every step costs: its part of the step as the trainer measures
it, and medians of whole steps with and without, of jobs that take turns on one cluster; once with
short steps, once with those of the demo.

On CUDA: one worker on one GPU. Its process is killed, and one that stands by with a context made
goes on from shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recovery_kinds import HEALTH, KINDS, Target, summary
from benchmarks.recovery_peers import torchft, torchrun
from phalanx.cluster.jobs.job import Expected
from phalanx.cluster.policy import TimeoutPolicy
from phalanx.cluster.protocol.timeouts import derive
from phalanx.testing.local_cluster import TrialCluster
from phalanx.train import StepRecord, read_records
from proof.report import FIGURES_VARIABLE, report

HANG_NS = 2_000_000_000  # the least; what is derived from the step is shown
POLICY = f"[spares]\nnodes = {{spares}}\n[timeouts]\nleast_hang_ns = {HANG_NS}\n{HEALTH}"
TAKES_NODES = ("node", "zygote")  # kinds of fault that a spare answers
SPARES = 2
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


def main() -> int:
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
            "worker": lambda: bench.applied(options.times, "worker"),
        }
        if not cuda:
            parts["snapshots-demo"] = Bench(root / "demo", DEMO, 4).snapshot_cost
            parts |= {kind: partial(bench.applied, options.times, kind) for kind in KINDS}
        if options.peers:
            job = bench.job
            parts["torchrun"] = lambda: torchrun(root / "torchrun", job, bench.world, options.times)
            parts["torchft"] = lambda: torchft(root / "torchft", options.times)
        if options.only:
            parts = {name: parts[name] for name in options.only.split(",")}
        results: dict[str, dict[str, Any]] = {}
        for name, measure in parts.items():
            load = os.getloadavg()[0]
            results[name] = {**measure(), "load": load}
            if not options.json:
                show(name, results[name])
    if options.json:
        print(json.dumps({**results, "figures": figures(results)}, indent=2))
        return 0
    return report(claim_of(set(results), cuda), judged(figures(results), options.times))


def judged(found: dict[str, float], times: int) -> dict[str, float]:
    """Figures to hold against the bars; a count of kills is none where all were recovered from."""
    if os.environ.get(FIGURES_VARIABLE):
        return found
    return {n: v for n, v in found.items() if not (n.endswith("_recovered") and v >= times)}


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

    def cluster(self, folder: Path, spares: int = 0) -> TrialCluster:
        policy = POLICY.format(spares=spares)
        return TrialCluster(folder, nodes=self.world, spares=spares, policy=policy)

    def applied(self, times: int, kind: str) -> dict[str, Any]:
        """The same fault again and again to one job: seconds to its next committed step."""
        folder = self.root / kind
        with self.cluster(folder, SPARES if kind in TAKES_NODES else 0) as cluster:
            job = cluster.submit(str(self.job(folder, "harmed", 10**6)))
            target = Target(cluster, job, self.world)
            found = [target.strike(kind, number % self.world) for number in range(times)]
            measured = int(cluster.job(job)["step_seconds"] * 1e9)
            step = step_seconds(folder / "runs" / "harmed" / f"job-{job}")
        result = {**summary(found), "step_seconds": step}
        if kind == "stopped":
            deadline = derive(TimeoutPolicy(least_hang_ns=HANG_NS), Expected(), measured)
            result["deadline"] = deadline.hang_ns / 1e9
        return result

    def snapshot_cost(self, steps: int = 40, rounds: int = 3) -> dict[str, Any]:
        """Jobs with a snapshot of every step, replicated where there is a neighbour, and without.

        They take turns on one cluster, so that both meet the same machine.
        """
        folder = self.root / "cost"
        never = f'interval = "off"\nmemory_every = {10**9}'
        found: dict[str, list[StepRecord]] = {"every-step": [], "never": []}
        with self.cluster(folder) as cluster:
            for _ in range(rounds):
                for name, checkpoint in (("every-step", "every = 0"), ("never", never)):
                    job = cluster.submit(str(self.job(folder, name, steps, checkpoint)))
                    cluster.wait_ended(job, 300)
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


def steps_of(folder: Path) -> list[StepRecord]:
    return list(read_records(folder / "metrics" / "steps.jsonl", StepRecord))[5:]


def step_seconds(folder: Path) -> float:
    return statistics.median(record.step_seconds for record in steps_of(folder))


def median(found: dict[str, Any]) -> float:
    return statistics.median(found["seconds"]) if found.get("seconds") else float("nan")


def figures(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What was measured, as flat names: ``worker_median``, ``node_worst``, ``keeper_recovered``."""
    told = ("recovered", "median", "worst", "detected", "steps_again")
    flat: dict[str, float] = {
        f"{kind}_{name}": found[name]
        for kind, found in results.items()
        if kind in KINDS
        for name in told
        if found[name] is not None
    }
    for part, prefix in (("snapshots", ""), ("snapshots-demo", "demo_")):
        if found := results.get(part, {}):
            flat[f"{prefix}stall_share"] = found["stall_seconds"] / found["step_seconds"]
            flat[f"{prefix}step_ratio"] = found["step_seconds"] / found["step_seconds_without"]
    if results.get("torchrun", {}).get("seconds"):
        flat["torchrun_median"] = median(results["torchrun"])
        if "worker" in results:
            flat["torchrun_ratio"] = flat["torchrun_median"] / median(results["worker"])
    if results.get("torchft", {}).get("seconds"):
        flat["torchft_median"] = median(results["torchft"])
        flat["torchft_worst"] = max(results["torchft"]["seconds"])
    return flat


def claim_of(parts: set[str], cuda: bool) -> str:
    """The claim that these parts prove."""
    if cuda:
        return "recovery-gpu" if "worker" in parts else "snapshots-gpu"
    if "torchrun" in parts:
        return "peers"
    if parts <= {"snapshots", "snapshots-demo"}:
        return "snapshots"
    return "recovery" if parts == {"worker"} else "recovery-kinds"


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
        if found.get("detected") is not None:
            text += f"; detected after {found['detected']:.2f} s"
            text += f" (worst {found['detected_worst']:.2f})"
        if "deadline" in found:
            text += f", derived deadline {found['deadline']:.2f} s"
        if "steps_again" in found:
            text += f"; committed steps made again: {found['steps_again']}"
            text += f"; a step takes {1e3 * found['step_seconds']:.0f} ms"
    print(f"{name:14} (load {found['load']:.1f}): {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
