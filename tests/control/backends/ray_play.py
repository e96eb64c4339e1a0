"""A real Ray of several nodes on this machine, and a job on it that is harmed.

    python -m tests.control.backends.ray_play chaos|job FOLDER JOB.toml
    python -m tests.control.backends.ray_play program FOLDER OPTIONS... -- COMMAND...

Run in a network namespace of its own (Ray binds to the machine's addresses); prints JSON.
chaos: a worker, a node, a stopped worker, the controller; then the lost node comes back.
job: the same submission by ``ray job submit``.
program: one that waits in FOLDER to be killed; a rank of it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from phalanx.control.backends.local import LocalNode, processes_of
from phalanx.control.wire.api_types import NodeList
from phalanx.testing.engine_job import FAULT_KINDS, EngineJob
from tests.control.programs import kill_a_rank

WORLD, NODES = 4, 4  # two ranks a node: two nodes for the gang, two that stand by
PROGRAM_NODES = 2
SPARES = 2
TRIES = 3  # to start a node
END_SECONDS = 900  # one of the programs is silent for ten minutes
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
POLICY = "[timeouts]\nleast_hang_ns = 1_500_000_000\nround_trip_ns = 500_000_000\n"


class RayJob(EngineJob):
    """A cluster of nodes beside a head that gives nothing, and one job."""

    world_size = WORLD

    def __init__(
        self, root: Path, *words: str, nodes: int = NODES, through_ray: bool = False
    ) -> None:
        self.root = root
        head: dict[str, Any] = {"num_cpus": 0, "object_store_memory": 100 << 20}
        head |= {"_system_config": HEALTH, "include_dashboard": through_ray}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.raylets = [self.add_node(number) for number in range(nodes)]
        command = [sys.executable, "-m", "phalanx", "submit", "--backend", "ray", "--json", *words]
        environment = {**os.environ, "RAY_ADDRESS": self.cluster.address}
        if through_ray:
            environment["RAY_ADDRESS"] = f"http://{self.cluster.head_node.webui_url}"
            by_ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]
            command = [*by_ray, "--", "env", "-C", str(root), *command]
        self.output = root / "submit.log"
        with self.output.open("wb") as output:
            self.driver = subprocess.Popen(
                command, cwd=root, stdout=output, stderr=output, env=environment
            )

    def add_node(self, number: int) -> Any:
        """A node below one of the leaves."""
        for _ in range(TRIES - 1):
            with suppress(Exception):  # Ray gives a node 30 s to start, which a busy machine takes
                return self._node(number)
        return self._node(number)

    def _node(self, number: int) -> Any:
        return self.cluster.add_node(
            num_cpus=2, object_store_memory=100 << 20, resources={f"leaf:{number // 2}": 1}
        )

    @property
    def state(self) -> Path:
        found = next(iter(self.root.glob("runs/*/ray-*/control")), None)
        return found or self.root / "nothing"

    def nodes(self) -> list[LocalNode]:
        key = self.state.parent.name.removeprefix("ray-")
        base = Path("/tmp") / f"phalanx-ray-{os.getuid()}" / key
        return [LocalNode(path.name, path) for path in sorted(base.glob("ray-*"))]

    def said(self) -> str:
        return self.output.read_text()

    def job(self) -> dict[str, Any]:
        assert self.driver.poll() is None, f"the driver ended: {self.said()}"
        return super().job()

    def kill_node(self, name: str) -> float:
        """As if its power failed: raylet, actor, agent, keeper and workers at once."""
        raylet = next(node for node in self.raylets if f"ray-{node.node_id[:12]}" == name)
        agent = next(node for node in self.nodes() if node.name == name)
        mine = processes_of(agent)
        for info in raylet.all_processes["raylet"]:
            parent = psutil.Process(info.process.pid)
            mine += [child.pid for child in parent.children(recursive=True)]
            mine.append(parent.pid)
        at = time.monotonic()
        for pid in dict.fromkeys(mine):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(raylet, allow_graceful=False)
        return at

    def connected(self) -> dict[str, str]:
        """Nodes that are there, and their leaves."""
        found = self.client.get("/v1/nodes", NodeList).nodes
        return {node.name: node.leaf for node in found if node.connected}

    def chaos(self) -> dict[str, Any]:
        """Fault after fault, then a node returns; what became of it."""
        self.wait_running()
        commits, leaves = self.commits(), self.connected()
        seconds = {what: self.apply_fault(what, commits) for what in FAULT_KINDS}
        self.add_node(NODES)
        returned = self.wait(lambda: set(self.connected()) - set(leaves), "a node to return")
        return {"seconds": seconds, "leaves": leaves, "returned": sorted(returned)}

    def ended(self) -> dict[str, Any]:
        """Once the job is done."""
        code = self.driver.wait(END_SECONDS)
        return {"code": code, "run": str(self.state.parent), "said": self.said()}

    def end(self) -> list[str]:
        """End everything; agents that are left."""
        if self.driver.poll() is None:
            self.driver.send_signal(signal.SIGTERM)
            self.driver.wait(60)
        self.cluster.shutdown()
        left = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "agent" in words and any("phalanx-ray-" in word for word in words):
                left.append(" ".join(words))
        return left

    def reserved(self) -> list[float]:
        """CPUs of each bundle that Ray holds for the job."""
        from ray.util import placement_group_table

        ray.init(address=self.cluster.address, logging_level="error")
        made = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        ray.shutdown()
        return [bundle["CPU"] for group in made for bundle in group["bundles"].values()]

    def kill_rank(self) -> dict[str, Any]:
        """Of a program, in the middle of its run; what it had asked for."""
        kill_a_rank(self, self.root)
        asked = {"reserved": self.reserved(), "time_limit_ns": self.spec()["time_limit_ns"]}
        (self.root / "kill-me").unlink()
        return asked


def job_words(root: Path, job: str) -> list[str]:
    """How a job file is submitted here."""
    policy = root / "policy.toml"
    policy.write_text(POLICY)
    return [job, "--slot-gpus", "2", "--spares", str(SPARES), "--policy", str(policy)]


def main() -> None:
    what, root, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if what == "program":
        play = RayJob(root, *words, nodes=PROGRAM_NODES)
    else:
        play = RayJob(root, *job_words(root, words[0]), through_ray=what == "job")
    found: dict[str, Any] = {}
    try:
        if what == "chaos":
            found |= play.chaos()
        elif what == "program":
            found |= play.kill_rank()
        found |= play.ended()
    finally:
        left = play.end()
        sys.stdout.write(json.dumps({**found, "left": left}) + "\n")


if __name__ == "__main__":
    main()
