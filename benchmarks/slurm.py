"""Inside an allocation of Slurm: kills and their recovery, beside Slurm's own requeue of the job.

    python -m benchmarks.slurm [recovery] [agents] [submissions] [--json]

All on a private Slurm of real daemons on this machine (`phalanx slurm sandbox`).

recovery: six ranks (three replicas of two stages) on eight nodes, two of them spare. A worker, a
node, a stopped worker, the controller; seconds from the harm to the next committed step. Then
a plain batch job of as many nodes, and one of them dies: seconds until Slurm runs it again, before
its program has started or loaded anything. Slurm's node timeout is 4 s here; sites have 300.
agents: 64 nodes, seconds from the allocation's start until every agent has joined.
submissions: 100 jobs in a row through the backend, and how fast slurmctld answers meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.control.backends.slurm.facts import expand
from phalanx.control.backends.slurm.programs import Programs
from phalanx.control.backends.slurm.sandbox import Sandbox
from phalanx.control.backends.slurm.sandbox_files import SandboxOptions
from phalanx.control.backends.slurm.stage import SlurmJob
from phalanx.control.client import Client, ClientError

RANKS, SPARES = 6, 2
POLICY = "[timeouts]\nleast_hang_ns = 1_500_000_000\nround_trip_ns = 500_000_000\n"
JOB = """
name = "{name}"
[model]
preset = "tiny"
dim = 64
layers = 2
ffn = 128
vocab = 512
[data]
sequence = 32
[parallel]
data = 3
pipeline = 2
[precision]
compute = "float32"
[train]
steps = {steps}
global_batch = 12
micro_batch = 2
device = "cpu"
deterministic = true
[checkpoint]
every = 0
[log]
every = 1
tensorboard = false
communication_every = 0
[backend]
gpus_per_node = 1
"""
PLAIN = """#!/bin/bash
#SBATCH --nodes={ranks} --ntasks-per-node=1 --exclusive --requeue --output=/dev/null
srun --mpi=none sleep 1000
"""
GANG = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --exclusive --output={root}/gang.out
mkdir -p {root}/gang
{python} -m phalanx up --state {root}/gang --port {port} &
PHALANX_TOKEN_FILE={root}/gang/join.token srun --mpi=none bash -c 'exec {python} -m phalanx agent \\
  --site slurm --join http://127.0.0.1:{port} --gpus 1 --no-standby --as-agent \\
  --state {root}/gang/nodes/$SLURMD_NODENAME'
"""


def wait(ready: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
    """Until something is true; what it was."""
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.02)
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def recovery(root: Path) -> dict[str, Any]:
    """Seconds of each harm, and of Slurm's requeue."""
    with Up(SandboxOptions(root=root / "slurm", nodes=8, gpus_per_node=1)) as sandbox:
        (root / "policy.toml").write_text(POLICY)
        (root / "job.toml").write_text(JOB.format(name="chaos", steps=3000))
        job = SlurmJob(
            sandbox,
            root,
            *("job.toml", "--spares", str(SPARES), "--policy", str(root / "policy.toml")),
        )
        job.wait_running()
        found = {name: _harm(job, name) for name in ("worker", "node", "hang", "controller")}
        sandbox.run("scancel", str(job.number))
        wait(lambda: job.slurm_state() in ("CANCELLED", ""), "the job to end")
        for name in sandbox.options.node_names:
            if not sandbox.node_runs(name):
                sandbox.start_node(name)
        found["requeue"] = _requeue(sandbox, root)
    worst = max(found[name] for name in ("worker", "node", "hang"))
    return {**found, "requeue_over_node": found["requeue"] / found["node"], "worst": worst}


