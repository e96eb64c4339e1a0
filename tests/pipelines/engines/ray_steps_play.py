"""A real Ray of two nodes on this machine that runs a pipeline's steps; prints JSON.

python -m tests.pipelines.engines.ray_steps_play

Run in a folder and a network namespace of its own: Ray binds to the machine's addresses.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster

from phalanx.pipelines.engines.ray_steps import RayExecutor
from phalanx.pipelines.run.session import PipelineSession
from tests.control.backends.ray_play import HEALTH

STEPS: dict[str, Any] = {
    "first": {"command": ["sh", "-c", "echo one > {outputs.out}"], "outputs": {"out": "one"}},
    "slow": {"command": ["sleep", "600"], "timeout_minutes": 0.1, "after": ["first"]},
    "bad": {"command": ["sh", "-c", "echo no luck; exit 3"], "after": ["first"]},
}


def main() -> None:
    """Run them; their states and reasons."""
    head: dict[str, Any] = {"num_cpus": 0, "object_store_memory": 100 << 20}
    head |= {"_system_config": HEALTH, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    try:
        session = PipelineSession({"name": "p", "steps": STEPS, "parallel": 2})
        end = session.run(RayExecutor(cluster.address), lambda progress: None)
    finally:
        ray.shutdown()  # it is connected to the head, which goes now
        cluster.shutdown()
    found = {name: (each.state, each.reason) for name, each in end.machine.tasks.items()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
