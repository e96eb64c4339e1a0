"""A job on a private Slurm as a stage: whoever has it may kill parts and hears of every step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.control.backends.slurm.sandbox import Sandbox
from phalanx.control.client import Client, ClientError
from phalanx.control.local import LocalNode, worker_pids
from phalanx.control.runtime import runtime_folder
from phalanx.control.stage import Commits

START_SECONDS = 180.0


class SlurmJob:
    """One submission to a sandbox, followed from outside."""

    def __init__(self, sandbox: Sandbox, root: Path, *arguments: str) -> None:
        self.sandbox, self.root = sandbox, root
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
        self.state = self.run / "control"

    # Looking.

    @property
    def client(self) -> Client:
        """Of the controller inside the allocation."""
        return Client("", self.state)

    def nodes(self) -> list[LocalNode]:
        """Nodes whose agents have started."""
        found = sorted((self.state / "nodes").glob("*"))
        return [LocalNode(path.name, path) for path in found]

    def job(self) -> dict[str, Any]:
        """The job as its controller shows it; {}: there is none yet, or no answer."""
        try:
            detail: dict[str, Any] = self.client.get("/v1/jobs/1", dict)["job"]
        except (ClientError, OSError):
            return {}
        return detail

    def commits(self, world_size: int) -> Commits:
        """An ear at the keepers."""
        return Commits(self.nodes(), 1, world_size)

    def slurm_state(self) -> str:
        """What Slurm says of it; "": it has forgotten it."""
        found = self.sandbox.run("squeue", "--noheader", "--states=all", "--format=%i %T").split(
            "\n"
        )
        states = dict(line.split() for line in found if line.strip())
        return str(states.get(str(self.number), ""))

    def restarts(self) -> int:
        """How often Slurm put it back into the queue."""
        shown = self.sandbox.run("scontrol", "--oneliner", "show", "job", str(self.number))
        return int(shown.partition(" Restarts=")[2].split()[0])

    def wait(self, ready: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
        """Until something is true; TimeoutError says what was not, and what the job printed."""
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                said = self.output.read_text() if self.output.exists() else "(nothing)"
                raise TimeoutError(f"waited {seconds:.0f} s for {what}; the job printed:\n{said}")
            time.sleep(0.02)

    def wait_running(self) -> None:
        """Until it makes steps."""
        self.wait(lambda: self.job().get("state") == "running", "the job to run")

    def wait_ended(self, seconds: float) -> str:
        """Until Slurm has ended it; its state then."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: self.slurm_state() in ended, "the job to end", seconds)
        return self.slurm_state()

    # Harm.

    def node_of(self, slot: int) -> LocalNode:
        """The node that holds a slot."""
        name = self.job()["nodes"][slot]
        return next(node for node in self.nodes() if node.name == name)

    def batch_host(self) -> str:
        """The node of the script and the controller."""
        shown = self.sandbox.run("scontrol", "--oneliner", "show", "job", str(self.number))
        return shown.partition(" BatchHost=")[2].split()[0]

    def signal_worker(self, slot: int, number: int = signal.SIGKILL) -> float:
        """Signal the first worker of a slot; returns when."""
        pid = worker_pids(self.node_of(slot), 1)[0]
        at = time.monotonic()
        os.kill(pid, number)
        return at

    def kill_node(self, name: str) -> float:
        """End everything on a node at once, slurmd too; returns when."""
        at = time.monotonic()
        self.sandbox.kill_node(name)
        return at

    def kill_controller(self) -> float:
        """SIGKILL of the server inside the allocation; returns when."""
        pid = json.loads((self.state / "server.json").read_text())["pid"]
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at

    def sockets_left(self) -> list[str]:
        """Folders of sockets that its agents left."""
        return [
            str(found) for node in self.nodes() if (found := runtime_folder(node.state)).exists()
        ]
