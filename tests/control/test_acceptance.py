"""A live cluster of three recorded machines: who drifts, since when, and a burn-in by an agent."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.control.client.client import ClientError
from phalanx.control.trust.acceptance_signature import verify_certificate
from phalanx.testing.local_cluster import TrialCluster
from tests.commands import run_phalanx
from tests.control.test_described_fleet import make_tree
from tests.observe.browser import browser, tab

AGENT = """
[describe]
poll_seconds = 0.3
settings_after_seconds = 0.1
settings_every_seconds = 600.0
"""
DRIVER = "550.90.07"
OTHER = "550.54.15"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialCluster]:
    root = tmp_path_factory.mktemp("acceptance")
    trees = []
    for number in range(3):
        state = root / "local" / "nodes" / f"node-{number}"
        state.mkdir(parents=True, mode=0o700)
        (state / "agent.toml").write_text(AGENT)
        changes = {DRIVER: OTHER} if number == 1 else {}
        trees.append(make_tree(root / "trees" / str(number), "h100-4-rails", changes))
    with TrialCluster(root, nodes=3, hardware=trees) as made:
        yield made


def drift(cluster: TrialCluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get("/v1/drift")
    return found


def command(cluster: TrialCluster, *words: str) -> Any:
    return run_phalanx("doctor", *words, "--state", str(cluster.state), folder=cluster.root)


@pytest.mark.timeout(240)
def test_a_node_that_differs_is_named_with_the_time(cluster: TrialCluster) -> None:
    cluster.wait(lambda: not drift(cluster)["silent"], "settings of all nodes")
    found = drift(cluster)
    named = {(each["node"], each["key"]) for each in found["differences"]}
    assert ("node-1", "driver") in named and {node for node, _ in named} == {"node-1"}
    assert found["compared"] == {"h100": 3}
    (driver,) = (each for each in found["differences"] if each["key"] == "driver")
    assert (driver["value"], driver["usual"], driver["alike"]) == (OTHER, DRIVER, 2)
    assert 0 < time.time() - driver["since_ns"] / 1e9 < 300

    shown = command(cluster, "drift")
    assert shown.returncode == 1
    assert f"node-1  version driver: {OTHER}, and {DRIVER} on 2 of 3 nodes" in shown.stdout
    only = command(cluster, "drift", "--node", "node-0", "--json")
    assert only.returncode == 0 and json.loads(only.stdout)["differences"] == []


@pytest.mark.timeout(240)
def test_the_page_shows_drift_in_the_view_of_a_node(cluster: TrialCluster) -> None:
    token = (cluster.state / "admin.token").read_text().strip()
    with browser() as running, tab(running, cluster.url) as at:
        at.sign_in(token, "node/node-1")
        at.wait_for_text(OTHER)
        said = at.text()
        assert "version driver" in said and f"{DRIVER} (2 of 3)" in said
        if folder := os.environ.get("PHALANX_SCREENSHOTS"):
            at.page.screenshot(path=f"{folder}/drift.png")
        at.show("node/node-0")
        at.wait_for_text("As most of 3 nodes of its kind")
        assert at.problems == [] and at.elsewhere == []


@pytest.mark.timeout(240)
def test_the_time_of_a_fact_outlives_the_server(cluster: TrialCluster) -> None:
    (driver,) = (each for each in drift(cluster)["differences"] if each["key"] == "driver")
    cluster.kill_server()
    cluster.start_server()
    cluster.wait(lambda: len(drift(cluster)["compared"]) == 1, "the facts")
    assert driver in drift(cluster)["differences"]  # since the same time

    tree = cluster.root / "trees" / "1" / "commands" / "nvidia-smi_-q_-x"
    tree.write_text(tree.read_text().replace(OTHER, DRIVER))
    cluster.wait(lambda: not drift(cluster)["differences"], "the driver to be the usual one")


@pytest.mark.timeout(240)
def test_a_node_is_burnt_in_by_its_agent(cluster: TrialCluster, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="drain it first"):
        cluster.client.post("/v1/nodes/node-2/acceptance", {"seconds": 2.0}, dict)
    options = ["--minutes", "0.04", "--load", "gemm", "--load", "disk", "--out", str(tmp_path)]
    done = command(cluster, "accept", "--node", "node-2", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node-2: accepted after 2 of 2 s" in done.stdout
    made = verify_certificate((tmp_path / "acceptance-node-2.json").read_bytes())
    assert made.node == "node-2" and {each.load for each in made.report.loads} == {"gemm", "disk"}
    assert made.description.fact("driver") is not None  # as its agent describes it
    kept = cluster.get("/v1/nodes/node-2/acceptance")
    assert kept["ended"] and not kept["problem"]
    assert verify_certificate(json.dumps(kept["certificate"]).encode()) == made
    cluster.wait(
        lambda: cluster.get("/v1/nodes/node-2")["node"]["state"] == "healthy", "it to work again"
    )
    # Of one node nobody knows whether it is slow.
    assert not [e for e in drift(cluster)["differences"] if e["aspect"] == "speed"]


@pytest.mark.timeout(240)
def test_a_burn_in_can_be_ended(cluster: TrialCluster) -> None:
    client, path = cluster.client, "/v1/nodes/node-0"
    client.post(f"{path}/drain", {}, dict)
    client.post(f"{path}/acceptance", {"seconds": 600.0, "loads": ["disk"]}, dict)
    with pytest.raises(ClientError, match="a burn-in runs"):
        client.post(f"{path}/acceptance", {"seconds": 600.0}, dict)
    cluster.wait(lambda: cluster.get(f"{path}/acceptance")["lines"], "the loads to work")
    client.delete(f"{path}/acceptance", dict)
    cluster.wait(lambda: cluster.get(f"{path}/acceptance")["ended"], "its end")
    assert cluster.get(f"{path}/acceptance")["certificate"]["certificate"]["outcome"] == (
        "incomplete"
    )
    with pytest.raises(ClientError, match="no burn-in runs"):
        client.delete(f"{path}/acceptance", dict)
