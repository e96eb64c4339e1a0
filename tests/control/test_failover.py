"""A pair of servers on one PostgreSQL: the leader dies, or hangs, and the other goes on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.control.servers import WORK, PlayedAgent, ServerProcess

GANG = {"spec": {"name": "g", "gang": {"replicas": 4, "slot_gpus": 2}}, "work": WORK}


@pytest.fixture
def pair(postgres_url: str, tmp_path: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """A leader and its standby, with the same tokens."""
    name = f"f{uuid.uuid4().hex}"
    with psycopg.connect(postgres_url, autocommit=True) as session:
        session.execute(f"CREATE DATABASE {name}")
    url = postgres_url.replace("/postgres?", f"/{name}?")
    leader = ServerProcess(tmp_path / "leader", "--store", url).start()
    standby = ServerProcess(tmp_path / "standby", "--store", url)
    standby.state.mkdir()
    shutil.copy(leader.token_file, standby.token_file)
    standby.start(wait=False)
    while True:
        with suppress(OSError):
            if standby.call("GET", "/healthz")[0] == 200:
                break
        time.sleep(0.05)
    yield leader, standby
    for server in (leader, standby):
        if server.process is not None:
            os.kill(server.process.pid, signal.SIGCONT)
        server.kill()


async def call(server: ServerProcess, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    return await asyncio.to_thread(server.call, method, path, body)


async def leads(server: ServerProcess) -> None:
    await asyncio.to_thread(server.wait, 90)


async def a_running_gang(leader: ServerProcess, standby: ServerProcess) -> list[PlayedAgent]:
    join = (leader.state / "join.token").read_text().strip()
    made = [PlayedAgent([leader.url, standby.url], join, f"n{i}") for i in range(2)]
    for agent in made:
        agent.steps_until = 10_000
        agent.task = asyncio.create_task(agent.run())  # type: ignore[attr-defined]
    for agent in made:
        await agent.connected.wait()
    assert (await call(leader, "POST", "/v1/jobs", GANG))[0] == 201
    while (await call(leader, "GET", "/v1/jobs/1"))[1]["job"]["state"] != "running":
        await asyncio.sleep(0.05)
    return made


async def goes_on(standby: ServerProcess, agents: list[PlayedAgent]) -> None:
    """The same gang, the same generation, known to the new leader with all its nodes."""
    for agent in agents:
        while agent.times < 2 or not agent.connected.is_set():
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    job = (await call(standby, "GET", "/v1/jobs/1"))[1]["job"]
    assert (job["state"], job["generation"]) == ("running", 1)
    assert [agent.started for agent in agents] == [[(1, 1)]] * 2
    assert (await call(standby, "GET", "/v1/status"))[1]["epoch"] == 2
    step = job["step"]
    while (await call(standby, "GET", "/v1/jobs/1"))[1]["job"]["step"] <= step:
        await asyncio.sleep(0.2)  # its progress is heard again


def test_the_standby_goes_on_when_the_leader_is_killed(
    pair: tuple[ServerProcess, ServerProcess],
) -> None:
    leader, standby = pair

    async def scenario() -> None:
        async with asyncio.timeout(280):
            agents = await a_running_gang(leader, standby)
            status, body = await call(standby, "GET", "/v1/jobs")
            assert status == 503 and leader.url in body["error"]["message"]
            assert f"{leader.url} leads" in standby.output()
            assert "admin.token (the" not in standby.output()  # it has none to show
            leader.kill()
            await leads(standby)
            await goes_on(standby, agents)
            assert (await call(standby, "POST", "/v1/jobs", GANG))[1]["jobs"] == [2]

    asyncio.run(scenario())


def test_a_leader_that_hangs_is_replaced_and_its_orders_count_no_more(
    pair: tuple[ServerProcess, ServerProcess],
) -> None:
    leader, standby = pair

    async def scenario() -> None:
        async with asyncio.timeout(280):
            agents = await a_running_gang(leader, standby)
            assert leader.process is not None
            os.kill(leader.process.pid, signal.SIGSTOP)
            await leads(standby)
            for agent in agents:  # their connections hang with it
                assert agent.socket is not None
                agent.socket.transport.abort()
            await goes_on(standby, agents)
            before = len(agents[0].epochs)
            os.kill(leader.process.pid, signal.SIGCONT)
            # It wakes up with an order of its own in mind, and finds that it leads no more.
            status, _ = await call(leader, "POST", "/v1/jobs/1/cancel")
            assert status == 503
            await asyncio.sleep(1.0)
            assert all(epoch == 2 for epoch in agents[0].epochs[before:])
            job = (await call(standby, "GET", "/v1/jobs/1"))[1]["job"]
            assert job["state"] == "running"
            status, body = await call(leader, "GET", "/v1/status")
            assert status == 503 and standby.url in body["error"]["message"]

    asyncio.run(scenario())
