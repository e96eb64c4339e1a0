"""``phalanx top`` fits the smallest terminal and takes names literally."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from rich.console import Console

from phalanx.cli.cluster.top import look
from phalanx.cli.cluster.top_panes import NAMES, panes
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
@pytest.mark.parametrize("only", ["", *NAMES])
def test_panes_fit_the_terminal_and_markup_stays_text(
    busy: ServerProcess, width: int, height: int, only: str
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(panes(look(Client(busy.url, busy.state), None), width, height - 1, only))
    shown = out.getvalue()
    lines = shown.rstrip("\n").split("\n")
    assert len(lines) <= height
    assert all(len(line.rstrip()) <= width for line in lines)
    for number, name in enumerate(NAMES, 1):
        assert (f"─ {number} {name} ─" in shown) == (only in ("", name))
    if only in ("", "queue"):
        assert "[red]job-" in shown and ("more" in shown or height > 40)
    if only in ("", "fleet"):
        assert "Phalanx" in shown and "GPUs" in shown


def test_keys_enlarge_a_pane_and_leave(busy: ServerProcess) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    command = [sys.executable, "-m", "phalanx", "top", "--state", str(busy.state)]
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        assert "2 jobs ─" in _until(ours, "4 incidents ─")
        os.write(ours, b"3")
        shown = _until(ours, "3 queue ─", without="2 jobs ─")
        assert "WAITS FOR" in shown
        os.write(ours, b"q")
        assert running.wait(60) == 0
    finally:
        running.kill()
        os.close(ours)


def _until(file: int, text: str, without: str = "") -> str:
    """What a terminal shows, once a whole picture has a text and not another."""
    shown, deadline = "", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([file], [], [], 1.0)[0]:
            shown += os.read(file, 65536).decode(errors="replace")
        last = re.sub(r"\x1b\[[0-9;]*m", "", shown.rpartition("\x1b[H")[2])
        if text in last and "╰" in last and not (without and without in last):
            return last
    raise AssertionError(f"{text!r} was not shown: {shown[-2000:]!r}")
