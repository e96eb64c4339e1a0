"""SIGKILL of the controller at random moments under load: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from tests.control.servers import WORK, PlayedAgent, ServerProcess

POLICY = """
[timeouts]
heartbeat_ns = 1000000000
round_trip_ns = 500000000
[health]
breaker_least_nodes = 1000
"""


async def submit_forever(server: ServerProcess, who: int, acknowledged: dict[str, int]) -> None:
    """Submits small jobs one after another; asks again with the same key until it has an answer."""
    for number in itertools.count():
        name = f"job-{who}-{number}"
        body = {"spec": {"name": name, "gang": {"slot_gpus": 1}, "retries": 1000}, "work": WORK}
        key = {"Idempotency-Key": name}
        while True:
            try:
                status, answer = await asyncio.to_thread(
                    server.call, "POST", "/v1/jobs", body, None, key
                )
            except (OSError, HTTPException, ValueError):  # also in the middle of an answer
                await asyncio.sleep(0.05)
                continue
            if status == 201:
                acknowledged[name] = answer["jobs"][0]
                break
            assert status in (429, 503), answer
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.02)


async def kill_and_check(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    (folder / "policy.toml").write_text(POLICY)
    server = ServerProcess(folder / "state", "--policy", str(folder / "policy.toml")).start()
    tasks: list[asyncio.Task[None]] = []
    try:
        join = (server.state / "join.token").read_text().strip()
        agents = [PlayedAgent([server.url], join, f"n{i}", gpus=8) for i in range(4)]
        for agent in agents:
            agent.steps_until, agent.step_seconds = 3, 0.01
            tasks.append(asyncio.create_task(agent.run()))
        for agent in agents:
            await agent.connected.wait()
        acknowledged: dict[str, int] = {}
        tasks += [
            asyncio.create_task(submit_forever(server, who, acknowledged)) for who in range(3)
        ]
        sequence = 0
        for _ in range(kills):
            await asyncio.sleep(chance.uniform(0.05, 1.0))
            with suppress(OSError, ValueError):
                status = (await asyncio.to_thread(server.call, "GET", "/v1/status"))[1]
                sequence = max(sequence, status.get("sequence", 0))
            known = dict(acknowledged)
            server.kill()
            server.start(wait=False)
            await asyncio.to_thread(server.wait, 60)
            assert await no_job_lost(server, known) >= sequence
        for task in tasks[len(agents) :]:
            task.cancel()
        await all_done(server)
        await no_job_lost(server, acknowledged)
        starts = Counter(start for agent in agents for start in agent.started)
        # One worker a job: a generation started twice would be the same job running twice.
        assert not [start for start, times in starts.items() if times > 1]
        assert "replays differently" not in server.output()
    finally:
        for task in tasks:
            task.cancel()
        server.kill()


async def no_job_lost(server: ServerProcess, acknowledged: dict[str, int]) -> int:
    """Every acknowledged job is there under its number, once; returns the last sequence."""
    jobs = await every_job(server)
    names = Counter(job["name"] for job in jobs)
    assert not [name for name, times in names.items() if times > 1]
    by_name = {job["name"]: job["id"] for job in jobs}
    missing = {n: number for n, number in acknowledged.items() if by_name.get(n) != number}
    assert not missing
    status = (await asyncio.to_thread(server.call, "GET", "/v1/status"))[1]
    return int(status["sequence"])


async def every_job(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = 0
    while True:
        path = f"/v1/jobs?state=all&limit=1000&after={after}"
        status, page = await asyncio.to_thread(server.call, "GET", path)
        assert status == 200, page
        found += page["jobs"]
        after = page["next_after"]
        if not after:
            return found


async def all_done(server: ServerProcess) -> None:
    deadline = time.monotonic() + 150
    while True:
        states = Counter(job["state"] for job in await every_job(server))
        if set(states) == {"done"}:
            return
        assert time.monotonic() < deadline, states
        await asyncio.sleep(0.2)


def test_a_few_kills_lose_nothing(tmp_path: Path) -> None:
    asyncio.run(kill_and_check(tmp_path, 4, seed=7))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_kills_lose_nothing(tmp_path: Path) -> None:
    """``PHALANX_KILLS=25 PHALANX_KILLS_SEED=3`` plays a piece of them."""
    kills, seed = (
        int(os.environ.get(name, usual))
        for name, usual in (("PHALANX_KILLS", 100), ("PHALANX_KILLS_SEED", 11))
    )
    asyncio.run(kill_and_check(tmp_path, kills, seed))
