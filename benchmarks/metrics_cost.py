"""What metrics cost a step of the CPU demo: the same job with and without them, in pairs.

    python -m benchmarks.metrics_cost [--pairs 3] [--steps 80] [--json]

Four workers on four nodes (processes of this machine), two pipeline stages on two replicas. With:
records into rings, agents that read and merge, a server that judges and stores, node samples.
Without: ``[telemetry] steps = false`` in the agents' file. The ranks outnumber the cores, so what a
step loses is processor time: of agents and server, counted by the kernel in both runs, and of the
ranks themselves, which is far below what their own work varies by and is timed in a loop
(``benchmarks.observe``). Wall clocks of steps stand beside it; on a machine with other work they
say nothing about half a per cent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import observe
from benchmarks.recovery import CPU, JOB
from phalanx.control.backends.local import processes_of
from phalanx.testing.local_cluster import TrialCluster
from phalanx.train import StepRecord, read_records

RANKS, COLLECTIVES = 4, 200
WARM_STEPS, TRIES = 15, 3
WITHOUT = '[binding]\npolicy = "none"\n[telemetry]\nsteps = false\n'


def undisturbed(root: Path, steps: int, *, metrics: bool) -> dict[str, float]:
    """A run in which nothing was started again, as a busy machine may make it happen."""
    for attempt in range(TRIES):
        found = run(root.with_name(f"{root.name}-{attempt}"), steps, metrics=metrics)
        if found["generation"] == 1:
            return found
    raise SystemExit(f"the gang was formed again in each of {TRIES} runs: the machine is too busy")


def run(root: Path, steps: int, *, metrics: bool) -> dict[str, float]:
    """Seconds a step: of all processes together, and on the clock."""
    root.mkdir()
    for number in range(4):
        folder = root / "local" / "nodes" / f"node-{number}"
        folder.mkdir(parents=True)
        if not metrics:
            (folder / "agent.toml").write_text(WITHOUT)
    job = root / "job.toml"
    job.write_text(JOB.format(name="cost", steps=steps, checkpoint="every = 0", **CPU))
    with TrialCluster(root, nodes=4) as cluster:
        names = {node.name for node in cluster.local.nodes}
        assert names == {f"node-{number}" for number in range(4)}, names
        number = cluster.submit(str(job))
        commits = cluster.commits(number, 4)

        def reached(step: int) -> bool:
            newest = commits.newest()
            return newest is not None and newest.step >= step

        cluster.wait(lambda: reached(WARM_STEPS), "the first steps", 120)
        before, first, began = processor_seconds(cluster), commits.newest(), time.monotonic()
        cluster.wait(lambda: reached(steps - 1), "the last steps", 300)
        after, last, ended = processor_seconds(cluster), commits.newest(), time.monotonic()
        assert first is not None and last is not None
        told = cluster.get(f"/v1/jobs/{number}/metrics?names=loss")["series"].get("loss")
        assert bool(told and told["step"]) == metrics, "the switch does not switch"
        generation = cluster.job(number)["generation"]
        cluster.wait_ended(number, 60)
    made = last.step - first.step
    (folder,) = (root / "runs" / "cost").iterdir()
    records = list(read_records(folder / "metrics" / "steps.jsonl", StepRecord))
    walls = [record.step_seconds for record in records if record.step > WARM_STEPS]
    return {
        **{role: (after[role] - before[role]) / made for role in after},
        "generation": generation,
        "seconds": (ended - began) / made,
        "median_step_seconds": statistics.median(walls),
    }


def processor_seconds(cluster: TrialCluster) -> dict[str, float]:
    """Of the server, of the agents, and of everything else on the nodes."""
    found = {"server": 0.0, "agents": 0.0, "ranks": 0.0}
    assert cluster.server is not None
    agents = {node.agent.pid for node in cluster.local.nodes if node.agent is not None}
    found["server"] += _used(cluster.server.pid)
    for pid in {pid for node in cluster.local.nodes for pid in processes_of(node)}:
        found["agents" if pid in agents else "ranks"] += _used(pid)
    return found


def _used(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print what each pair gave, and the middle of them."""
    parser = argparse.ArgumentParser(description="What metrics cost a step of the CPU demo.")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-cost-", ignore_cleanup_errors=True) as name:
        for index in range(options.pairs):
            order = (True, False) if index % 2 else (False, True)
            pair = {
                ("with" if metrics else "without"): undisturbed(
                    Path(name) / f"{index}-{metrics}", options.steps, metrics=metrics
                )
                for metrics in order
            }
            pairs.append(pair)
            if not options.json:
                print(f"pair {index + 1}: {words(pair)}", flush=True)
    a_rank = rank_seconds()
    share = statistics.median(cost(pair, a_rank) for pair in pairs)
    if options.json:
        found = {"pairs": pairs, "rank_seconds": a_rank, "share": share}
        print(json.dumps({**found, "load": os.getloadavg()[0]}))
    else:
        print(f"a rank's own part: {a_rank * 1e6:.0f} us a step")
        print(f"metrics take {share:.2%} of a step (middle of {len(pairs)} pairs)")


def rank_seconds() -> float:
    """What a rank itself spends on a step's record, with as many waits as the demo has."""
    with tempfile.TemporaryDirectory(prefix="phalanx-cost-") as name:
        spent = observe.cost(Path(name))
    return spent["ring"] + spent["waits"] + COLLECTIVES * spent["collective"]


def cost(pair: dict[str, Any], rank_seconds: float) -> float:
    """The part of the job's cores that metrics take: by the second, since heartbeats go on too."""

    def beside(run: dict[str, float]) -> float:
        return (run["server"] + run["agents"]) / run["seconds"]

    ranks: float = RANKS * rank_seconds / pair["with"]["seconds"]
    cores = min(RANKS, os.cpu_count() or 1)
    return (beside(pair["with"]) - beside(pair["without"]) + ranks) / cores


def words(pair: dict[str, Any]) -> str:
    """One pair, for people."""
    return ", ".join(
        f"{name.replace('_', ' ')} {pair['without'][name]:.4f} -> {pair['with'][name]:.4f}"
        for name in pair["with"]
        if name != "generation"
    )


if __name__ == "__main__":
    main()
