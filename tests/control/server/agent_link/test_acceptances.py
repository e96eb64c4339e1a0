"""Burn-ins that a server orders: said again after a broken connection, and never twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from phalanx.control.agent.acceptance import NodeAcceptance
from phalanx.control.client.acceptance import accept_nodes, rank_nodes
from phalanx.control.client.client import ClientError
from phalanx.control.server.agent_link.acceptances import Acceptances
from phalanx.control.server.history.node_facts import NodeFactHistory
from phalanx.control.trust.acceptance_signature import sign_certificate
from phalanx.control.trust.node_key import NodeKey
from phalanx.control.wire.agent_messages import AcceptanceNews, StartAcceptance
from phalanx.control.wire.api_types import AcceptanceOut
from phalanx.doctor.acceptance.certificate import (
    SignedCertificate,
    make_certificate,
    read_signed,
)
from phalanx.doctor.acceptance.report import AcceptanceReport, AcceptanceRequest, LoadFigures
from phalanx.doctor.setup import NodeSetup
from phalanx.hardware.probe.description import NodeDescription

SETUP = NodeSetup(versions={}, settings={})


def certificate(node: str, rate: float, seconds: float = 60.0) -> bytes:
    load = LoadFigures(load="gemm", device="cuda:0", unit="flop_per_second", samples=3, median=rate)
    report = AcceptanceReport(
        node=node,
        began_ns=1,
        seconds=seconds,
        wanted_seconds=60.0,
        loads=[load],
        gpus=[],
        findings=[],
    )
    made = make_certificate(report, NodeDescription(), SETUP, "")
    return msgspec.json.encode(sign_certificate(made, NodeKey(bytes(32))))


class Pushed:
    """A hub of which every node is connected, and what it sent."""

    def __init__(self, path: Path) -> None:
        self.frames: list[bytes] = []
        self.acceptances = Acceptances(self._push, lambda order: str(order.request).encode())
        self.facts = self.acceptances.facts = NodeFactHistory(path / "nodes.sqlite")

    def _push(self, node: int, frame: bytes) -> bool:
        self.frames.append(frame)
        return node == 3

    def news(self, request: int, **more: object) -> None:
        news = AcceptanceNews(node=3, request=request, **more)  # type: ignore[arg-type]
        self.acceptances.receive(3, "a", news, 7)


@pytest.fixture
def pushed(tmp_path: Path) -> Pushed:
    return Pushed(tmp_path)


def test_an_order_is_said_again_until_it_has_ended(pushed: Pushed) -> None:
    known = pushed.acceptances.start(3, 60.0, ("gemm",), 0)
    assert known is not None
    pushed.acceptances.connected(3)
    assert pushed.frames == [str(known.order.request).encode()] * 2
    pushed.news(known.order.request, text="half")
    pushed.news(known.order.request + 1, text="of another one")
    assert list(known.lines) == ["half"] and not known.ended
    pushed.news(known.order.request, certificate=certificate("a", 5e14), end=True)
    assert known.ended and not known.problem
    pushed.acceptances.connected(3)
    assert len(pushed.frames) == 2 and not pushed.acceptances.stop(3)
    assert pushed.acceptances.start(4, 60.0, (), 0) is None  # it is not connected
    assert pushed.acceptances.of(4) is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (certificate("b", 5e14), "of another node"),
        (certificate("a", 5e14).replace(b"500000000000000", b"600000000000000"), "was changed"),
        (b"{}", "no certificate"),
    ],
)
def test_a_certificate_that_is_not_the_nodes_own_is_not_kept(
    pushed: Pushed, data: bytes, why: str
) -> None:
    known = pushed.acceptances.start(3, 60.0, ("gemm",), 0)
    assert known is not None
    pushed.news(known.order.request, certificate=data, end=True)
    assert why in known.problem and pushed.facts.certificate("a") is None


def test_speeds_of_a_whole_burn_in_are_facts(pushed: Pushed) -> None:
    pushed.news(1, certificate=certificate("a", 5e14, seconds=3.0), end=True)
    pushed.facts.store(pushed.facts._waiting.values())
    assert pushed.facts.certificate("a") is not None
    assert pushed.facts.facts({"a": ""}) == []  # it was cut short
    pushed.news(1, certificate=certificate("a", 5e14), end=True)
    pushed.facts.store(pushed.facts._waiting.values())
    (speed,) = pushed.facts.facts({"a": ""})
    assert (speed.aspect, speed.key, float(speed.value)) == ("speed", "gemm cuda:0", 5e14)


def test_nodes_of_a_burn_in_are_ranked() -> None:
    rates = {"a": 5e14, "b": 5.02e14, "c": 4.1e14, "d": 4.99e14}
    made = [read_signed(certificate(name, rate))[1] for name, rate in rates.items()]
    ranked = rank_nodes(made)["gemm cuda:0"]
    assert [(each.name, each.slow) for each in ranked] == [
        ("c", True),
        ("d", False),
        ("a", False),
        ("b", False),
    ]
    assert not rank_nodes(made[1:3])["gemm cuda:0"][0].slow  # of two nobody knows


def test_an_agent_says_its_last_word_again() -> None:
    said: list[msgspec.Struct] = []
    order = StartAcceptance(request=9, seconds=60.0, loads=("gemm",))

    async def scenario() -> None:
        agent = NodeAcceptance(None, [1], said.append)  # type: ignore[arg-type]
        agent.welcomed(3)
        for _ in range(2):
            agent.hear(order)
            await asyncio.sleep(0)

    asyncio.run(scenario())
    problem = "jobs run on this node: drain it first"
    assert said == [AcceptanceNews(node=3, request=9, problem=problem, end=True)] * 2


class PlayedClient:
    """A server with two nodes, of which one cannot be burnt in, and what it was asked."""

    def __init__(self, interrupt: str = "") -> None:
        self.asked: list[str] = []
        self._interrupt = interrupt

    def get(self, path: str, kind: type, **_: object) -> object:
        name = path.split("/")[3]
        drained = f"POST /v1/nodes/{name}/drain" in self.asked
        if drained and path == self._interrupt:
            self._interrupt = ""
            raise KeyboardInterrupt
        if kind is AcceptanceOut:
            signed = msgspec.json.decode(certificate(name, 1e12), type=SignedCertificate)
            return AcceptanceOut(
                node=name, ordered=True, ended=True, problem="", lines=(), certificate=signed
            )
        state = "draining" if drained else "healthy"
        return SimpleNamespace(node=SimpleNamespace(state=state, jobs=()))

    def post(self, path: str, body: object, kind: type) -> None:
        self.asked.append(f"POST {path}")
        if path == "/v1/nodes/b/acceptance":
            raise ClientError("the agent of b is not connected", 409, "not_connected")

    def delete(self, path: str, kind: type) -> None:
        self.asked.append(f"DELETE {path}")


REQUEST = AcceptanceRequest(node="", folder="/tmp", seconds=60.0)


def test_a_node_that_cannot_be_burnt_in_does_not_end_the_others() -> None:
    client = PlayedClient()
    results = accept_nodes(client, ["a", "b"], REQUEST, lambda _: None)  # type: ignore[arg-type]
    assert isinstance(results["a"], SignedCertificate)
    assert results["b"] == "the agent of b is not connected"
    assert client.asked[-2:] == ["POST /v1/nodes/a/readmit", "POST /v1/nodes/b/readmit"]


def test_an_interrupt_gives_nodes_back_and_claims_nothing_that_was_not_measured() -> None:
    client = PlayedClient("/v1/nodes/a")
    results = accept_nodes(client, ["a"], REQUEST, lambda _: None)  # type: ignore[arg-type]
    assert results == {"a": "it was interrupted before it began"}
    assert client.asked == ["POST /v1/nodes/a/drain", "POST /v1/nodes/a/readmit"]
    client = PlayedClient("/v1/nodes/a/acceptance")
    results = accept_nodes(client, ["a"], REQUEST, lambda _: None)  # type: ignore[arg-type]
    assert isinstance(results["a"], SignedCertificate)
    assert "DELETE /v1/nodes/a/acceptance" in client.asked
