"""What other programs get: Prometheus, its rules, Grafana, webhooks."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from phalanx.control.server.api.prometheus import sample_of
from phalanx.control.server.webhooks import Webhooks, bad_address, post_there
from phalanx.observe.prometheus import MOST_JOBS, Family, JobSample, job_families, render
from tests.cluster.drive import Drive
from tests.control.servers import ServerProcess
from tests.receivers import NEEDS_PROMETHEUS, HttpReceiver, Prometheus

MONITORING = resources.files("phalanx.observe") / "monitoring"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as server:
        yield server


def test_prometheus_can_read_what_the_server_says(server: ServerProcess) -> None:
    status, text = server.call("GET", "/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["phalanx_events"].type == "counter"
    assert len(families["phalanx_events"].samples) == 1
    states = {sample.labels["state"] for sample in families["phalanx_nodes"].samples}
    assert "healthy" in states
    assert families["phalanx_store_failing"].samples[0].value == 0
    assert server.call("GET", "/metrics", token="")[0] == 401


def test_names_and_labels_of_hostile_jobs_are_escaped_and_bounded() -> None:
    jobs = [
        JobSample(
            job=number,
            name='x"} evil 1\n# HELP',
            team="a\\b",
            step=number,
            generation=1,
            row={"loss": 2.0, "mfu": None},
        )
        for number in range(1, 2 * MOST_JOBS)
    ]
    families = list(text_string_to_metric_families(render(job_families(jobs)).decode()))
    by_name = {family.name: family.samples for family in families}
    assert len(by_name["phalanx_job_loss"]) == MOST_JOBS
    assert by_name["phalanx_job_loss"][0].labels["name"] == 'x"} evil 1\n# HELP'
    assert by_name["phalanx_job_loss"][0].labels["team"] == "a\\b"
    assert by_name["phalanx_job_mfu_ratio"] == []


def test_a_number_that_is_none_is_still_readable() -> None:
    text = render([Family("x", "gauge", "h", [({}, float("nan")), ({"a": "b"}, float("inf"))])])
    (family,) = text_string_to_metric_families(text.decode())
    assert len(family.samples) == 2


def exported() -> set[str]:
    row = {"loss": 1.0}
    sample = JobSample(job=1, name="n", team="t", step=1, generation=1, row=row)
    return {family.name for family in job_families([sample])}


def expressions() -> dict[str, str]:
    """PromQL of the dashboard's panels and variables and of the rules, by what has it."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found[variable["name"]] = variable["query"]["query"]
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return found | {rule["alert"]: rule["expr"] for rule in group["rules"]}


def test_dashboard_and_rules_ask_only_for_what_is_exported(server: ServerProcess) -> None:
    known = exported() | {
        line.split()[2]
        for line in server.call("GET", "/metrics")[1].splitlines()
        if line.startswith("# TYPE")
    }
    for where, expression in expressions().items():
        asked = set(re.findall(r"\bphalanx_\w+", expression)) or {expression.split("{")[0]}
        assert asked <= known | {"up"}, where


def test_labels_are_not_the_scrapes_own_and_alerts_know_them(server: ServerProcess) -> None:
    sample = JobSample(job=7, name="n", team="t", step=1, generation=1, row={"loss": 1.0})
    text = server.call("GET", "/metrics")[1] + render(job_families([sample])).decode()
    found = {
        label
        for family in text_string_to_metric_families(text)
        for each in family.samples
        for label in each.labels
    }
    assert found and not found & {"job", "instance"}, "Prometheus would rename them"
    rules = (MONITORING / "alerts.yml").read_text()
    assert set(re.findall(r"\$labels\.(\w+)", rules)) <= found
    dashboard = (MONITORING / "grafana.json").read_text()
    assert set(re.findall(r"\{(\w+)=~", dashboard)) <= found


