"""A whole cluster on this machine: for the demo, chaos, benchmarks and tests.

Server and nodes are separate processes; whoever has the cluster may kill any of them, and hears at
the keepers when each step is committed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.checkpoint.keeper.messages import Noted, Watch
from phalanx.checkpoint.keeper.wire import expect, send
from phalanx.control.agent.socket_paths import runtime_folder
from phalanx.control.backends.local import (
    LocalCluster,
    LocalNode,
    processes_of,
    start_in_background,
)
from phalanx.control.client.client import Client, ClientError
from phalanx.control.wire.api_types import Done, Readmit
from phalanx.testing.fork_server import fork_zygote
from phalanx.testing.local_processes import worker_pids
from phalanx.testing.played_network import NodeNamespaces
from phalanx.testing.ports import free_port

START_SECONDS = 120.0  # on a busy machine
ENDED = ("done", "failed", "cancelled")  # states of a job
SPOILED_EVERY = 65_536  # bytes, so that no snapshot is left whole


class Commit(NamedTuple):
    """A step of which every rank's snapshot is safe, and since when (monotonic clock)."""

    generation: int
    step: int
    at: float


class Commits:
    """Hears at the keepers of a job which steps are committed."""

    def __init__(self, nodes: list[LocalNode], job: int, world_size: int) -> None:
        self._nodes, self._job, self._world_size = nodes, job, world_size
        self._connected: dict[str, bool] = {}
        self._noted: dict[tuple[int, int], set[int]] = {}  # ranks, by generation and step
        self._whole: dict[int, list[Commit]] = {}  # by generation
        self._lock = threading.Lock()

    def newest(self) -> Commit | None:
        """The newest committed step of the newest generation that has one."""
        self._connect()
        with self._lock:
            return max(self._whole[max(self._whole)]) if self._whole else None

    def first_after(self, generation: int) -> Commit | None:
        """The first step that a later generation made itself: what it restored does not count."""
        self._connect()
        with self._lock:
            newest = max(self._whole, default=0)
            made = sorted(self._whole[newest])[1:] if newest > generation else []
        return made[0] if made else None

    def next_after(self, step: int) -> Commit | None:
        """The first commit of a step beyond this one, by whatever generation."""
        self._connect()
        with self._lock:
            later = [c for made in self._whole.values() for c in made if c.step > step]
        return min(later, key=lambda commit: commit.at, default=None)

    def _connect(self) -> None:
        """Keepers come and go with nodes: those that are there are listened to."""
        for node in self._nodes:
            path = runtime_folder(node.state) / str(self._job) / "keeper"
            if path.exists() and not self._connected.get(str(path)):
                self._connected[str(path)] = True
                threading.Thread(target=self._listen, args=(str(path),), daemon=True).start()

    def _listen(self, path: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(path)
                send(connection, Watch())
                while True:
                    self._take(expect(connection, Noted))
        except OSError:
            self._connected[path] = False

    def _take(self, note: Noted) -> None:
        at = time.monotonic()
        with self._lock:
            ranks = self._noted.setdefault((note.generation, note.step), set())
            if note.replica or note.rank in ranks:  # keepers say again what they hold
                return
            ranks.add(note.rank)
            if len(ranks) == self._world_size:
                made = self._whole.setdefault(note.generation, [])
                made.append(Commit(note.generation, note.step, at))


class TrialCluster:
    """A server and nodes; all of it ends when the block is left."""

    def __init__(
        self,
        root: Path,
        *,
        nodes: int,
        gpus_per_node: int = 1,
        spares: int = 0,
        policy: str = "",
        namespaces: bool = False,
        hardware: Sequence[Path] = (),
        server_options: Sequence[str] = (),
    ) -> None:
        self.network = NodeNamespaces(nodes + spares) if namespaces else None
        self.root, self.state = root, root / "server"
        self.state.mkdir(parents=True, exist_ok=True)
        self._policy = root / "policy.toml"
        self._policy.write_text(policy or f"[spares]\nnodes = {spares}\n")
        self.server: subprocess.Popen[bytes] | None = None
        self._runner = asyncio.Runner()
        self._nodes, self._gpus = nodes + spares, gpus_per_node
        self._hardware, self._server_options = hardware, server_options

    def __enter__(self) -> TrialCluster:
        try:
            if self.network is not None:
                self.network.open()
            self.start_server()
            self.url = json.loads((self.state / "server.json").read_text())["url"]
            self.client = Client(self.url, self.state)
            token = self.state / "join.token"
            self.local = LocalCluster(
                self.root / "local",
                self.url,
                token,
                nodes=self._nodes,
                gpus_per_node=self._gpus,
                network=self.network,
                hardware=self._hardware,
            )
            fork_zygote(self.local.parent_socket, self.local.parent_log)
            self._runner.run(self.local.start())
            self.wait(lambda: len(self.get("/v1/nodes")["nodes"]) == self._nodes, "nodes to join")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "local"):
            self._runner.run(self.local.end())
        self._runner.close()
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            try:
                self.server.wait(10)
            except subprocess.TimeoutExpired:
                self.kill_server()
        if self.network is not None:
            self.network.close()

    # The server.

    def start_server(self) -> None:
        """Start it, again on its port after it was killed."""
        port = urlsplit_port(self.url) if hasattr(self, "url") else free_port()
        command = [sys.executable, "-m", "phalanx", "up", "--state", str(self.state)]
        command += ["--port", str(port), "--policy", str(self._policy)]
        if self.network is not None:
            command += ["--host", self.network.host]
        command += ["--follow", str(os.getpid()), *self._server_options]
        self.server = start_in_background(command, self.state / "server.log", {})
        self.wait(self._server_is_up, "the server")

    def _server_is_up(self) -> bool:
        assert self.server is not None
        if self.server.poll() is not None:
            raise RuntimeError(f"the server ended: {(self.state / 'server.log').read_text()}")
        if not all((self.state / name).exists() for name in ("server.json", "join.token")):
            return False
        try:
            return bool(Client("", self.state).get("/v1/status", dict))
        except ClientError:
            return False

    def kill_server(self) -> None:
        """SIGKILL."""
        assert self.server is not None
        self.server.kill()
        self.server.wait()

    def get(self, path: str) -> Any:
        """What the API says."""
        return self.client.get(path, dict)

    def wait(self, ready: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
        """Until something is true; TimeoutError says what was not."""
        began = time.monotonic()
        while not ready():
            waited = time.monotonic() - began
            if waited > seconds:
                raise TimeoutError(f"waited {seconds:.0f} s for {what}")
            # Whoever asks the server all the time keeps it from what is waited for.
            time.sleep(min(0.1, max(0.02, waited / 20)))

    # Jobs.

    def submit(self, *arguments: str) -> int:
        """``phalanx submit`` with these arguments; the job's number."""
        return int(json.loads(self.command("submit", *arguments))["jobs"][0])

    def command(self, name: str, *arguments: str) -> str:
        """What a command of the command line says, as JSON."""
        command = [sys.executable, "-m", "phalanx", name, "--state", str(self.state), "--json"]
        made = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, cwd=self.root
        )
        if made.returncode:
            raise RuntimeError(made.stdout + made.stderr)
        return made.stdout

    def job(self, number: int) -> dict[str, Any]:
        """The job as the API shows it."""
        found: dict[str, Any] = self.get(f"/v1/jobs/{number}")["job"]
        return found

    def events(self, kind: str, job: int) -> list[dict[str, Any]]:
        """The events of a kind about a job, oldest first."""
        found = self.get(f"/v1/events?limit=1000&job={job}")["events"]
        return [event["body"] for event in found if event["kind"] == kind]

    def wait_ended(self, number: int, seconds: float) -> str:
        """Until a job has ended; its state then."""
        self.wait(lambda: self.job(number)["state"] in ENDED, f"job {number} to end", seconds)
        return str(self.job(number)["state"])

    def commits(self, number: int, world_size: int) -> Commits:
        """An ear at the keepers of a job."""
        return Commits(self.local.nodes, number, world_size)

    # Harm.

    def node(self, name: str) -> LocalNode:
        return next(node for node in self.local.nodes if node.name == name)

    def node_of(self, slot: int, job: int) -> LocalNode:
        """The node that holds a slot of a job."""
        return self.node(self.job(job)["nodes"][slot])

    def signal_worker(self, slot: int, job: int, number: int = signal.SIGKILL) -> float:
        """Signal the first worker of a slot; returns when."""
        pid = worker_pids(self.node_of(slot, job), job)[0]
        at = time.monotonic()
        os.kill(pid, number)
        return at

    def kill_node(self, node: LocalNode) -> float:
        """End everything on a node at once; returns when."""
        at = time.monotonic()
        self.local.kill_node(node)
        return at

    def kill_agent(self, node: LocalNode) -> None:
        """SIGKILL of a node's agent alone."""
        assert node.agent is not None
        node.agent.kill()
        node.agent.wait()

    def order_fault(self, node: LocalNode, job: int, fault: str, content: str = "") -> None:
        """Have a worker do something wrong (``phalanx.train.rank.drill``); agents must allow it."""
        (fault_orders(node, job) / fault).write_text(content)

    def pace(self, job: int, step_seconds: float) -> None:
        """Have all workers sleep so long before each step from now on; agents must allow it.

        Whoever only looks at a job leaves the cores to others, and what shall happen between two
        steps does, on however slow a machine.
        """
        placed = lambda: self.job(job)["nodes"] or self.job(job)["state"] in ENDED  # noqa: E731
        self.wait(placed, "the job to be placed")
        for node in map(self.node, self.job(job)["nodes"]):
            self.wait(fault_orders(node, job).exists, f"workers on {node.name}")
            for index in range(self._gpus):
                self.order_fault(node, job, f"slow-{index}", str(step_seconds))

    def corrupt_snapshots(self, node: LocalNode) -> int:
        """Spoil every snapshot that a node's keepers hold; how many pieces of memory it was."""
        pieces = [path for pid in processes_of(node) for path in snapshot_memory(pid)]
        for path in pieces:
            spoil(path)
        return len(pieces)

    def kill_everything(self) -> None:
        """SIGKILL of the server and of all nodes, as if the power failed everywhere."""
        self.kill_server()
        for node in self.local.nodes:
            self.local.kill_node(node)

    def restart_everything(self) -> None:
        """Start server and nodes again, with the state they had on disk."""
        self.start_server()
        for node in self.local.nodes:
            self.restart_node(node)

    def restart_node(self, node: LocalNode) -> None:
        """Start a node that was killed, or only its agent."""
        self._runner.run(self.local.start_zygote(node))
        self.local.start_agent(node)

    def readmit(self) -> bool:
        """Let in again what the core has put aside; whether all nodes are healthy."""
        with suppress(ClientError):  # the controller may be dead just now
            nodes = self.get("/v1/nodes")["nodes"]
            for node in nodes:
                if node["state"] in ("quarantined", "draining") or (
                    node["state"] == "dead" and node["connected"]
                ):
                    path = f"/v1/nodes/{node['name']}/readmit"
                    with suppress(ClientError):
                        self.client.post(path, Readmit(tested=True), Done)
            return all(node["state"] in ("healthy", "spare") for node in nodes)
        return False


def urlsplit_port(url: str) -> int:
    """The port of a server's URL."""
    return int(url.rstrip("/").rpartition(":")[2])


def fault_orders(node: LocalNode, job: int) -> Path:
    """Where the workers of a job on a node find faults that they are ordered to have."""
    return node.state / "jobs" / str(job) / "chaos"


def snapshot_memory(pid: int) -> list[Path]:
    """The memory of snapshots that a process has open, as files."""
    files = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if "memfd:phalanx-snapshot" in str(path.readlink()):
                    files.append(path)
    return files


def spoil(memory: Path) -> None:
    """Turn one byte over in every part of some memory."""
    with memory.open("r+b", buffering=0) as file:
        for offset in range(0, file.seek(0, os.SEEK_END), SPOILED_EVERY):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 0xFF]))
