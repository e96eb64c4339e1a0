"""What comes in is bounded, and nothing that was stored keeps a server from starting again."""

from __future__ import annotations

import asyncio
import json
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.placement.constraints import MOST_TERMS, parse
from phalanx.cluster.protocol.events import Event, Hold, Step, Submit
from phalanx.cluster.reasons import Reason
from phalanx.config import ConfigError
from phalanx.config.toml_text import MOST_DEPTH, parse_toml
from phalanx.control.server.alarms import Alarms
from phalanx.control.server.controller import Controller, UnavailableError
from phalanx.control.server.history.run_history import first_look
from phalanx.control.server.replay import recover
from phalanx.control.server.security.body_limits import (
    MOST_FIELDS,
    MOST_ITEMS,
    MOST_VALUES,
    OversizedBodyError,
    check,
)
from phalanx.control.server.store.sqlite import SqliteStore
from phalanx.control.wire.payload import TrainingWork, encode_payload
from phalanx.observe.tracker.findings import RunFinding
from tests.control.servers import WORK, ServerProcess

HOSTILE_TOML = [
    "a = " + "[" * 2000 + "]" * 2000,
    "a = " + "{b = " * 2000 + "1" + "}" * 2000,
    ".".join(["a"] * 50_000) + " = 1",
    "a = " + "9" * 5000,
    f"a = {1 << 70}",
    "train = 1",
    "[train]\nsteps = 0x" + "f" * 5000,
    "a = nan\nb = inf",
    "\ud800 = 1",
]


@pytest.mark.parametrize("toml", HOSTILE_TOML)
def test_hostile_job_texts_are_refused_quickly_or_read(toml: str) -> None:
    began = time.process_time()
    with suppress(tomllib.TOMLDecodeError):
        json.dumps(parse_toml(toml))
    assert time.process_time() - began < 20


@pytest.mark.parametrize("toml", HOSTILE_TOML)
def test_the_run_of_a_hostile_job_text_is_told_without_its_configuration(toml: str) -> None:
    from phalanx.cluster.jobs.job import ClusterJob

    payload = json.dumps({"kind": "Train", "toml": toml, "world_size": 1})
    spec = JobSpec(name="j", payload=payload)
    assert first_look(ClusterJob(id=1, spec=spec, submitted_ns=0)).config == {}


def test_ordinary_texts_are_read_as_before() -> None:
    text = 'a.b.c = """x\n[[[[ "\n"""\nd = [[1, 2], {e = \'[[\'}] # [[[[\n'
    text += "[f.g]\nh = 1.5\n[[i]]\nj = 2\n"
    assert parse_toml(text) == tomllib.loads(text)
    deep = "a = " + "[" * (MOST_DEPTH - 1) + "]" * (MOST_DEPTH - 1)
    assert parse_toml(deep) == tomllib.loads(deep)


