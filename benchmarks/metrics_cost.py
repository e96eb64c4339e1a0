"""What metrics cost a step of the CPU demo: the same job with and without them, in pairs.

    python -m benchmarks.metrics_cost [--pairs 3] [--steps 80] [--json]

Four workers on four nodes (processes of this machine), two pipeline stages on two replicas. With:
records into rings, agents that read and merge, a server that judges and stores, node samples.
Without: ``[telemetry] steps = false`` in the agents' file. The machine is busy with the job alone
(more ranks than cores), so what counts is processor time: of all processes of the cluster, by step.
Wall clocks stand beside it; with other work on the machine they vary by more than the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.recovery import CPU, JOB
from phalanx.control.local import processes_of
from phalanx.control.stage import Stage
from phalanx.train import StepRecord, read_records

WARM_STEPS = 15
WITHOUT = '[binding]\npolicy = "none"\n[telemetry]\nsteps = false\n'


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
    with Stage(root, nodes=4) as stage:
        names = {node.name for node in stage.cluster.nodes}
        assert names == {f"node-{number}" for number in range(4)}, names
        number = stage.submit(str(job))
        commits = stage.commits(number, 4)

        def reached(step: int) -> bool:
            newest = commits.newest()
            return newest is not None and newest.step >= step

        stage.wait(lambda: reached(WARM_STEPS), "the first steps", 120)
        before, first, began = processor_seconds(stage), commits.newest(), time.monotonic()
        stage.wait(lambda: reached(steps - 1), "the last steps", 300)
        after, last, ended = processor_seconds(stage), commits.newest(), time.monotonic()
        assert first is not None and last is not None
        told = stage.get(f"/v1/jobs/{number}/metrics?names=loss")["series"].get("loss")
        assert bool(told and told["step"]) == metrics, "the switch does not switch"
        stage.wait_ended(number, 60)
    made = last.step - first.step
    (folder,) = (root / "runs" / "cost").iterdir()
    records = list(read_records(folder / "metrics" / "steps.jsonl", StepRecord))
    walls = [record.step_seconds for record in records if record.step > WARM_STEPS]
    return {
        "processor_seconds": (after - before) / made,
        "seconds": (ended - began) / made,
        "median_step_seconds": statistics.median(walls),
    }


def processor_seconds(stage: Stage) -> float:
    """Of the server and of everything on the nodes."""
    ticks, found = os.sysconf("SC_CLK_TCK"), 0.0
    assert stage.server is not None
    for pid in {stage.server.pid, *(p for n in stage.cluster.nodes for p in processes_of(n))}:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / ticks
    return found


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
                ("with" if metrics else "without"): run(
                    Path(name) / f"{index}-{metrics}", options.steps, metrics=metrics
                )
                for metrics in order
            }
            pairs.append(pair)
            if not options.json:
                print(f"pair {index + 1}: {words(pair)}", flush=True)
    share = statistics.median(cost(pair, "processor_seconds") for pair in pairs)
    if options.json:
        print(json.dumps({"pairs": pairs, "processor_share": share, "load": os.getloadavg()[0]}))
    else:
        print(f"metrics take {share:.2%} of a step's processor time (middle of {len(pairs)} pairs)")


def cost(pair: dict[str, Any], name: str) -> float:
    """The part of a step that metrics take."""
    return float(pair["with"][name] / pair["without"][name] - 1)


def words(pair: dict[str, Any]) -> str:
    """One pair, for people."""
    return ", ".join(
        f"{name.replace('_', ' ')} {pair['without'][name]:.4f} -> {pair['with'][name]:.4f} "
        f"({cost(pair, name):+.2%})"
        for name in pair["with"]
    )


if __name__ == "__main__":
    main()
