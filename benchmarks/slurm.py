"""Inside an allocation of Slurm: kills and their recovery, beside Slurm's own requeue of the job.

    python -m benchmarks.slurm [recovery] [agents] [submissions] [--json]

All on a private Slurm of real daemons on this machine (`phalanx slurm sandbox`).

recovery: six ranks (three replicas of two stages) on eight nodes, two of them spare. A worker, a
node, a stopped worker, the controller; seconds from the harm to the next committed step. Then the
same job without --no-kill, so that Slurm itself deals with a node that dies: seconds until it runs
the job again, whose program has not started yet. Its node timeout is 4 s here; sites have 300.
agents: 64 nodes, seconds from the allocation's start until every agent has joined.
submissions: 100 jobs in a row through the backend, and how fast slurmctld answers meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from phalanx.config import load_job, resolve
from phalanx.control.backends.slurm.programs import SlurmCommands
from phalanx.control.backends.slurm.submit import SlurmBackend
from phalanx.control.client.client import Client, ClientError
from phalanx.control.server.http.submission import RequestedWork
from phalanx.testing.engine_job import FAULT_KINDS, wait
from phalanx.testing.slurm.files import SandboxOptions
from phalanx.testing.slurm.job import SlurmJob
from phalanx.testing.slurm.sandbox import Sandbox
from proof.report import report

OWN_REQUEUE = 'backend.slurm.options=["--no-kill=off"]'
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny.toml"
RANKS, SPARES = 6, 2
POLICY = "[timeouts]\nleast_hang_ns = 1_500_000_000\nround_trip_ns = 500_000_000\n"
SETTINGS = (
    *("parallel.data=3", "parallel.pipeline=2", "data.sequence=32", "train.global_batch=12"),
    *("train.micro_batch=2", "train.steps=3000", "train.deterministic=true", "checkpoint.every=0"),
    *("model.dim=64", "model.layers=2", "model.ffn=128", "model.vocab=512"),
    "log.tensorboard=false",
)
GANG = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --exclusive --output={root}/gang.out
mkdir -p {root}/gang
{python} -m phalanx up --state {root}/gang --port {port} &
PHALANX_TOKEN_FILE={root}/gang/join.token srun --mpi=none bash -c 'exec {python} -m phalanx agent \\
  --site slurm --join http://127.0.0.1:{port} --gpus 1 --no-standby --as-agent \\
  --state {root}/gang/nodes/$SLURMD_NODENAME'
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def recovery(root: Path) -> dict[str, Any]:
    """Seconds of each fault, and of Slurm's requeue."""
    # Two nodes more than the allocation has: Slurm needs others for the two that die.
    with Sandbox(SandboxOptions(root=root / "slurm", nodes=10, gpus_per_node=1)) as sandbox:
        (root / "policy.toml").write_text(POLICY)
        words = [str(EXAMPLE), "--slot-gpus", "1", "--spares", str(SPARES)]
        words += ["--policy", str(root / "policy.toml")]
        words += [word for setting in SETTINGS for word in ("--set", setting)]
        job = SlurmJob(sandbox, root, RANKS, *words)
        job.wait_running()
        commits = job.commits()
        found: dict[str, float] = {}
        for faults in FAULT_KINDS:
            found[faults] = job.apply_fault(faults, commits)
            say(f"{faults}: {found[faults]:.2f} s")
        for name in sandbox.options.node_names:
            if not sandbox.node_runs(name):
                sandbox.start_node(name)  # or Slurm waits for it before the job has ended
        sandbox.run("scancel", str(job.number))
        job.wait_ended(150)  # Slurm itself waits a minute for the dead node's part of the step
        # The same job, but Slurm deals with lost nodes as it does by default.
        job = SlurmJob(sandbox, root, RANKS, *words, "--set", OWN_REQUEUE)
        job.wait_running()
        job.reach(job.commits(), 10)
        found["requeue"] = _requeue(job)
        sandbox.run("scancel", str(job.number))
    worst = max(found[name] for name in FAULT_KINDS)
    return {**found, "worst": worst, "times_faster": found["requeue"] / worst}


def _requeue(job: SlurmJob) -> float:
    """A node dies: until Slurm runs the job again, whose program has not yet started."""
    at = job.kill_node(job.node_of(job.harmed_slot()).name)
    again = lambda: job.restarts() == 1 and job.slurm_state() == "RUNNING"  # noqa: E731
    wait(again, "the requeue", 200)
    seconds = time.monotonic() - at
    say(f"Slurm's requeue: {seconds:.1f} s")
    return seconds


def agents(root: Path, nodes: int = 64) -> dict[str, Any]:
    """Seconds from the allocation's start until all agents have joined."""
    options = SandboxOptions(root=root / "slurm", nodes=nodes, gpus_per_node=1, leaves=8)
    with Sandbox(options) as sandbox:
        port = options.port + nodes + 10
        script = GANG.format(nodes=nodes, root=root, python=sys.executable, port=port)
        (root / "gang.sh").write_text(script)
        number = int(sandbox.run("sbatch", "--parsable", str(root / "gang.sh")))
        state = root / "gang"
        wait(lambda: (state / "server.json").exists(), "the controller")
        client = Client("", state)

        def joined() -> bool:
            try:
                return int(client.get("/v1/status", dict)["connected"]) == nodes
            except ClientError:
                return False

        wait(joined, "all agents", 120)
        now = time.time()
        shown = sandbox.job_field(number, "StartTime")
        began = time.mktime(time.strptime(shown, "%Y-%m-%dT%H:%M:%S"))
        sandbox.run("scancel", str(number))
    say(f"{nodes} agents: {now - began:.1f} s")
    return {"nodes": nodes, "seconds": now - began}


def submissions(root: Path, count: int = 100) -> dict[str, Any]:
    """A hundred jobs through the backend's rate limit; slurmctld's answers meanwhile."""
    with Sandbox(SandboxOptions(root=root / "slurm", nodes=8, gpus_per_node=1)) as sandbox:
        os.environ.update(sandbox.environment)
        overrides = (*SETTINGS, 'backend.slurm.options=["--hold"]')
        job = resolve(load_job(EXAMPLE, overrides), RANKS)
        wanted = RequestedWork(job=job, ranks=RANKS, slot_gpus=1, folder=str(root))
        backend, answers = SlurmBackend(SlurmCommands(root)), []
        began = time.monotonic()
        for number in range(count):
            backend.submit(wanted)
            if number % 10 == 0:
                asked = time.monotonic()
                sandbox.run("squeue", "--noheader")
                answers.append(time.monotonic() - asked)
        took = time.monotonic() - began
        diag = sandbox.run("sdiag")
        queued = len(sandbox.run("squeue", "--noheader").split("\n")) - 1
    threads = next(line.split()[-1] for line in diag.splitlines() if "Server thread count" in line)
    answer = statistics.median(answers)
    say(f"{queued} submissions in {took:.1f} s, squeue answers in {1000 * answer:.0f} ms")
    return {
        "submissions": queued,
        "seconds": took,
        "squeue_seconds": answer,
        "server_threads": int(threads),
    }


PARTS = {"recovery": recovery, "agents": agents, "submissions": submissions}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = {}
    for name in given.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="phalanx-slurm-", ignore_cleanup_errors=True) as at:
            found[name] = PARTS[name](Path(at))
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        for name, values in found.items():
            print(name)
            for key, value in values.items():
                print(f"  {key:<20}{value:>10.2f}")
    return report("slurm", found["recovery"]) if "recovery" in found else 0


if __name__ == "__main__":
    sys.exit(main())
