"""``phalanx doctor fabric`` on local clusters: measured by a job, and a slowed node is named."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from phalanx.config import ConfigError
from phalanx.doctor.fabric.report import COLLECTIVES, FabricReport
from phalanx.testing.local_cluster import ENDED, TrialCluster
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
    ]:
        answer = doctor_fabric(cluster, *arguments)
        assert answer.returncode == 2 and words in " ".join(answer.stderr.split())


AT_JOIN = """
[fabric_checks]
at_join = true
settle_ns = 1_000_000_000
pause_ns = 1_000_000_000
"""


def checks(cluster: TrialCluster, state: str = "all") -> dict[int, str]:
    jobs = cluster.get(f"/v1/jobs?state={state}&limit=100")["jobs"]
    return {job["id"]: job["state"] for job in jobs if job["name"] == "fabric-check"}


def running_after(cluster: TrialCluster, before: int) -> list[int]:
    live = checks(cluster, "live")
    return [number for number, state in live.items() if number > before and state == "running"]


def told(cluster: TrialCluster) -> list[str]:
    """What people were told, oldest first."""
    events = cluster.get("/v1/events?limit=1000")["events"]
    commands = [command for event in events for command in event["commands"]]
    return [each["why"]["text"] for each in commands if each["kind"] == "Notify"]


def test_the_server_measures_new_nodes_and_those_that_come_back(tmp_path: Path) -> None:
    # Cores that others use give any rates: what a verdict leads to is proved elsewhere.
    policy = AT_JOIN + "slower_ppm = 900_000\ndrain = false\n"
    with TrialCluster(tmp_path, nodes=3, policy=policy) as cluster:
        cluster.wait(lambda: "done" in checks(cluster).values(), "a check of the fabric", 120)
        assert any(
            "the fabric between" in line or "a fabric check" in line for line in told(cluster)
        )
        before = max(checks(cluster))
        cluster.command("drain", "node-1")
        cluster.wait(lambda: "draining" in states(cluster), "a drain")
        cluster.command("resume", "node-1")
        cluster.wait(lambda: running_after(cluster, before), "another check", 120)
        (number,) = running_after(cluster, before)
        # A server that is killed meanwhile finds the check as it was; then nothing is held by it.
        cluster.kill_server()
        cluster.start_server()
        cluster.wait(lambda: checks(cluster)[number] in ENDED, f"check {number} to end", 120)
        assert checks(cluster)[number] == "done", cluster.job(number)["why"]["text"]
        nodes = cluster.get("/v1/nodes")["nodes"]
        assert not any(job == number for node in nodes for job in node["jobs"])


@pytest.mark.soak
def test_a_gang_starts_when_its_nodes_have_been_measured(tmp_path: Path) -> None:
    policy = "[fabric_checks]\nbefore_nodes = 3\n"
    with TrialCluster(tmp_path, nodes=3, policy=policy) as cluster:
        number = cluster.submit("--world-size", "3", "--", "true")
        assert cluster.wait_ended(number, 180) == "done"
        first = cluster.job(min(checks(cluster)))
        assert first["state"] == "done", first["why"]["text"]
        assert 0 < first["ended_ns"] <= cluster.job(number)["started_ns"]


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


@contextmanager
def with_a_slow_node(root: Path, policy: str = "") -> Iterator[TrialCluster]:
    """Four nodes with networks of their own, of which node-2 has half the rate of the others."""
    if os.getuid() != 0:
        pytest.skip("only root can give nodes networks of their own")
    with network(changes=True):
        cluster = TrialCluster(root, nodes=4, namespaces=True, policy=policy)
        try:
            cluster.__enter__()
        except ConfigError as error:
            pytest.skip(str(error))
        try:
            assert cluster.network is not None
            for node in cluster.local.nodes:
                rate = 100 * MEGABIT if node.name == "node-2" else 200 * MEGABIT
                try:
                    cluster.network.limit(node.name, rate)
                except ConfigError as error:
                    pytest.skip(str(error))
            yield cluster
        finally:
            cluster.__exit__()


def test_a_node_with_half_the_rate_is_named(tmp_path: Path) -> None:
    with with_a_slow_node(tmp_path) as cluster:
        arguments = ("--json", "--pair-mib", "2", "--collective", "none", "--slower", "20")
        answer = doctor_fabric(cluster, *arguments)
        report, problems = report_of(answer), json.loads(answer.stdout)["problems"]
        assert [problem["nodes"] for problem in problems] == [["node-2"]], problems
        assert answer.returncode == 1
        assert report.outcome is not None
        assert report.outcome.accused[0].level == pytest.approx(0.5, abs=0.15)
        assert {each.path for each in report.transports} == {"sockets"}


@pytest.mark.soak
def test_two_checks_of_the_server_drain_a_node_with_half_the_rate(tmp_path: Path) -> None:
    policy = AT_JOIN.replace("at_join", "slower_ppm = 200_000\nat_join")
    # The networks are limited before the nodes that joined are measured.
    policy = policy.replace("settle_ns = 1_", "settle_ns = 20_")
    with with_a_slow_node(tmp_path, policy) as cluster:
        slow = lambda: cluster.get("/v1/nodes/node-2")["node"]["state"] == "draining"  # noqa: E731
        cluster.wait(slow, "node-2 to be drained", 240)
        shown = cluster.get("/v1/nodes/node-2")["node"]
        assert "of the usual rate" in shown["why"]["text"]
        assert states(cluster).count("healthy") == 3
