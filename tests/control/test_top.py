"""``phalanx top`` fits the smallest terminal and takes names literally."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from phalanx.cli.cluster import top
from phalanx.control.client.client import Client
from tests.control.servers import WORK, PlayedAgent, ServerProcess


@pytest.fixture(scope="module")
def busy(server: ServerProcess) -> ServerProcess:
    """A server with more jobs than a small terminal has lines."""
    join = (server.state / "join.token").read_text().strip()

    async def scenario() -> None:
        agent = PlayedAgent([server.url], join, "n0")
        running = asyncio.create_task(agent.run())
        async with asyncio.timeout(90):
            await agent.connected.wait()
        for index in range(40):
            name = f"[red]job-{index}[bold] {'long ' * 20}"
            body = {"spec": {"name": name, "gang": {"slot_gpus": 2, "tensor": 2}}, "work": WORK}
            status, done = await asyncio.to_thread(server.call, "POST", "/v1/jobs", body)
            assert status == 201, done
        running.cancel()

    asyncio.run(scenario())
    return server


@pytest.mark.parametrize(("width", "height"), [(80, 24), (132, 43)])
def test_it_fits_the_terminal_and_markup_stays_text(
    busy: ServerProcess, width: int, height: int
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(top._look(Client(busy.url, busy.state), console))
    lines = out.getvalue().rstrip("\n").split("\n")
    assert len(lines) <= height
    assert all(len(line.rstrip()) <= width for line in lines)
    assert "Phalanx" in lines[0]
    assert "[red]job-" in out.getvalue() and "more" in out.getvalue()
