"""Whatever is sent to the API: it answers, it goes on, and it starts again afterwards."""

from __future__ import annotations

import gc
import http.client
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from phalanx.cluster.core import Core
from phalanx.cluster.job_relations import Array
from phalanx.cluster.jobs.job import GangShape, JobSpec
from phalanx.cluster.policy import QueuePolicy
from phalanx.cluster.protocol.events import EventBody, Step, Submit, SubmitWorkflow
from phalanx.control.server.app import ENDPOINTS
from phalanx.control.server.http.openapi import document
from tests.control.servers import ServerProcess
from tests.security.fuzzed_core import FuzzedCore, order_bodies
from tests.security.values import TEXTS, of_schema

# They run a planner or a simulation for seconds, or follow a log for as long as it is written.
LEFT_OUT = ("plan", "simulate", "job_plan", "job_logs", "profile_job", "openapi")
DOCUMENT = document(ENDPOINTS)
PARTS = DOCUMENT["components"]["schemas"]
PLACES = {"job": st.sampled_from(["1", "2", "3", "999"]), "node": st.just("n0")}


def requests() -> Any:
    """(method, path, body): anything that the document lists, mostly as it says."""
    found = []
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            if operation["operationId"] not in LEFT_OUT:
                found.append(_request(method.upper(), path, operation))
    return st.one_of(found)


def _request(method: str, path: str, operation: dict[str, Any]) -> Any:
    names = re.findall(r"\{(\w+)\}", path)
    places = st.fixed_dictionaries({name: PLACES.get(name, TEXTS) for name in names})
    body: Any = st.none()
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]["application/json"]
        body = of_schema(content["schema"], PARTS)
    return st.tuples(st.just(method), places.map(lambda at: _filled(path, at)), body)


def _filled(path: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        path = path.replace(f"{{{name}}}", quote(value[:200], safe="") or "x")
    return path


class Fuzzed:
    """A server that is asked everything, killed, and started again."""

    def __init__(self, folder: Path) -> None:
        self.server = ServerProcess(folder / "state", "--requests-per-second", "0").start()
        self.asked = 0

    def ask(self, method: str, path: str, body: Any) -> None:
        headers = {"Authorization": f"Bearer {self.server.admin()}"}
        data = None
        if body is not None:
            data = json.dumps(body, default=lambda each: each.hex()).encode()
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            answer.read(1 << 20)
        finally:
            connection.close()
        self.asked += 1
        assert answer.status < 500, (answer.status, method, path, str(body)[:2000])

    def round(self, number: int, examples: int) -> None:
        """Some batches of requests, then a kill and a start."""

        @seed(number)
        @settings(max_examples=examples, deadline=None, database=None)
        @given(st.lists(requests(), min_size=1, max_size=10))
        def batch(asked: list[tuple[str, str, Any]]) -> None:
            for each in asked:
                self.ask(*each)

        batch()
        self.server.kill()
        self.server.start()
        assert "Traceback" not in self.server.output()
        text = self.server.call("GET", "/metrics")[1]
        assert "phalanx_server_faults_total{" not in text, text


@pytest.mark.timeout(200)
def test_a_server_starts_again_after_whatever_it_was_asked(tmp_path: Path) -> None:
    fuzzed = Fuzzed(tmp_path)
    try:
        fuzzed.round(1, 25)
    finally:
        fuzzed.server.kill()
    assert fuzzed.asked > 20


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_server_starts_again_after_ten_minutes_of_everything(tmp_path: Path) -> None:
    fuzzed, until, number = Fuzzed(tmp_path), time.monotonic() + 600, 1
    try:
        while time.monotonic() < until:
            number += 1
            fuzzed.round(number, 100)
    finally:
        fuzzed.server.kill()


@settings(max_examples=25, deadline=None)
@given(st.lists(order_bodies(), min_size=1, max_size=20))
def test_whatever_is_ordered_the_core_restores_what_it_keeps(bodies: list[EventBody]) -> None:
    fuzzed = FuzzedCore(8)
    for body in bodies:
        fuzzed.handle(body)
    fuzzed.settle(20)
    assert Core.restore(fuzzed.core.snapshot()).snapshot() == fuzzed.core.snapshot()


def large_orders() -> list[EventBody]:
    """What a person may order that is most work for the core."""
    one = JobSpec(name="a", gang=GangShape(slot_gpus=1), array=Array(QueuePolicy().most_array))
    whole = JobSpec(name="b", gang=GangShape(replicas=12_000 * 8, slot_gpus=8))
    wide = JobSpec(name="c", constraint="&".join(f"f{i}" for i in range(64)))
    chain = tuple(
        Step(
            name=f"s{i}",
            spec=JobSpec(name=f"s{i}"),
            after=((("afterok", f"s{i - 1}"),) if i else ()),
        )
        for i in range(1000)
    )
    return [Submit(spec=one), Submit(spec=wide), SubmitWorkflow(steps=chain), Submit(spec=whole)]


@pytest.mark.timeout(300)
def test_no_order_holds_a_large_fleet_up() -> None:
    fuzzed = FuzzedCore(2_500)
    for body in large_orders():
        fuzzed.handle(body)
        fuzzed.settle(100)
    assert fuzzed.longest_seconds < 5.0, fuzzed.slowest


def play_orders(fuzzed: FuzzedCore, number: int) -> None:
    """Orders of all kinds, drawn anew for each number."""

    @seed(number)
    @settings(max_examples=50, deadline=None, database=None)
    @given(st.lists(order_bodies(), min_size=1, max_size=20))
    def some(bodies: list[EventBody]) -> None:
        for body in bodies:
            fuzzed.handle(body)
            fuzzed.settle(5)

    some()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_order_takes_a_fifth_of_a_second_at_12500_nodes() -> None:
    until, number = time.monotonic() + 600, 0
    while time.monotonic() < until:
        number += 1
        fuzzed = FuzzedCore(12_500)
        gc.collect()
        gc.freeze()  # as a server does when it has read its log
        for body in large_orders():
            fuzzed.handle(body)
            fuzzed.settle(100)
        play_orders(fuzzed, number)
        assert fuzzed.longest_seconds < 0.2, fuzzed.slowest
