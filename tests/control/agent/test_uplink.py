"""An agent without a server: whether one runs at all decides how long programs may go on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from phalanx.control.agent.uplink import Uplink
from phalanx.control.wire.agent_messages import JoinRequest
from tests.ports import free_port


class FakeAgent:
    """Hears when no server runs."""

    def __init__(self) -> None:
        self.without: list[float] = []

    def no_server(self, at: float) -> None:
        self.without.append(at)


@pytest.mark.parametrize("some_answer", [False, True])
def test_no_server_runs_where_all_of_their_machines_refuse(
    tmp_path: Path, some_answer: bool
) -> None:
    (tmp_path / "agent.token").write_text("token")
    join = JoinRequest(name="n", machine="m", key="")
    agent = FakeAgent()

    async def serve() -> None:
        asked = 0

        def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            asked += 1
            writer.close()

        silent = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        ports = [free_port(), silent.sockets[0].getsockname()[1] if some_answer else free_port()]
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        uplink = Uplink(urls, tmp_path, join, "token", "")
        serving = asyncio.create_task(uplink.serve(cast(Any, agent)))
        async with asyncio.timeout(120):
            while asked < 3 if some_answer else not agent.without:
                await asyncio.sleep(0.01)
        serving.cancel()
        silent.close()

    began = time.monotonic()
    asyncio.run(serve())
    assert bool(agent.without) != some_answer
    assert all(began <= at <= time.monotonic() for at in agent.without)
