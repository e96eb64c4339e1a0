"""A machine's clock is set by hours: the server's time goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster.protocol.messages import Heartbeat
from phalanx.control.agent.idle import ColdAgent
from phalanx.control.host.server_time import ServerTime

HOURS_NS = 2 * 3600 * 10**9
AT_NS = 10**18
HEARTBEAT_NS = 20_000_000


def set_clock(patch: pytest.MonkeyPatch, by_ns: int) -> None:
    real = time.time_ns
    patch.setattr(time, "time_ns", lambda: real() + by_ns)


@pytest.mark.parametrize("by_ns", [-HOURS_NS, HOURS_NS])
def test_the_servers_time_is_that_of_the_last_welcome_and_what_passed_since(
    monkeypatch: pytest.MonkeyPatch, by_ns: int
) -> None:
    server_time = ServerTime()
    server_time.set(AT_NS)
    before, skew_ns = server_time.now_ns(), server_time.skew_ns
    assert AT_NS <= before < AT_NS + HOURS_NS // 4
    set_clock(monkeypatch, by_ns)
    assert before <= server_time.now_ns() < AT_NS + HOURS_NS // 4
    # What was stamped with the clock as it is set now is told in the server's time all the same.
    assert abs(server_time.skew_ns + by_ns - skew_ns) < HOURS_NS // 4


@pytest.mark.parametrize("by_ns", [-HOURS_NS, HOURS_NS])
def test_an_agent_whose_clock_is_set_says_that_it_lives(
    monkeypatch: pytest.MonkeyPatch, by_ns: int
) -> None:
    sent: list[Any] = []
    uplink: Any = SimpleNamespace(send=sent.append)
    describer: Any = SimpleNamespace(node=SimpleNamespace(name="n"), unsaid=lambda: False)
    welcome: Any = SimpleNamespace(
        clock_ns=time.time_ns(), node=3, lease_ns=60 * 10**9, heartbeat_ns=HEARTBEAT_NS
    )

    async def scenario() -> None:
        agent = ColdAgent(describer, "machine", 1, uplink)
        agent.welcomed(welcome)
        set_clock(monkeypatch, by_ns)
        before = len(sent)
        beating = asyncio.create_task(agent._beat())
        async with asyncio.timeout(60):
            while len(sent) < before + 3:
                await asyncio.sleep(0.01)
        beating.cancel()

    asyncio.run(scenario())
    assert all(isinstance(message, Heartbeat) for message in sent[-3:])
