"""Agents and the server over real sockets: who is let in, and what their gangs do."""

from __future__ import annotations

import asyncio
import urllib.error
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from websockets.exceptions import InvalidStatus

from phalanx.cluster.protocol.messages import THIS_NODE, Heartbeat, WorkerExited
from phalanx.control.wire.agent_messages import PROTOCOL
from tests.control.servers import WORK, PlayedAgent, ServerProcess

RECONNECT_SECONDS = 3
POLICY = f"""
[health]
breaker_least_nodes = 1000
[timeouts]
heartbeat_ns = {2 * 10**9}
missed_heartbeats = 3
round_trip_ns = {10**9}
reconnect_ns = {RECONNECT_SECONDS * 10**9}
"""  # a program starts elsewhere when its lost node has been silent for as long as may be


def gang(partition: str) -> dict[str, Any]:
    """Two nodes of a partition, which only the test that names it has."""
    spec = {"name": "g", "partition": partition, "gang": {"replicas": 4, "slot_gpus": 2}}
    return {"spec": spec, "work": WORK}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on which tests may lose as many nodes as they like."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "policy.toml").write_text(POLICY)
    with ServerProcess(folder / "state", "--policy", str(folder / "policy.toml")) as running:
        yield running


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(250):
            await scenario()

    asyncio.run(bounded())


async def agents_of(
    server: ServerProcess, *names: str, partition: str = "default"
) -> list[PlayedAgent]:
    join = (server.state / "join.token").read_text().strip()
    made = [PlayedAgent([server.url], join, name, partition=partition) for name in names]
    for agent in made:
        agent.task = asyncio.create_task(agent.run())  # type: ignore[attr-defined]
    for agent in made:
        await agent.connected.wait()
    return made


async def ask(server: ServerProcess, method: str, path: str, body: Any = None) -> Any:
    status, answer = await asyncio.to_thread(server.call, method, path, body)
    assert status < 300, answer
    return answer


async def until(server: ServerProcess, path: str, true: Callable[[Any], bool]) -> Any:
    while True:
        answer = await ask(server, "GET", path)
        if true(answer):
            return answer
        await asyncio.sleep(0.05)


def test_a_gang_forms_runs_and_ends(server: ServerProcess) -> None:
    async def scenario() -> None:
        one, two = await agents_of(server, "gang-1", "gang-2", partition="runs")
        job = (await ask(server, "POST", "/v1/jobs", gang("runs")))["jobs"][0]
        found = await until(
            server, f"/v1/jobs/{job}", lambda answer: answer["job"]["state"] == "done"
        )
        assert found["job"]["step"] == one.steps_until
        assert one.started == two.started == [(job, 1)]
        why = await ask(server, "GET", f"/v1/jobs/{job}/why")
        ended = "its program ended by itself, without an error"
        assert ended in [each["text"] for each in why["history"]]
        # The log is read from the node that ran the rank, also when the job is over.
        text = await ask(server, "GET", f"/v1/jobs/{job}/logs?rank=3")
        assert text == f"job {job} rank 3 says hello\n"
        one.task.cancel(), two.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_keepers_of_one_job_get_one_key_and_those_of_another_another(
    server: ServerProcess,
) -> None:
    async def scenario() -> None:
        one, two = await agents_of(server, "key-1", "key-2", partition="keys")
        jobs = []
        for _ in range(2):
            jobs.append((await ask(server, "POST", "/v1/jobs", gang("keys")))["jobs"][0])
            path = f"/v1/jobs/{jobs[-1]}"
            await until(server, path, lambda answer: answer["job"]["state"] == "done")
        keys = dict(one.keys)
        assert one.keys == two.keys and sorted(keys) == jobs
        assert len(set(keys.values())) == 2 and all(len(key) == 32 for key in keys.values())
        one.task.cancel(), two.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_a_node_whose_connection_breaks_is_replaced(server: ServerProcess) -> None:
    async def scenario() -> None:
        names = ("swap-1", "swap-2", "swap-3")
        made = await agents_of(server, *names, partition="swap")
        for agent in made:
            agent.steps_until = 10_000
        job = (await ask(server, "POST", "/v1/jobs", gang("swap")))["jobs"][0]
        running = await until(
            server, f"/v1/jobs/{job}", lambda answer: answer["job"]["state"] == "running"
        )
        victim = next(agent for agent in made if agent.node.name in running["job"]["nodes"])
        victim.task.cancel()  # type: ignore[attr-defined]
        again = await until(
            server,
            f"/v1/jobs/{job}",
            lambda answer: (
                answer["job"]["generation"] > 1
                and answer["job"]["state"] == "running"
                and victim.node.name not in answer["job"]["nodes"]
            ),
        )
        assert set(again["job"]["nodes"]) <= set(names)
        await ask(server, "POST", f"/v1/jobs/{job}/cancel")
        for agent in made:
            agent.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


