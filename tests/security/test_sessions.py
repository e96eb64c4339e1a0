"""Nothing that was opened with a token outlives it, and nothing piles up or lies open."""

from __future__ import annotations

import asyncio
import json
import stat
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from phalanx.control.server.security.auth import (
    HOUR_NS,
    KEEP_HOURS,
    MOST_SESSIONS,
    AuthError,
    Tokens,
)
from phalanx.control.server.store.interface import EventStore, open_store
from tests.control.servers import WORK, PlayedAgent, ServerProcess


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EventStore]:
    found = open_store("", tmp_path)
    found.lead("http://a", "1")
    yield found
    found.close()


async def a_job(server: ServerProcess, name: str) -> tuple[PlayedAgent, int]:
    join = (server.state / "join.token").read_text().strip()
    agent = PlayedAgent([server.url], join, name, partition=name)
    agent.steps_until = 1 << 40
    agent.task = asyncio.create_task(agent.run())  # type: ignore[attr-defined]
    await agent.connected.wait()
    spec = {"name": name, "partition": name, "gang": {"replicas": 2, "slot_gpus": 2}}
    made = (await asyncio.to_thread(server.call, "POST", "/v1/jobs", {"spec": spec, "work": WORK}))[
        1
    ]
    path = f"/v1/jobs/{made['jobs'][0]}"
    await asyncio.to_thread(server.wait_for, path, lambda a: a["job"]["state"] == "running")
    return agent, int(made["jobs"][0])


async def token_of(server: ServerProcess, name: str, **more: Any) -> tuple[str, str]:
    body = {"name": name, "role": "admin", **more}
    made = (await asyncio.to_thread(server.call, "POST", "/v1/tokens", body))[1]
    return made["secret"], made["token"]["id"]


async def opened_shell(server: ServerProcess, job: int, secret: str) -> Any:
    url = server.url.replace("http", "ws", 1) + f"/v1/jobs/{job}/shell"
    socket = await connect(url, additional_headers={"Authorization": f"Bearer {secret}"})
    await socket.send("{}")
    return socket


def test_a_shell_ends_with_the_token_that_opened_it(server: ServerProcess) -> None:
    async def scenario() -> None:
        agent, job = await a_job(server, "shell")
        secret, number = await token_of(server, "alice")
        revoked = await opened_shell(server, job, secret)
        short, _ = await token_of(server, "bob", hours=10 / 3600)  # long enough to open one
        expiring = await opened_shell(server, job, short)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.call, "DELETE", f"/v1/tokens/{number}")
        for socket in (revoked, expiring):
            async with asyncio.timeout(60):
                last = json.loads(await socket.recv())
                assert "revoked or has expired" in last["problem"]
                with pytest.raises(ConnectionClosed):
                    await socket.recv()
        agent.task.cancel()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_a_followed_log_ends_with_the_token_that_reads_it(server: ServerProcess) -> None:
    async def scenario() -> None:
        agent, job = await a_job(server, "follow")
        secret, number = await token_of(server, "carol")
        url = f"{server.url}/v1/jobs/{job}/logs?follow=true"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {secret}"})

        def read() -> bytes:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bytes(answer.read())

        reading = asyncio.create_task(asyncio.to_thread(read))
        await asyncio.sleep(1.0)
        assert not reading.done()
        await asyncio.to_thread(server.call, "DELETE", f"/v1/tokens/{number}")
        async with asyncio.timeout(60):
            assert b"revoked or has expired" in await reading
        agent.task.cancel()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_sessions_and_links_end_with_what_they_were_made_with(server: ServerProcess) -> None:
    secret = server.token("admin", "dave", hours=1.0)
    ends = server.call("GET", "/v1/whoami", token=secret)[1]["token"]["expires_ns"]
    made = secret
    for _ in range(3):  # a session makes a link that makes a session, and so on
        link = server.call("POST", "/v1/login-links", token=made)[1]
        assert link["expires_ns"] <= ends
        session = server.call("POST", "/v1/login", token=link["code"])[1]
        assert session["token"]["expires_ns"] <= ends
        assert server.call("POST", "/v1/login", token=link["code"])[0] == 401  # good once
        made = session["secret"]
    assert server.call("GET", "/v1/whoami", token=made)[0] == 200
    number = server.call("GET", "/v1/whoami", token=secret)[1]["token"]["id"]
    server.call("DELETE", f"/v1/tokens/{number}")
    assert server.call("GET", "/v1/whoami", token=made)[0] == 401
    assert server.call("POST", "/v1/login-links", token=made)[0] == 401


def test_tokens_that_are_over_are_forgotten_after_a_day(store: EventStore) -> None:
    now = time.time_ns()
    tokens = Tokens(store, lambda: now)
    admin, _ = tokens.create("admin", "root")
    tokens.create("user", "late", hours=1)
    gone = tokens.create("user", "gone")[1]
    parent = tokens.create("user", "parent", hours=1)[1]
    tokens.create("user", "session", hours=1, parent=parent.id)
    used = tokens.create("login", "link", hours=0.5)[1]
    tokens.revoke(gone.id)
    tokens.revoke(used.id)
    assert tokens.prune() == 1 and len(tokens) == 5  # a link that is over goes at once
    now += (KEEP_HOURS + 2) * HOUR_NS
    tokens.prune()
    assert [token.name for token in tokens.all()] == ["root"]
    again = Tokens(store, lambda: now)
    assert [token.name for token in again.all()] == ["root"]
    assert again.check(admin).name == "root"
    assert store.keys().damaged == ()  # type: ignore[attr-defined]


def test_what_was_made_with_a_forgotten_token_is_worth_nothing(store: EventStore) -> None:
    tokens = Tokens(store)
    parent = tokens.create("user", "parent")[1]
    secret, _ = tokens.create("user", "session", parent=parent.id)
    tokens.drop(parent.id)
    with pytest.raises(AuthError):
        tokens.check(secret)


def test_no_file_of_a_server_is_readable_by_others(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    left = state / "history.sqlite"
    left.touch(mode=0o644)  # by an earlier release
    with ServerProcess(state) as server:

        async def scenario() -> None:
            agent, _ = await a_job(server, "files")
            agent.task.cancel()  # type: ignore[attr-defined]

        asyncio.run(scenario())
        server.stop()
    open_to_all = [
        str(path.relative_to(state))
        for path in sorted(state.rglob("*"))
        if path.name != "out.txt"  # the test's own
        and path.is_file()
        and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    assert open_to_all == []
    assert (state / "history.sqlite").exists() and (state / "server.json").exists()


def test_links_and_sessions_of_one_token_are_bounded_however_they_are_made(
    store: EventStore,
) -> None:
    tokens = Tokens(store)
    _, mine = tokens.create("read", "ann", team="red")
    _, others = tokens.create("read", "bob")
    _, kept = tokens.create("login", "bob", parent=others.id)
    newest = mine
    for _ in range(3 * MOST_SESSIONS):  # links of links, and of the token itself, in turn
        tokens.bound_sessions(newest.id)
        _, newest = tokens.create("read", "ann", parent=newest.id)
        tokens.bound_sessions(mine.id)
        tokens.create("login", "ann", parent=mine.id)
    assert len(tokens) <= MOST_SESSIONS + 4
    assert tokens.alive(mine.id) and tokens.alive(kept.id)
    assert len(Tokens(store)) == len(tokens)