def test_a_program_has_a_series_of_steps_from_the_first_that_it_reports() -> None:
    drive = Drive()
    job = drive.submit(reports_steps=False)
    drive.run(job)
    families = {family.name: family.samples for family in job_families([sample_of(job, {})])}
    # Without one it is never called stuck.
    assert not families["phalanx_job_step"] and families["phalanx_job_generations_total"]
    drive.train(job, 3)
    families = {family.name: family.samples for family in job_families([sample_of(job, {})])}
    assert [value for _, value in families["phalanx_job_step"]] == [3.0]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_alert_rules_are_good() -> None:
    command = ["promtool", "check", "rules", str(MONITORING / "alerts.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """By Prometheus' own evaluation of series as it has them after a scrape."""
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    tests = shutil.copy(Path(__file__).with_name("alert_tests.yml"), tmp_path)
    command = ["promtool", "test", "rules", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def send(hooks: Webhooks, done: Any) -> None:
    sending = asyncio.ensure_future(hooks.run())
    async with asyncio.timeout(90):
        while not done():
            await asyncio.sleep(0.01)
    sending.cancel()


def test_a_message_is_repeated_until_it_is_taken() -> None:
    async def run(url: str) -> None:
        hooks = Webhooks((url,), pause_seconds=0.01)
        hooks.tell("finding", {"job": 1, "sentence": "<script>"})
        hooks.tell("job", {"job": 1, "state": "done"})
        await send(hooks, lambda: hooks.sent == 2)

    with HttpReceiver(refuse=2) as receiver:
        asyncio.run(run(f"{receiver.url}/hook?secret=hush"))
    assert [json.loads(each)["kind"] for each in receiver.got] == ["finding", "job"]


def test_a_job_is_told_to_its_own_address_and_to_no_other_that_answers_for_it() -> None:
    async def run(own: str, redirecting: str) -> None:
        hooks = Webhooks((), pause_seconds=0.01)
        hooks.tell_job(redirecting, "job", {"job": 1}, post_there)
        hooks.tell_job(own, "job", {"job": 2, "state": "done"}, post_there)
        await send(hooks, lambda: hooks.sent == 1 and hooks.failed == 1)

    elsewhere = "http://127.0.0.1:9/elsewhere"
    with HttpReceiver(refuse=1) as receiver, HttpReceiver(redirect=elsewhere) as redirecting:
        asyncio.run(run(receiver.url, redirecting.url))
    assert [json.loads(each) for each in receiver.got] == [
        {"kind": "job", "job": 2, "state": "done"}
    ]


def test_a_dead_receiver_costs_its_messages_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> Webhooks:
        hooks = Webhooks(("http://127.0.0.1:9/hook?secret=hush",), pause_seconds=0.001)
        for _ in range(1500):
            hooks.tell("finding", {})
        await send(hooks, lambda: hooks.failed >= 2)
        return hooks

    with caplog.at_level(logging.WARNING):
        hooks = asyncio.run(run())
    assert hooks.dropped == 500
    assert "127.0.0.1" in caplog.text
    assert "hush" not in caplog.text


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "ftp://x/", "https://", "x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    assert bad_address(url)


def test_rules_and_dashboard_are_installed_with_the_package() -> None:
    for name in ("alerts.yml", "grafana.json"):
        assert Path(str(MONITORING / name)).is_file()


@pytest.mark.soak
@NEEDS_PROMETHEUS
def test_a_real_prometheus_scrapes_the_server_and_loads_the_rules(
    server: ServerProcess, tmp_path: Path
) -> None:
    """With a token of role ``read``."""
    rules, target = (MONITORING / "alerts.yml").read_text(), f"127.0.0.1:{server.port}"
    with Prometheus(tmp_path, target, server.token("read", "prometheus"), rules) as prometheus:
        found = prometheus.series("phalanx_nodes")
        assert {series["metric"]["job"] for series in found} == {"phalanx"}
        (scraped,) = prometheus.asked("/api/v1/targets")["activeTargets"]
        assert (scraped["health"], scraped["lastError"]) == ("up", "")
        time.sleep(3)  # rules are evaluated once more
        (group,) = prometheus.asked("/api/v1/rules")["groups"]
        assert len(group["rules"]) == rules.count("- alert:")
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