def deep_list(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: deep_list(100_000),
        lambda: {"a": [0] * (MOST_ITEMS + 1)},
        lambda: {"a": {str(i): 0 for i in range(MOST_FIELDS + 1)}},
        lambda: {"a": [[0] * 10_000] * (MOST_VALUES // 10_000 + 1)},
        lambda: {"name": "x" * (1 << 18)},
        lambda: {"k" * 1000: 1},
        lambda: {"a": 1 << 63},
        lambda: {"a": -(1 << 63)},
        lambda: {"a": float("nan")},
        lambda: {"a": float("inf")},
        lambda: {"a": "b\0c"},
    ],
    ids=range(11),
)
def test_what_is_too_much_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(OversizedBodyError):
        check(make())


def test_a_constraint_takes_time_in_proportion_and_has_a_bound() -> None:
    began = time.process_time()
    for text in ("&".join(f"a{i}" for i in range(100_000)), "!" * 2000 + "a", "(" * 2000):
        with pytest.raises(ConfigError) as refused:
            parse(text) if not text.startswith("!") else parse(text * 2)
        assert len(str(refused.value)) < 500
    assert time.process_time() - began < 30  # ninety and more where it is quadratic
    assert len(parse("&".join(f"a{i}" for i in range(MOST_TERMS)))) == MOST_TERMS
    assert parse("!!a") == parse("a")


def test_the_order_of_a_long_chain_is_found_in_time_in_proportion() -> None:
    from phalanx.cluster.jobs.dependencies import workflow_order

    count = 20_000
    spec = JobSpec(name="j")
    chain = [
        Step(name=f"s{i}", spec=spec, after=(("afterok", f"s{i + 1}"),) if i + 1 < count else ())
        for i in range(count)
    ]
    began = time.process_time()
    assert workflow_order(chain) == list(reversed(range(count)))
    ring = [
        Step(name=f"s{i}", spec=spec, after=(("afterok", f"s{(i + 1) % count}"),))
        for i in range(count)
    ]
    found = workflow_order(ring)
    assert isinstance(found, Reason) and found.code == "cycle" and len(str(found)) < 1000
    assert time.process_time() - began < 60


class Following:
    """A controller whose listeners fail."""

    def __init__(self, folder: Path) -> None:
        self.store = SqliteStore(folder / "log.sqlite")
        self.epoch = self.store.lead("http://x", "1").epoch
        self.heard: list[int] = []
        self.told: list[RunFinding] = []

    def fails(self, event: Event, commands: object) -> None:
        raise RecursionError(f"event {event.sequence}")

    def hears(self, event: Event, commands: object) -> None:
        self.heard.append(event.sequence)

    async def run(self, body: Any) -> Controller:
        controller = Controller(self.store, recover(self.store, self.policy()), self.epoch)
        controller.alarms.told = self.told.append
        controller.listeners += [self.fails, self.hears]
        await controller.start()
        task = asyncio.create_task(controller.run())
        try:
            await asyncio.wait_for(controller.order(body), 30)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await controller.close()
        return controller

    def policy(self) -> Any:
        from phalanx.cluster.policy import Policy

        return Policy()


def test_a_listener_that_fails_is_told_of_and_the_others_hear(tmp_path: Path) -> None:
    following = Following(tmp_path)
    controller = asyncio.run(following.run(Hold(job=1, held=True)))
    assert len(following.heard) == 2  # the start, and the order
    assert controller.alarms.counts == {"Following": 2}
    (finding,) = following.told  # one a minute of one kind
    assert finding.kind == "server_fault" and "RecursionError" in finding.sentence
    again = asyncio.run(following.run(Hold(job=1, held=True)))
    assert again.core.sequence == 4
    following.store.close()


def test_an_order_that_cannot_be_written_down_is_refused_alone(tmp_path: Path) -> None:
    following = Following(tmp_path)
    bad = Submit(spec=JobSpec(name="\ud800"))
    with pytest.raises(UnavailableError, match="cannot be stored"):
        asyncio.run(following.run(bad))
    again = asyncio.run(following.run(Hold(job=1, held=True)))
    assert again.core.sequence > 1
    following.store.close()


def test_a_task_that_fails_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.control.server.alarms.AGAIN_SECONDS", 0.0)
    alarms, tries = Alarms(), []

    async def work() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("no")

    asyncio.run(alarms.kept("metrics", work))
    assert len(tries) == 3 and alarms.counts == {"metrics": 2}


@pytest.mark.timeout(120)
def test_no_submission_keeps_a_server_from_starting_again(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state") as server:
        for toml in HOSTILE_TOML[:-1]:
            work = {"kind": "Train", "toml": toml, "world_size": 1}
            payload = encode_payload(TrainingWork(toml=toml, world_size=1))
            for body in (
                {"spec": {"name": "j"}, "work": work},
                {"spec": {"name": "j", "payload": payload}},
                {"spec": {"name": "j", "constraint": "&".join(["a"] * 10_000)}, "work": WORK},
                {"spec": {"name": "j", "array": {"count": 100_000}}, "work": WORK},
            ):
                status, answer = server.call("POST", "/v1/jobs", body)
                assert status in (201, 400, 409, 422, 429), answer
        nested = b'{"spec": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        assert server.call("POST", "/v1/jobs", nested)[0] == 400
        server.stop()
        server.start()
        assert server.call("GET", "/v1/status")[0] == 200
        assert "Traceback" not in server.output()