@pytest.mark.parametrize("dead", [True, False], ids=["dead", "alive"])
def test_a_node_that_peers_miss_is_given_up_only_if_it_does_not_answer(
    server: ServerProcess, dead: bool
) -> None:
    async def scenario() -> None:
        partition = f"missed-{dead}".lower()
        names = tuple(f"{partition}-{number}" for number in range(3))
        made = await agents_of(server, *names, partition=partition)
        for agent in made:
            agent.steps_until = 10_000
        job = (await ask(server, "POST", "/v1/jobs", gang(partition)))["jobs"][0]
        path = f"/v1/jobs/{job}"
        first = await until(server, path, lambda answer: answer["job"]["state"] == "running")
        before = first["job"]["nodes"]
        peer, other = (next(a for a in made if a.node.name == name) for name in before)
        other.mute = dead
        told = WorkerExited(
            node=THIS_NODE, job=job, generation=1, rank=0, step=1, cause="lost_peer"
        )
        await peer.tell(told)
        again = await until(
            server,
            path,
            lambda answer: answer["job"]["generation"] > 1 and answer["job"]["state"] == "running",
        )
        assert again["job"]["generation"] == 2
        assert (other.node.name in again["job"]["nodes"]) != dead
        await ask(server, "POST", f"{path}/cancel")
        for agent in made:
            agent.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_a_connection_that_is_back_at_once_disturbs_nothing(server: ServerProcess) -> None:
    async def scenario() -> None:
        made = await agents_of(server, "blink-1", "blink-2", partition="blink")
        for agent in made:
            agent.steps_until = 10_000
        job = (await ask(server, "POST", "/v1/jobs", gang("blink")))["jobs"][0]
        path = f"/v1/jobs/{job}"
        await until(server, path, lambda answer: answer["job"]["state"] == "running")
        assert made[0].socket is not None
        await made[0].socket.close()
        while made[0].times < 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(RECONNECT_SECONDS + 0.5)  # longer than the server waits for it
        found = await ask(server, "GET", path)
        assert found["job"]["generation"] == 1 and found["job"]["state"] == "running"
        await ask(server, "POST", f"{path}/cancel")
        for agent in made:
            agent.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_an_agent_that_comes_back_with_fewer_gpus_is_believed(server: ServerProcess) -> None:
    async def scenario() -> None:
        (agent,) = await agents_of(server, "smaller", partition="smaller")
        agent.node = structs.replace(agent.node, gpus=1)
        assert agent.socket is not None
        await agent.socket.close()
        await until(server, "/v1/nodes/smaller", lambda answer: answer["node"]["gpus"] == 1)
        refused = await asyncio.to_thread(server.call, "POST", "/v1/jobs", gang("smaller"))
        assert refused[0] >= 400  # and nobody is promised the GPU that is gone
        agent.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_another_version_is_refused_with_both_versions(server: ServerProcess) -> None:
    async def scenario() -> None:
        join = (server.state / "join.token").read_text().strip()
        old = PlayedAgent([server.url], join, "old")
        old.version = "9.9.9"
        await old.once(server.url)
        assert old.rejected[0].code == "version" and not old.rejected[0].retry
        assert "9.9.9" in old.rejected[0].message and "phalanx 0." in old.rejected[0].message
        strange = PlayedAgent([server.url], join, "strange")
        strange.protocol = 99
        await strange.once(server.url)
        assert "protocol 99" in strange.rejected[0].message
        assert f"protocol {PROTOCOL}" in strange.rejected[0].message

    play(scenario)


def test_the_second_of_two_agents_with_one_name_is_refused(server: ServerProcess) -> None:
    async def scenario() -> None:
        (first,) = await agents_of(server, "twin")
        second = PlayedAgent([server.url], first.join_token, "twin")
        second.machine = "another-machine"
        with pytest.raises(urllib.error.HTTPError) as refused:
            await second.join(server.url)
        assert refused.value.code == 409
        assert b"another machine is connected as twin" in refused.value.read()
        stolen = PlayedAgent([server.url], first.join_token, "twin")
        stolen.token, stolen.machine = first.token, "another-machine"
        await stolen.once(server.url)
        assert stolen.rejected[0].code == "wrong_node"
        assert first.connected.is_set()
        first.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_wrong_and_expired_join_tokens_are_refused_in_words(server: ServerProcess) -> None:
    async def scenario() -> None:
        expired = await asyncio.to_thread(server.token, "agent", "late", hours=1e-7)
        for token, words in ((expired, b"token expired at"), ("phx_join_x", b"not known here")):
            agent = PlayedAgent([server.url], token, "nobody")
            with pytest.raises(urllib.error.HTTPError) as refused:
                await agent.join(server.url)
            assert refused.value.code == 401 and words in refused.value.read()
        agent.token = "phx_agent_x"
        with pytest.raises(InvalidStatus) as closed:
            await agent.once(server.url)
        assert closed.value.response.status_code == 401

    play(scenario)