def _harm(job: SlurmJob, what: str) -> float:
    """Do it, and see the next committed step."""
    commits = job.commits(RANKS)
    generation = job.job()["generation"]
    start = wait(commits.newest, "a step")
    wait(lambda: commits.newest().step >= start.step + 10, "some steps")
    slot = next(s for s, name in enumerate(job.job()["nodes"]) if name != job.batch_host())
    if what == "controller":
        at = job.kill_controller()
        before = commits.newest()
        after = wait(lambda: commits.newest().step > before.step and commits.newest(), "a step")
        wait(lambda: job.job().get("state") == "running", "the controller to be back", 60)
    else:
        if what == "node":
            at = job.kill_node(job.node_of(slot).name)
        else:
            how = signal.SIGSTOP if what == "hang" else signal.SIGKILL
            at = job.signal_worker(slot, how)
        after = wait(lambda: commits.first_after(generation), f"recovery from {what}", 120)
        wait(lambda: job.job().get("state") == "running", "the job to run", 60)
    say(f"{what}: {after.at - at:.2f} s")
    return float(after.at - at)


def _requeue(sandbox: Sandbox, root: Path) -> float:
    """From the death of a node until Slurm runs the job again: its program still has to start."""
    script = root / "plain.sh"
    script.write_text(PLAIN.format(ranks=RANKS))
    number = sandbox.run("sbatch", "--parsable", str(script)).strip()

    def shown(field: str) -> str:
        text = sandbox.run("scontrol", "--oneliner", "show", "job", number)
        return text.partition(f" {field}=")[2].split()[0]

    wait(lambda: shown("JobState") == "RUNNING", "the plain job")
    doomed = next(name for name in expand(shown("NodeList")) if name != shown("BatchHost"))
    wait(lambda: sandbox.job_processes(doomed), "its processes")
    at = time.monotonic()
    sandbox.kill_node(doomed)
    wait(lambda: shown("Restarts") == "1" and shown("JobState") == "RUNNING", "the requeue", 300)
    seconds = time.monotonic() - at
    say(f"Slurm's requeue: {seconds:.1f} s")
    sandbox.run("scancel", number)
    return seconds


def agents(root: Path, nodes: int = 64) -> dict[str, Any]:
    """Seconds from the allocation's start until all agents have joined."""
    options = SandboxOptions(root=root / "slurm", nodes=nodes, gpus_per_node=1, leaves=8)
    with Up(options) as sandbox:
        port = options.port + nodes + 10
        script = GANG.format(nodes=nodes, root=root, python=sys.executable, port=port)
        (root / "gang.sh").write_text(script)
        number = sandbox.run("sbatch", "--parsable", str(root / "gang.sh")).strip()
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
        shown = sandbox.run("scontrol", "--oneliner", "show", "job", number)
        began = time.mktime(
            time.strptime(shown.partition(" StartTime=")[2].split()[0], "%Y-%m-%dT%H:%M:%S")
        )
        sandbox.run("scancel", number)
    say(f"{nodes} agents: {now - began:.1f} s")
    return {"nodes": nodes, "seconds": now - began}


def submissions(root: Path, count: int = 100) -> dict[str, Any]:
    """A hundred jobs through the backend's rate limit; slurmctld's answers meanwhile."""
    with Up(SandboxOptions(root=root / "slurm", nodes=4, gpus_per_node=1)) as sandbox:
        os.environ.update(sandbox.environment)
        programs, answers = Programs(root), []
        began = time.monotonic()
        for number in range(count):
            programs.run("sbatch", "--hold", "--output=/dev/null", "--wrap=true")
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


class Up:
    """A sandbox for as long as the block runs."""

    def __init__(self, options: SandboxOptions) -> None:
        self.sandbox = Sandbox(options)

    def __enter__(self) -> Sandbox:
        self.sandbox.up()
        return self.sandbox

    def __exit__(self, *_: object) -> None:
        self.sandbox.down()


PARTS = {"recovery": recovery, "agents": agents, "submissions": submissions}


def main() -> None:
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
        return
    for name, values in found.items():
        print(name)
        for key, value in values.items():
            print(f"  {key:<20}{value:>10.2f}")


if __name__ == "__main__":
    sys.exit(main())
