"""A node is examined when it joins, after suspicion and before it comes back."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx import hardware
from phalanx.cluster.node import Node
from phalanx.control.agent.node_check import NodeChecker
from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from phalanx.control.wire.api_types import Done, Readmit
from phalanx.testing.local_cluster import TrialCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialCluster]:
    with TrialCluster(tmp_path_factory.mktemp("stage"), nodes=2) as cluster:
        yield cluster


def node_of(cluster: TrialCluster, name: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get(f"/v1/nodes/{name}")
    return found


def state_of(cluster: TrialCluster, name: str) -> str:
    return str(node_of(cluster, name)["node"]["state"])


def ask_for_check(cluster: TrialCluster, name: str) -> None:
    """Out of the fleet and back: it is examined before it gets work."""
    cluster.client.post(f"/v1/nodes/{name}/quarantine", None, Done)
    cluster.client.post(f"/v1/nodes/{name}/readmit", Readmit(), Done)


def test_a_node_that_passes_its_checks_works_again(cluster: TrialCluster) -> None:
    folder = cluster.node("node-0").state
    first = json.loads((folder / "doctor.json").read_text())
    assert first["depth"] == "quick" and state_of(cluster, "node-0") == "healthy"
    ask_for_check(cluster, "node-0")
    cluster.wait(lambda: state_of(cluster, "node-0") == "healthy", "the node to come back", 120)
    report = json.loads((folder / "doctor.json").read_text())
    assert report["depth"] == "full"
    assert {"matmul cpu", "collective gloo", "memory host"} <= {
        finding["check"] for finding in report["findings"]
    }


def test_a_node_with_a_wrong_product_is_quarantined_and_comes_back_repaired(
    cluster: TrialCluster,
) -> None:
    inject = cluster.node("node-1").state / "doctor.inject"
    inject.write_text("matmul\n")
    ask_for_check(cluster, "node-1")
    events = lambda: str(cluster.get("/v1/events?limit=50"))  # noqa: E731
    cluster.wait(lambda: "failed its check" in events(), "the check to fail", 120)
    assert state_of(cluster, "node-1") == "quarantined"
    assert "wrong_elements 1" in events()
    inject.unlink()
    cluster.client.post("/v1/nodes/node-1/readmit", Readmit(), Done)
    cluster.wait(lambda: state_of(cluster, "node-1") == "healthy", "the repaired node", 120)


def test_a_node_that_fails_its_check_at_start_gets_no_work(cluster: TrialCluster) -> None:
    node = cluster.node("node-1")
    cluster.kill_node(node)
    cluster.wait(lambda: state_of(cluster, "node-1") == "dead", "the node to be missed", 120)
    (node.state / "doctor.inject").write_text("disk\n")
    cluster.restart_node(node)
    cluster.wait(lambda: state_of(cluster, "node-1") == "quarantined", "quarantine", 120)
    (node.state / "doctor.inject").unlink()


def test_a_new_node_that_fails_is_never_healthy(cluster: TrialCluster, tmp_path: Path) -> None:
    from phalanx.control.backends.local import LocalNode

    node = LocalNode("node-9", tmp_path / "node-9")
    node.state.mkdir()
    (node.state / "doctor.inject").write_text("limits\n")
    cluster.local.nodes.append(node)
    cluster.restart_node(node)
    names = lambda: [each["name"] for each in cluster.get("/v1/nodes")["nodes"]]  # noqa: E731
    cluster.wait(lambda: "node-9" in names(), "the node to join", 120)
    cluster.wait(lambda: state_of(cluster, "node-9") == "quarantined", "quarantine", 120)
    states = [entry["state"] for entry in node_of(cluster, "node-9")["history"]]
    assert "quarantined" in states and "healthy" not in states


def test_a_check_that_cannot_begin_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server would wait for it in vain, and know no reason."""

    def poor() -> int:
        raise OSError(errno.EMFILE, "Too many open files", "/dev")

    monkeypatch.setattr(hardware, "count_cuda", poor)
    zygote = ZygoteClient(tmp_path / "zygote.sock", tmp_path / "zygote.log", lambda end: None)
    checker = NodeChecker(Node(name="n0", gpus=1), tmp_path, zygote)
    found = asyncio.run(checker.check("full"))
    assert not found.passed and "Too many open files" in found.detail
