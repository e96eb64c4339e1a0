"""Two processes of one rank never run at the same time, however often agents are killed."""

from __future__ import annotations

import random
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from phalanx.control.backends.local import LocalNode
from phalanx.testing.local_cluster import TrialCluster

WRITER = """
import os, time
from itertools import pairwise
from pathlib import Path

mine = Path(f"lives-{os.environ['RANK']}-{os.environ['PHALANX_GENERATION']}-{os.getpid()}")
with mine.open("w", buffering=1) as file:
    while True:
        file.write(f"{time.monotonic()}\\n")
        time.sleep(0.01)
"""
POLICY = """
[timeouts]
heartbeat_ns = 1_000_000_000
missed_heartbeats = 2
round_trip_ns = 500_000_000
reconnect_ns = 500_000_000
[recovery]
agent_end_ns = 1
[health]
strikes = 1000
breaker_least_nodes = 1000
lemon_score = 1_000_000
"""


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.timeout(3600)
def test_a_rank_has_one_writer_over_many_kills_of_agents(tmp_path: Path, kills: int) -> None:
    (tmp_path / "writer.py").write_text(WRITER)
    chance = random.Random(kills)
    with TrialCluster(tmp_path, nodes=2, policy=POLICY) as cluster:
        job = cluster.submit("--", sys.executable, "writer.py")
        for number in range(kills):
            before = len(lives(tmp_path))
            cluster.wait(lambda: writes(tmp_path), "a writer", 90)
            node = cluster.node_of(0, job)
            cluster.kill_agent(node)
            # Some agents are back before anybody misses them, some come too late.
            time.sleep(chance.choice((0.0, 1.0, 3.0)))
            if number % 3 == 0:  # and some not before it runs elsewhere
                cluster.wait(lambda: len(lives(tmp_path)) > before, "the next writer", 90)  # noqa: B023
            come_back(cluster, node)
        cluster.wait(lambda: writes(tmp_path), "the last writer", 90)
        assert cluster.job(job)["state"] == "running"
        spans = sorted(span(path) for path in lives(tmp_path))
    assert len(spans) > kills // 3
    for (_, ended), (began, _) in pairwise(spans):
        assert ended < began, f"two writers at a time for {ended - began:.2f} s"


def come_back(cluster: TrialCluster, node: LocalNode) -> None:
    cluster.restart_node(node)
    cluster.wait(cluster.readmit, "all nodes to be healthy", 90)


def lives(folder: Path) -> list[Path]:
    """What each process of the rank wrote."""
    return [path for path in folder.glob("lives-0-*") if path.stat().st_size > 64]


def writes(folder: Path) -> bool:
    """Whether one writes now."""
    return any(time.time() - path.stat().st_mtime < 0.2 for path in lives(folder))


def span(path: Path) -> tuple[float, float]:
    times = [float(line) for line in path.read_text().splitlines()[:-1]]
    return times[0], times[-1]