def test_a_clock_that_is_hours_off_does_no_harm_and_is_reported(server: ServerProcess) -> None:
    async def scenario() -> None:
        join = (server.state / "join.token").read_text().strip()
        agent = PlayedAgent([server.url], join, "skewed")
        agent.clock_skew_ns = 7 * 3600 * 10**9
        task = asyncio.create_task(agent.run())
        await agent.connected.wait()
        node = (await ask(server, "GET", "/v1/nodes/skewed"))["node"]
        assert node["state"] == "healthy"
        assert 7 * 3600 - 60 < node["clock_skew_seconds"] < 7 * 3600 + 60
        assert "the clock of skewed is 25" in server.output()
        task.cancel()

    play(scenario)


def test_an_agent_cannot_speak_for_another_node(server: ServerProcess) -> None:
    async def scenario() -> None:
        honest, liar = await agents_of(server, "honest", "liar")
        assert honest.agent is not None
        await liar._send(Heartbeat(node=honest.agent.node, incarnation=0))
        while not liar.rejected:
            await asyncio.sleep(0.02)
        assert liar.rejected[0].code == "wrong_node"
        assert honest.connected.is_set()
        for agent in (honest, liar):
            agent.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_garbage_from_an_agent_ends_its_connection_and_nothing_else(
    server: ServerProcess,
) -> None:
    async def scenario() -> None:
        (agent,) = await agents_of(server, "noisy")
        assert agent.socket is not None
        await agent.socket.send(b"\xc1 this is not msgpack")
        while not agent.rejected:
            await asyncio.sleep(0.02)
        assert agent.rejected[0].code == "protocol"
        assert (await ask(server, "GET", "/v1/status"))["leader"]
        agent.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_an_agent_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        "[timeouts]\nheartbeat_ns = 200000000\nmissed_heartbeats = 2\nround_trip_ns = 100000000\n"
    )

    async def scenario(server: ServerProcess) -> None:
        (agent,) = await agents_of(server, "mute")
        agent._beat = lambda: asyncio.sleep(3600)  # type: ignore[method-assign]
        assert agent.socket is not None
        await agent.socket.close()
        while agent.times < 2:  # connected again, without heartbeats
            await asyncio.sleep(0.02)
        await until(server, "/v1/nodes/mute", lambda a: a["node"]["state"] != "healthy")
        agent.task.cancel()  # type: ignore[attr-defined]

    with ServerProcess(tmp_path / "server", "--policy", str(policy)) as server:
        play(lambda: scenario(server))


def test_what_a_node_cannot_give_is_said_in_its_place(server: ServerProcess) -> None:
    async def scenario() -> None:
        agents = await agents_of(server, "d0", "d1", partition="detail")
        for agent in agents:
            agent.steps_until = 1 << 40  # it goes on and on
        uneven = gang("detail")
        uneven["spec"]["gang"]["replicas"] = 3
        job = (await ask(server, "POST", "/v1/jobs", uneven))["jobs"][0]
        await until(server, f"/v1/jobs/{job}", lambda a: a["job"]["phase"] == "running")
        records = await ask(server, "GET", f"/v1/jobs/{job}/records")
        assert records.count("it is played") == 2  # a line a node
        for path in ("records", "logs"):  # nodes have two ranks, the last one has one
            found = await asyncio.to_thread(server.call, "GET", f"/v1/jobs/{job}/{path}?rank=3")
            assert found[0] == 404 and "has ranks 0 to 2" in found[1]["error"]["message"]
        status, body = await asyncio.to_thread(server.call, "GET", f"/v1/jobs/{job}/traces/1")
        assert (status, body["error"]["code"]) == (404, "no_such_trace")
        status, body = await asyncio.to_thread(
            server.call, "GET", f"/v1/jobs/{job}/records?rank=99"
        )
        assert (status, body["error"]["code"]) == (404, "no_such_rank")
        far = f"/v1/jobs/{job}/records?first=1&last=900000"
        assert (await asyncio.to_thread(server.call, "GET", far))[0] == 400
        await ask(server, "POST", f"/v1/jobs/{job}/cancel")
        late = await asyncio.to_thread(server.call, "GET", f"/v1/jobs/{job}/records")
        assert late[0] == 409
        for agent in agents:
            agent.task.cancel()  # type: ignore[attr-defined]

    play(scenario)
