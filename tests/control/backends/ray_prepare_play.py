"""A real Ray of four nodes on this machine, and a corpus prepared on it while a node dies.

    python -m tests.control.backends.ray_prepare_play RECIPE.toml

Run in a network namespace of its own (Ray binds to the machine's addresses); prints JSON.
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
from ray.cluster_utils import Cluster

from phalanx.data.prepare.recipe import load_recipe
from tests.control.backends.ray_play import HEALTH

NODES = 4
SECONDS = 300


def main() -> None:
    """Start the nodes, prepare, kill a node once a unit is filtered; what became of it."""
    recipe = Path(sys.argv[1])
    head: dict[str, Any] = {"num_cpus": 0, "object_store_memory": 100 << 20}
    head |= {"_system_config": HEALTH, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=100 << 20) for _ in range(NODES)]
    command = [sys.executable, "-m", "phalanx", "data", "prepare", str(recipe), "--engine", "ray"]
    command += ["--set", f"ray_address={cluster.address}", "--json"]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
            filtered = load_recipe(recipe).work_folder / "filtered"
            deadline = time.monotonic() + SECONDS
            while not (filtered.is_dir() and any(filtered.iterdir())):
                assert time.monotonic() < deadline
                if running.poll() is not None:
                    break
                time.sleep(0.01)
            kill(nodes[0])
            cluster.remove_node(nodes[0], allow_graceful=False)
            _, said = running.communicate(timeout=SECONDS)
    finally:
        cluster.shutdown()
    found = {"code": running.returncode, "said": said.decode()[-3000:]}
    sys.stdout.write(json.dumps(found) + "\n")


def kill(node: Any) -> None:
    """As if its power failed: the raylet and all that it started."""
    for info in node.all_processes["raylet"]:
        parent = psutil.Process(info.process.pid)
        for process in (*parent.children(recursive=True), parent):
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                os.kill(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
