"""``phalanx doctor fabric`` on local clusters: measured by a job, and a slowed node is named."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from phalanx.config import ConfigError
from phalanx.control.client.fabric_job import FabricJob
from phalanx.control.client.fabric_watch import FabricWatcher, WatchedFabric
from phalanx.doctor.fabric import watch
from phalanx.doctor.fabric.report import COLLECTIVES, FabricReport, FabricRequest
from phalanx.testing.local_cluster import TrialCluster
from tests.commands import run_phalanx
from tests.shared_folder import network

MEGABIT = 1_000_000


def doctor_fabric(cluster: TrialCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_phalanx("doctor", "fabric", "--state", str(cluster.state), *arguments)


def report_of(answer: subprocess.CompletedProcess[str]) -> FabricReport:
    assert answer.stdout, answer.stderr
    return msgspec.convert(json.loads(answer.stdout)["report"], FabricReport)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialCluster]:
    with TrialCluster(tmp_path_factory.mktemp("fabric"), nodes=3) as made:
        yield made


def test_pairs_and_collectives_of_a_cluster_are_measured(
    cluster: TrialCluster, tmp_path: Path
) -> None:
    page = tmp_path / "map.html"
    answer = doctor_fabric(cluster, "--json", "--most-mib", "1", "--picture", str(page))
    report = report_of(answer)
    assert report.backend == "gloo" and sorted(report.nodes) == ["node-0", "node-1", "node-2"]
    assert len(report.pairs) == 3
    assert all(pair.bytes_per_second > 1e6 and pair.latency_seconds > 0 for pair in report.pairs)
    assert {row.collective for row in report.sweep} == set(COLLECTIVES)
    measured = [row for row in report.sweep if not row.problem]
    assert {row.collective for row in measured} >= {"all_reduce", "broadcast"}
    assert all(row.algbw == pytest.approx(row.bytes / row.seconds) for row in measured)
    # Nodes of one machine meet on its loopback interface, and its counter says so.
    assert {each.path for each in report.transports} == {"loopback"}
    assert "node-2" in page.read_text()


def test_an_option_that_makes_no_sense_is_refused(cluster: TrialCluster) -> None:
    for arguments, words in [
        (("--pairs", "some"), "one of auto, all, log, none"),
        (("--collective", "scan"), "one of all_reduce"),
        (("--card", "token-ring"), "no card of the catalogue"),
        (("--picture", "map.png"), "ends in .svg or .html"),
        (("--drain",), "--drain is for --watch"),
        (("--watch", "--json"), "--watch takes no"),
    ]:
        answer = doctor_fabric(cluster, *arguments)
        assert answer.returncode == 2 and words in " ".join(answer.stderr.split())


def watch_until_measured(watcher: FabricWatcher) -> WatchedFabric:
    made: list[WatchedFabric] = []
    deadline = time.monotonic() + 120
    while not made and time.monotonic() < deadline:
        if (one := watcher.look()) is not None:
            made.append(one)
    return made[0]


def test_new_nodes_are_measured_by_a_watch_and_those_that_come_back_again(
    cluster: TrialCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SETTLE_SECONDS", 0.0)
    lines: list[str] = []
    wanted = FabricJob(request=FabricRequest(collectives=()), start_seconds=60.0)
    watcher = FabricWatcher(cluster.client, wanted, lines.append)
    first = watch_until_measured(watcher)
    assert sorted(first.new) == ["node-0", "node-1", "node-2"] and len(first.report.pairs) == 3
    assert watcher.look() is None  # nothing is new
    cluster.command("drain", "node-1")
    cluster.wait(lambda: "drained" in states(cluster) or "draining" in states(cluster), "a drain")
    assert watcher.look() is None  # two nodes are left
    cluster.command("resume", "node-1")
    assert watch_until_measured(watcher).new == ("node-1",)
    assert any("measuring for node-1" in line for line in lines)


def states(cluster: TrialCluster) -> list[str]:
    return [node["state"] for node in cluster.get("/v1/nodes")["nodes"]]


def test_a_job_is_submitted_after_a_look_at_the_fabric(cluster: TrialCluster) -> None:
    arguments = ("--check-fabric", "--world-size", "2", "--", "true")
    answer = run_phalanx("submit", "--state", str(cluster.state), *arguments)
    assert answer.returncode == 0 and "3 free nodes measured, nothing" in answer.stderr, (
        answer.stderr
    )
    answer = run_phalanx("submit", "--dry-run", *arguments)
    assert answer.returncode == 2 and "--check-fabric" in answer.stderr


def test_a_constraint_counts_the_nodes_that_it_admits(cluster: TrialCluster) -> None:
    answer = doctor_fabric(cluster, "--constraint", "h100")
    assert answer.returncode == 1 and "0 of 0 free nodes" in answer.stderr


def test_a_job_that_cannot_measure_says_why(cluster: TrialCluster) -> None:
    answer = doctor_fabric(cluster, "--python", "/nonexistent/python")
    assert answer.returncode == 1 and "phalanx logs" in answer.stderr


def test_a_node_with_half_the_rate_is_named(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give nodes networks of their own")
    with network(changes=True):
        cluster = TrialCluster(tmp_path, nodes=4, namespaces=True)
        try:
            cluster.__enter__()
        except ConfigError as error:
            pytest.skip(str(error))
        try:
            assert cluster.network is not None
            for node in cluster.local.nodes:
                try:
                    cluster.network.limit(node.name, 200 * MEGABIT)
                except ConfigError as error:
                    pytest.skip(str(error))
            cluster.network.limit("node-2", 100 * MEGABIT)
            arguments = ("--json", "--pair-mib", "2", "--collective", "none", "--slower", "20")
            answer = doctor_fabric(cluster, *arguments)
            report, problems = report_of(answer), json.loads(answer.stdout)["problems"]
            assert [problem["nodes"] for problem in problems] == [["node-2"]], problems
            assert answer.returncode == 1
            assert report.outcome is not None
            assert report.outcome.accused[0].level == pytest.approx(0.5, abs=0.15)
            assert {each.path for each in report.transports} == {"sockets"}
            # A watch finds the same, and has nobody placed there.
            request = FabricRequest(pair_bytes=2 << 20, slower=0.2, collectives=())
            wanted = FabricJob(request=request)
            watcher = FabricWatcher(cluster.client, wanted, print, drain=True)
            assert watch_until_measured(watcher).drained == ("node-2",)
            shown = cluster.get("/v1/nodes/node-2")["node"]
            assert shown["state"] == "draining" and "of the usual rate" in shown["why"]["text"]
        finally:
            cluster.__exit__()
