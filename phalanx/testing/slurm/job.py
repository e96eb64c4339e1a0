"""A job on a private Slurm, for trials: submitted, followed and disturbed from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from phalanx.control.agent.socket_paths import runtime_folder
from phalanx.control.backends.local import LocalNode, processes_of
from phalanx.testing.engine_job import EngineJob
from phalanx.testing.slurm.sandbox import Sandbox

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class SlurmJob(EngineJob):
    """One submission to a sandbox."""

    def __init__(self, sandbox: Sandbox, root: Path, world_size: int, *arguments: str) -> None:
        self.sandbox, self.root, self.world_size = sandbox, root, world_size
        command = [sys.executable, "-m", "phalanx", "submit", "--backend", "slurm", "--json"]
        made = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=root,
            env={**os.environ, **sandbox.environment},
        )
        if made.returncode:
            raise RuntimeError(made.stdout + made.stderr)
        answer = json.loads(made.stdout)
        self.number, self.run = int(answer["job"]), Path(answer["run"])
        self.output = Path(answer["output"])

    @property
    def state(self) -> Path:
        return self.run / "control"

    def nodes(self) -> list[LocalNode]:
        found = sorted((self.state / "nodes").glob("*"))
        return [LocalNode(path.name, path) for path in found]

    def kill_node(self, name: str) -> float:
        """Daemon and steps too."""
        at = time.monotonic()
        self.sandbox.kill_node(name)
        left = processes_of(LocalNode(name, self.state / "nodes" / name))
        if left:
            raise RuntimeError(f"{name} was to be dead, and processes of it live: {left}")
        return at

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else "(nothing)"

    def protected(self) -> str:
        """The node of the script: its loss ends the allocation."""
        return self.shown("BatchHost")

    # What Slurm says of it.

    def shown(self, field: str) -> str:
        """A field of ``scontrol show job``."""
        return self.sandbox.job_field(self.number, field)

    def slurm_state(self) -> str:
        """ "": it has forgotten it."""
        found = self.sandbox.run("squeue", "--noheader", "--states=all", "--format=%i %T").split(
            "\n"
        )
        states = dict(line.split() for line in found if line.strip())
        return str(states.get(str(self.number), ""))

    def restarts(self) -> int:
        """How often Slurm put it back into the queue."""
        return int(self.shown("Restarts"))

    def wait_ended(self, seconds: float) -> str:
        """Until Slurm has ended it; its state then."""
        self.wait(lambda: self.slurm_state() in ENDED, "the job to end", seconds)
        return self.slurm_state()

    def sockets_left(self) -> list[str]:
        """Nodes whose agents left sockets behind."""
        return [node.name for node in self.nodes() if runtime_folder(node.state).exists()]
