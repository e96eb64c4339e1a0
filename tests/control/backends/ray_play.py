"""A real Ray of several nodes on this machine, and a job on it that loses a worker and a node.

Run in a network namespace of its own (Ray binds to the machine's addresses); prints JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from phalanx.control.client import Client, ClientError
from phalanx.control.local import LocalNode, worker_pids
from phalanx.control.stage import Commits

WORLD = 4
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class Play:
    """A cluster of ``nodes`` beside a head that gives nothing, and one job."""

    def __init__(self, root: Path, job: Path, nodes: int, spares: int) -> None:
        self.root = root
        head = {"num_cpus": 0, "object_store_memory": 100 << 20, "_system_config": HEALTH}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [
            self.cluster.add_node(
                num_cpus=2,
                object_store_memory=100 << 20,
                resources={f"leaf:{number // 2}": 1},
            )
            for number in range(nodes)
        ]
        command = [sys.executable, "-m", "phalanx", "submit", "--backend", "ray", str(job)]
        command += ["--slot-gpus", "1", "--spares", str(spares), "--json"]
        self.output = (root / "submit.log").open("wb")
        environment = {**os.environ, "RAY_ADDRESS": self.cluster.address}
        self.driver = subprocess.Popen(
            command, cwd=root, stdout=self.output, stderr=subprocess.STDOUT, env=environment
        )

    def wait(self, ready: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := ready()):
            said = (self.root / "submit.log").read_text()
            assert self.driver.poll() is None, f"the driver ended: {said}"
            assert time.monotonic() < deadline, f"no {what}: {said}"
            time.sleep(0.02)
        return found

    def control(self) -> Path:
        return next(iter(self.root.glob("runs/*/ray-*/control")))

    def job(self) -> dict[str, Any]:
        with suppress(ClientError, OSError, StopIteration):
            answer: dict[str, Any] = Client("", self.control()).get("/v1/jobs/1", dict)["job"]
            return answer
        return {}

    def agents(self) -> list[LocalNode]:
        key = self.control().parent.name.removeprefix("ray-")
        base = Path("/tmp") / f"phalanx-ray-{os.getuid()}" / key
        return [LocalNode(path.name, path) for path in sorted(base.glob("ray-*"))]

    def run(self) -> dict[str, Any]:
        """Kill a worker, then a node; what became of it."""
        self.wait(lambda: self.job().get("state") == "running", "running job")
        commits = Commits(self.agents(), 1, WORLD)
        self.wait(lambda: (now := commits.newest()) and now.step >= 5, "step 5")
        at = time.monotonic()
        os.kill(worker_pids(self._holder(1), 1)[0], signal.SIGKILL)
        after = self.wait(lambda: commits.first_after(1), "recovery from a killed worker")
        worker_seconds = after.at - at
        self.wait(lambda: self.job().get("state") == "running", "running job")
        doomed = self._holder(2).name
        raylet = next(n for n in self.nodes if f"ray-{n.node_id[:12]}" == doomed)
        leaves = self._leaves()
        at = time.monotonic()
        self.cluster.remove_node(raylet, allow_graceful=False)
        after = self.wait(lambda: commits.first_after(2), "recovery from a killed node")
        node_seconds = after.at - at
        code = self.driver.wait(180)
        return {
            "code": code,
            "worker_seconds": worker_seconds,
            "node_seconds": node_seconds,
            "run": str(self.control().parent),
            "leaves": leaves,
            "said": (self.root / "submit.log").read_text(),
        }

    def _holder(self, slot: int) -> LocalNode:
        name = self.job()["nodes"][slot]
        return next(node for node in self.agents() if node.name == name)

    def _leaves(self) -> dict[str, str]:
        found = Client("", self.control()).get("/v1/nodes", dict)["nodes"]
        return {node["name"]: node["leaf"] for node in found}

    def end(self) -> list[str]:
        """End everything; agents that are left."""
        if self.driver.poll() is None:
            self.driver.terminate()
            self.driver.wait(60)
        self.cluster.shutdown()
        left = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                text = path.read_bytes().replace(b"\0", b" ").decode()
                if "phalanx agent" in text and str(os.getuid()) in text and "ray-" in text:
                    left.append(text)
        return left


def main() -> None:
    root, job = Path(sys.argv[1]), Path(sys.argv[2])
    play = Play(root, job, nodes=WORLD + 1, spares=1)
    found: dict[str, Any] = {}
    try:
        found = play.run()
    finally:
        left = play.end()
        sys.stdout.write(json.dumps({**found, "left": left}) + "\n")


if __name__ == "__main__":
    main()
