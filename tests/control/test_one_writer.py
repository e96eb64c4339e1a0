"""Two processes of one rank never run at the same time, however often agents are killed."""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from phalanx.testing.local_cluster import TrialCluster

# Each process of a rank has a file: when it opened it, that it lives, when it closed it.
WRITER = """
import os, sys, time
from pathlib import Path

if sys.argv[2:] == ["daemon"]:
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.setsid()
rank, generation = os.environ["RANK"], os.environ["PHALANX_GENERATION"]
with Path(f"{sys.argv[1]}.{rank}.{generation}.{os.getpid()}.lease").open("w", buffering=1) as file:
    while not Path("finish").exists():
        file.write(f"{time.monotonic()}\\n")
        time.sleep(0.02)
    file.write(f"{time.monotonic()}\\n")
"""
# Ranks of each, and what its ranks are given: one alone, one on two nodes, one whose writer has
# left the session of its rank.
PROGRAMS = {"alone": (1, ()), "spread": (2, ()), "detached": (1, ("daemon",))}
NODES, GPUS = 4, 2  # those of a lost node have room elsewhere, on nodes of their own
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
FRESH_SECONDS = 0.5  # whoever has written since lives
Rank = tuple[str, str]  # program and rank


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.timeout(3600)
def test_a_rank_has_one_writer_over_many_kills_of_agents(tmp_path: Path, kills: int) -> None:
    (tmp_path / "writer.py").write_text(WRITER)
    chance = random.Random(kills)
    with TrialCluster(tmp_path, nodes=NODES, gpus_per_node=GPUS, policy=POLICY) as cluster:
        jobs = [
            cluster.submit(
                *("--name", name, "--world-size", str(ranks), "--slot-gpus", "1"),
                *("--", sys.executable, "writer.py", name, *more),
            )
            for name, (ranks, more) in PROGRAMS.items()
        ]
        left = kills
        while left:
            cluster.wait(lambda: all_write(tmp_path), "a writer of every rank", 120)
            left -= kill_agents(cluster, jobs, min(left, chance.choice((1, 1, 2))), chance)
        cluster.wait(lambda: all_write(tmp_path), "the last writers", 120)
        (tmp_path / "finish").touch()
        for job in jobs:
            assert cluster.wait_ended(job, 120) == "done"
            assert cluster.job(job)["retries_used"] == 0
    found = leases(tmp_path)
    assert len(found) == sum(ranks for ranks, _ in PROGRAMS.values())
    assert sum(map(len, found.values())) > len(found) + kills // 3  # many had to start again
    for rank, spans in found.items():
        for (_, closed), (opened, _) in pairwise(sorted(spans)):
            assert closed < opened, f"{rank}: two writers for {closed - opened:.2f} s"


def kill_agents(cluster: TrialCluster, jobs: list[int], count: int, chance: random.Random) -> int:
    """Kill agents of nodes that have ranks, and start them again; how many there were."""
    held = sorted({name for job in jobs for name in cluster.job(job)["nodes"]})
    victims = [cluster.node(name) for name in chance.sample(held, min(count, len(held)))]
    before = len(list(cluster.root.glob("*.lease")))
    for node in victims:
        cluster.kill_agent(node)
    # Some are back before anybody misses them, some come too late,
    time.sleep(chance.choice((0.0, 1.0, 3.0)))
    if len(victims) == 1 and not chance.randrange(3):  # and some not before it runs elsewhere.
        more = lambda: len(list(cluster.root.glob("*.lease"))) > before  # noqa: E731
        cluster.wait(more, "the next writer", 120)
    for node in victims:
        cluster.restart_node(node)
    cluster.wait(cluster.readmit, "all nodes to be healthy", 120)
    return len(victims)


def all_write(folder: Path) -> bool:
    """Whether every rank of every program is writing now."""
    since = time.time() - FRESH_SECONDS
    fresh = {rank_of(path) for path in folder.glob("*.lease") if path.stat().st_mtime > since}
    return len(fresh) == sum(ranks for ranks, _ in PROGRAMS.values())


def leases(folder: Path) -> dict[Rank, list[tuple[float, float]]]:
    """From when to when each process of a rank wrote; one that wrote nothing held nothing."""
    found: dict[Rank, list[tuple[float, float]]] = defaultdict(list)
    for path in folder.glob("*.lease"):
        if times := [float(line) for line in path.read_text().splitlines()]:
            found[rank_of(path)].append((times[0], times[-1]))
    return found


def rank_of(path: Path) -> Rank:
    name, rank, *_ = path.name.split(".")
    return name, rank
