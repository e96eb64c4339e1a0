"""A job on a private Slurm that has a Ray of its own in the allocation; prints what it saw.

Run in a network namespace of its own: Ray binds to the machine's addresses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from phalanx.testing.engine_job import wait
from phalanx.testing.slurm.files import SandboxOptions
from phalanx.testing.slurm.job import SlurmJob
from phalanx.testing.slurm.sandbox import Sandbox
from tests.control.jobs import write_job

PROGRAM = """
import json, sys, ray
ray.init(address=sys.argv[1], logging_level="error")
print(json.dumps([len([n for n in ray.nodes() if n["Alive"]]), ray.cluster_resources()["CPU"]]))
"""


def main() -> None:
    root = Path(sys.argv[1])
    options = SandboxOptions(root=root / "slurm", nodes=2, gpus_per_node=1)
    with Sandbox(options) as sandbox:
        path = write_job(root, "beside", 2000)
        words = ["--slot-gpus", "1", "--set", "backend.slurm.ray=true"]
        words += ["--set", "parallel.pipeline=1"]
        job = SlurmJob(sandbox, root, 2, str(path), *words)
        job.wait_running()
        environments = (Path(f"/proc/{pid}/environ") for pid in sandbox.job_processes("n2"))
        told = {
            entry.decode()
            for path in environments
            for entry in path.read_bytes().split(b"\0")
            if entry.startswith(b"RAY_ADDRESS=")
        }
        (address,) = {entry.partition("=")[2] for entry in told}

        def nodes() -> list[float] | None:
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, address],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            )
            found = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else [0]
            return found if found[0] == 2 else None

        seen = wait(nodes, "two nodes of Ray", 120)
        sandbox.run("scancel", str(job.number))
        state = job.wait_ended(60)
        wait(lambda: not sandbox.job_processes(), "its processes to end", 60)
    sys.stdout.write(json.dumps({"address": address, "nodes": seen, "state": state}) + "\n")


if __name__ == "__main__":
    main()
