"""One machine cannot take another's place in the fleet."""

from __future__ import annotations

import asyncio
import json
import secrets
import stat
import urllib.error
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from benchmarks.agents import frame
from phalanx import __version__
from phalanx.cluster.policy import JoinPolicy
from phalanx.cluster.protocol.messages import Inventory
from phalanx.control.server.security.auth import Token, Tokens
from phalanx.control.server.security.joining import JoinAsked, Joining
from phalanx.control.server.store.interface import StoreError, open_store
from phalanx.control.trust.node_key import KEY_FILE, NodeKey, fingerprint
from phalanx.control.wire import agent_messages as wire
from tests.commands import run_phalanx
from tests.control.servers import PlayedAgent, ServerProcess
from tests.security.agents import RootAgent, wait_for


def play(scenario: Callable[[], Awaitable[Any]], seconds: float = 250.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await scenario()

    asyncio.run(limited())


async def connected(server: ServerProcess, name: str, **more: Any) -> PlayedAgent:
    join = (server.state / "join.token").read_text().strip()
    agent = PlayedAgent([server.url], join, name, **more)
    agent.task = asyncio.create_task(agent.run())  # type: ignore[attr-defined]
    await agent.connected.wait()
    return agent


async def refusal(agent: PlayedAgent, server: ServerProcess) -> tuple[int, str]:
    """How the server refuses a join."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        await agent.join(server.url)
    return refused.value.code, json.loads(refused.value.read())["error"]["code"]


def impostor(of: PlayedAgent, server: ServerProcess) -> PlayedAgent:
    """Somebody with the join token and the machine file of a node, but without its key."""
    other = PlayedAgent([server.url], of.join_token, of.node.name)
    other.machine = of.machine
    return other


def test_join_token_and_machine_file_do_not_take_over_a_connected_node(
    server: ServerProcess,
) -> None:
    async def scenario() -> None:
        honest = await connected(server, "honest-1")
        assert await refusal(impostor(honest, server), server) == (409, "name_taken")
        # The public key is no secret: a token comes of it, and nothing else.
        clone = impostor(honest, server)
        clone.key = honest.key
        await clone.join(server.url)
        clone.key = NodeKey(secrets.token_bytes(32))
        await clone.once(server.url)
        assert [each.code for each in clone.rejected] == ["wrong_key"]
        # Nor does the node's own token, without its key.
        thief = impostor(honest, server)
        thief.token = honest.token
        await thief.once(server.url)
        assert [each.code for each in thief.rejected] == ["wrong_key"]
        assert honest.connected.is_set() and honest.times == 1 and not honest.rejected
        assert honest.socket is not None
        await honest.socket.close()
        while honest.times < 2:  # its token is as good as before
            await asyncio.sleep(0.02)
        honest.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_a_proof_is_good_for_one_connection(server: ServerProcess) -> None:
    async def scenario() -> None:
        honest = await connected(server, "honest-2")
        seen: list[bytes] = []
        sign = honest.proof
        honest.proof = lambda socket: seen.append(sign(socket)) or seen[-1]  # type: ignore
        assert honest.socket is not None
        await honest.socket.close()
        while honest.times < 2:
            await asyncio.sleep(0.02)
        thief = impostor(honest, server)
        thief.token, thief.key = honest.token, honest.key
        thief.proof = lambda _: seen[0]  # type: ignore[method-assign]
        await thief.once(server.url)
        assert [each.code for each in thief.rejected] == ["wrong_key"]
        honest.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_a_token_that_is_revoked_behind_the_handshake_lets_nobody_in(server: ServerProcess) -> None:
    async def scenario() -> None:
        node = await connected(server, "revoked-1")
        node.task.cancel()  # type: ignore[attr-defined]
        prove = node.proof

        def revoked_meanwhile(socket: ClientConnection) -> bytes:
            tokens = server.call("GET", "/v1/tokens")[1]["tokens"]
            mine = [each["id"] for each in tokens if each["name"] == "revoked-1"]
            for number in mine:
                server.call("DELETE", f"/v1/tokens/{number}")
            return prove(socket)

        node.proof = revoked_meanwhile  # type: ignore[method-assign]
        await node.once(server.url)
        assert [each.code for each in node.rejected] == ["replaced"]
        assert "revoked" in node.rejected[0].message

    play(scenario)


def test_an_agent_says_who_it_is_once(server: ServerProcess) -> None:
    async def scenario() -> None:
        node = PlayedAgent([server.url], (server.state / "join.token").read_text().strip(), "twice")
        await node.join(server.url)
        headers = {"Authorization": f"Bearer {node.token}"}
        address = server.url.replace("http", "ws", 1) + wire.AGENT_PATH
        async with connect(address, additional_headers=headers, compression=None) as socket:
            register = wire.Register(
                node=node.node,
                machine=node.machine,
                inventory=Inventory(),
                version=__version__,
                clock_ns=0,
                key=node.key.public,
                proof=node.proof(socket),
            )
            socket.transport.write(2 * frame(register))  # in one piece, so that both are read
            first = wire.decode_down(await socket.recv())
            assert isinstance(first, wire.Rejected) and first.code == "protocol"

    play(scenario)


def test_a_node_that_lost_its_token_comes_back_with_its_key(server: ServerProcess) -> None:
    async def scenario() -> None:
        node = await connected(server, "forgetful")
        node.task.cancel()  # type: ignore[attr-defined]
        again = impostor(node, server)
        again.key, old = node.key, node.token
        again.task = asyncio.create_task(again.run())  # type: ignore[attr-defined]
        await again.connected.wait()
        assert not again.rejected
        node.token = old
        with pytest.raises(InvalidStatus):  # what it had before is worth nothing now
            await node.once(server.url)
        again.task.cancel()  # type: ignore[attr-defined]

    play(scenario)


def test_a_join_token_is_bound_to_count_and_network(server: ServerProcess) -> None:
    async def scenario() -> None:
        one = await asyncio.to_thread(server.token, "agent", "one", uses=1)
        first, second = (PlayedAgent([server.url], one, name) for name in ("uses-1", "uses-2"))
        await first.join(server.url)
        assert await refusal(second, server) == (403, "token_used_up")
        far = await asyncio.to_thread(server.token, "agent", "far", network="10.0.0.0/8")
        assert await refusal(PlayedAgent([server.url], far, "far"), server) == (
            403,
            "wrong_network",
        )
        near = await asyncio.to_thread(server.token, "agent", "near", network="127.0.0.0/8")
        await PlayedAgent([server.url], near, "near").join(server.url)
        for body in ({"network": "10.0.0.0/99"}, {"role": "user", "uses": 3}):
            told = await asyncio.to_thread(
                server.call, "POST", "/v1/tokens", {"name": "x", "role": "agent", **body}
            )
            assert told[0] == 409, told

    play(scenario)


def phalanx(server: ServerProcess, *words: str) -> str:
    done = run_phalanx(*words, "--state", str(server.state))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_new_nodes_wait_for_approval_where_the_site_wants_that(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[join]\napproval = "manual"\n')

    async def scenario(server: ServerProcess) -> None:
        join = (server.state / "join.token").read_text().strip()
        good, bad = (PlayedAgent([server.url], join, name) for name in ("good", "bad"))
        for agent in (good, bad):
            await agent.once(server.url)
            assert [each.code for each in agent.rejected] == ["pending"]
            assert agent.rejected[0].retry
            assert fingerprint(agent.key.public) in agent.rejected[0].message
        assert (await asyncio.to_thread(server.call, "GET", "/v1/nodes"))[1]["nodes"] == []
        listed = await asyncio.to_thread(phalanx, server, "nodes", "pending")
        assert "good" in listed and fingerprint(good.key.public) in listed
        await asyncio.to_thread(phalanx, server, "nodes", "approve", "good")
        await asyncio.to_thread(phalanx, server, "nodes", "reject", "bad")
        task = asyncio.create_task(good.run())
        await good.connected.wait()
        with pytest.raises(InvalidStatus):
            await bad.once(server.url)
        bad.token = ""
        assert await refusal(bad, server) == (403, "rejected")
        task.cancel()

    with ServerProcess(tmp_path / "server", "--policy", str(policy)) as server:
        play(lambda: scenario(server))


def test_a_reinstalled_node_is_let_in_by_approval_alone(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[join]\nrekey = "manual"\n')

    async def scenario(server: ServerProcess) -> None:
        old = await connected(server, "again")
        old.task.cancel()  # type: ignore[attr-defined]
        gone = lambda answer: not answer["node"]["connected"]  # noqa: E731
        await asyncio.to_thread(server.wait_for, "/v1/nodes/again", gone)
        new = impostor(old, server)
        await new.once(server.url)
        assert [each.code for each in new.rejected] == ["pending"]
        back = asyncio.create_task(old.run())  # a stranger's request costs it nothing
        await old.connected.wait()
        await asyncio.to_thread(phalanx, server, "nodes", "approve", "again")
        task = asyncio.create_task(new.run())
        await new.connected.wait()
        back.cancel()
        with pytest.raises(InvalidStatus):
            await old.once(server.url)
        task.cancel()

    with ServerProcess(tmp_path / "server", "--policy", str(policy)) as server:
        play(lambda: scenario(server))


def test_a_real_agent_keeps_its_key_to_itself_and_comes_back_with_it(
    server: ServerProcess, tmp_path: Path
) -> None:
    with RootAgent(server, tmp_path, "real", "--as-agent", "--no-standby") as agent:
        assert wait_for(lambda: "joined as node" in agent.log())
        for path in (agent.state / KEY_FILE, agent.state / "machine"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with RootAgent(server, tmp_path, "real", "--as-agent", "--no-standby") as agent:
        assert wait_for(lambda: "joined as node" in agent.log())
    (agent.state / "agent.token").unlink()
    (agent.state / KEY_FILE).unlink()  # installed anew, on the server's own machine
    with RootAgent(server, tmp_path, "real", "--as-agent", "--no-standby") as agent:
        assert wait_for(lambda: "joined as node" in agent.log())


def test_revoking_an_agents_token_ends_its_connection(server: ServerProcess) -> None:
    async def scenario() -> None:
        agent = await connected(server, "cut-off")
        listed = (await asyncio.to_thread(server.call, "GET", "/v1/tokens"))[1]["tokens"]
        (token,) = [each for each in listed if each["node"] == "cut-off"]
        assert agent.socket is not None
        await asyncio.to_thread(server.call, "DELETE", f"/v1/tokens/{token['id']}")
        while agent.connected.is_set():
            await asyncio.sleep(0.02)
        agent.task.cancel()  # type: ignore[attr-defined]
        with pytest.raises(InvalidStatus):
            await agent.once(server.url)

    play(scenario)


def asked(join: Token, number: int, key: str = "") -> JoinAsked:
    return JoinAsked(join, f"n{number}", f"m{number}", key or f"{number:064x}", connected=False)


def join_all(joining: Joining, all_asked: list[JoinAsked]) -> list[Any]:
    """Tokens of all that join at a time, or the errors."""

    async def come() -> list[Any]:
        found = await asyncio.gather(*map(joining.join, all_asked), return_exceptions=True)
        return [each if isinstance(each, BaseException) else each[1] for each in found]

    return asyncio.run(come())


def test_nodes_that_join_together_are_stored_together_each_by_its_right(tmp_path: Path) -> None:
    store = open_store("", tmp_path)
    store.lead("http://a", "1")
    tokens = Tokens(store)
    joining = Joining(tokens, JoinPolicy(), own=False)
    join = tokens.create("join", "fleet", uses=5)[1]
    writes = []
    keep = store.put_tokens
    store.put_tokens = lambda records: (writes.append(len(records)), keep(records))[1]  # type: ignore[method-assign, func-returns-value]
    made = join_all(joining, [asked(join, i) for i in range(7)])
    assert [isinstance(each, Token) for each in made] == [True] * 5 + [False] * 2
    assert {each.code for each in made[5:]} == {"token_used_up"}
    assert writes == [6], "five nodes, and how often the join token was used"
    assert Tokens(store).all() == tokens.all()

    several = tokens.create("join", "fleet")[1]
    keys = [asked(several, 9, f"{key:064x}") for key in range(8)]
    found = join_all(joining, keys)  # many machines under one name
    assert [isinstance(each, Token) for each in found] == [True] * 4 + [False] * 4
    store.close()


def test_a_store_that_fails_leaves_no_node_half_joined(tmp_path: Path) -> None:
    store = open_store("", tmp_path)
    store.lead("http://a", "1")
    tokens = Tokens(store)
    joining = Joining(tokens, JoinPolicy(), own=False)
    join = tokens.create("join", "fleet", uses=3)[1]
    keep, before = store.put_tokens, tokens.all()

    def full(records: object) -> None:
        raise StoreError("no space left on device")

    store.put_tokens = full  # type: ignore[method-assign]
    lost = join_all(joining, [asked(join, i) for i in range(3)])
    assert [type(each) for each in lost] == [StoreError] * 3
    assert tokens.all() == before and tokens.of_node("n0") == []
    store.put_tokens = keep  # type: ignore[method-assign]
    assert all(isinstance(each, Token) for each in join_all(joining, [asked(join, 1)]))
    store.close()


def test_agents_that_come_together_are_stored_together(tmp_path: Path) -> None:
    store = open_store("", tmp_path)
    store.lead("http://a", "1")
    tokens = Tokens(store)
    joining = Joining(tokens, JoinPolicy(), own=False)
    join = tokens.create("join", "fleet")[1]
    (old,) = join_all(joining, [asked(join, 0, "ab" * 32)])
    made = join_all(joining, [asked(join, i) for i in range(50)])
    writes = []
    keep = store.put_tokens
    store.put_tokens = lambda records: (writes.append(len(records)), keep(records))[1]  # type: ignore[method-assign, func-returns-value]

    async def all_come() -> list[Token]:
        return await asyncio.gather(*(joining.confirm(token) for token in made))

    confirmed = asyncio.run(all_come())
    assert [token.unconfirmed for token in confirmed] == [False] * 50
    assert [token.id for token in confirmed] == [token.id for token in made]
    assert sum(writes) == 50 and len(writes) <= 2
    assert tokens.get(old.id) is None  # what the node asked for before is worth nothing now
    assert all(not token.unconfirmed for token in Tokens(store).all())
    assert store.keys().damaged == ()  # type: ignore[attr-defined]
    store.close()


def test_a_store_that_fails_is_told_to_every_agent_and_the_next_ones_are_stored(
    tmp_path: Path,
) -> None:
    store = open_store("", tmp_path)
    store.lead("http://a", "1")
    tokens = Tokens(store)
    joining = Joining(tokens, JoinPolicy(), own=False)
    join = tokens.create("join", "fleet")[1]
    made = join_all(joining, [asked(join, i) for i in range(3)])
    keep = store.put_tokens

    def full(records: object) -> None:
        raise StoreError("no space left on device")

    async def come() -> list[Token | BaseException]:
        waiting = (joining.confirm(token) for token in made)
        return await asyncio.gather(*waiting, return_exceptions=True)

    store.put_tokens = full  # type: ignore[method-assign]
    assert [type(each) for each in asyncio.run(come())] == [StoreError] * 3
    assert all(token.unconfirmed for token in tokens.all() if token.role == "agent")
    store.put_tokens = keep  # type: ignore[method-assign]
    assert [each.unconfirmed for each in asyncio.run(come())] == [False] * 3  # type: ignore[union-attr]
    store.close()
