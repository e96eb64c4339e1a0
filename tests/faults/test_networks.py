"""A node that is cut off in one direction, and one whose network is slow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.testing.local_cluster import TrialCluster
from tests.faults.test_combinations import lost_steps
from tests.faults.trial import SHORT_STEPS, SLOTS, Process, Trial

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can give nodes networks of their own"),
]
CUT_SECONDS = 45.0
GOES_ON_SECONDS = 150.0  # silence is noticed after some heartbeats


@contextmanager
def networked(root: Path) -> Iterator[TrialCluster]:
    with TrialCluster(
        root, nodes=SLOTS, spares=1, policy="[spares]\nnodes = 1\n", namespaces=True
    ) as cluster:
        yield cluster


@pytest.mark.parametrize("way", ["deaf", "mute"])
def test_a_node_that_is_cut_off_in_one_direction(tmp_path: Path, short: Path, way: str) -> None:
    """For longer than it takes to miss it; then it is there again, and has trained in vain."""
    with networked(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        before, node = trial.step, trial.node(1)
        assert cluster.network is not None
        cut = cluster.network.deafen if way == "deaf" else cluster.network.mute
        cut(node.name)
        time.sleep(CUT_SECONDS)
        cluster.network.undo()
        trial.goes_on(GOES_ON_SECONDS)
        lost_steps(trial, before)
        trial.ends_like(short)
        trial.leaves_nothing()


def test_a_worker_dies_on_a_node_whose_network_is_slow(tmp_path: Path, short: Path) -> None:
    with networked(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        before, node = trial.step, trial.node(1)
        assert cluster.network is not None
        cluster.network.limit(node.name, 2_000_000)
        trial.kill(Process.WORKER)
        trial.goes_on(GOES_ON_SECONDS)
        cluster.network.limit(node.name, 10**9)
        lost_steps(trial, before)
        trial.ends_like(short)
        trial.leaves_nothing()
