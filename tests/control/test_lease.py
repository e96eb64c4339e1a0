"""Nothing outlives an agent that does not come back for longer than its lease."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

from phalanx.control.agent.rendezvous import meeting_name
from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from phalanx.control.wire.zygote_messages import Ended, Spawn
from phalanx.testing.fork_server import fork_zygote

LEASE_SECONDS = 1.0


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _running(pid)]


def _running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


async def start(folder: Path, lease_seconds: float) -> tuple[ZygoteClient, list[int]]:
    """A zygote with a store, a keeper and a program that starts one more."""
    fork_zygote(folder / "z.sock", folder / "zygote.log")
    client = ZygoteClient(folder / "z.sock", folder / "zygote.log", lambda end: None)
    await client.open()
    client.lease(lease_seconds)
    store = await client.spawn(Spawn(key="store", role="store", host="127.0.0.1"))
    keeper = await client.spawn(
        Spawn(
            key="job1/keeper",
            role="keeper",
            log=str(folder / "keeper.log"),
            socket=str(folder / "keeper.sock"),
            host="127.0.0.1",
            lease_seconds=lease_seconds,
        )
    )
    code = (
        "import os, subprocess, sys, time; "
        "child = subprocess.Popen(['sleep', '600']); "
        f"open({str(folder / 'child')!r} + '.new', 'w').write(str(child.pid)); "
        f"os.rename({str(folder / 'child')!r} + '.new', {str(folder / 'child')!r}); "
        "time.sleep(600)"
    )
    program = await client.spawn(
        Spawn(
            key="job1/worker0",
            role="program",
            log=str(folder / "worker.log"),
            argv=(sys.executable, "-c", code),
            rank=0,
            store=("127.0.0.1", store.port, meeting_name(bytes(32), 1, 1)),
            own_port=store.port,
        )
    )
    deadline = time.monotonic() + 90
    while not (folder / "child").exists() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    child = int((folder / "child").read_text())
    return client, [client.pid, store.pid, keeper.pid, program.pid, child]


def test_keeper_workers_and_what_they_started_end_with_the_lease(tmp_path: Path) -> None:
    async def leave_alone() -> list[int]:
        client, pids = await start(tmp_path, LEASE_SECONDS)
        assert alive(pids) == pids
        client.close()  # the agent is gone, and nobody says goodbye
        return pids

    pids = asyncio.run(leave_alone())
    deadline = time.monotonic() + 60
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(pids) == []
    assert not (tmp_path / "z.sock").exists() and not (tmp_path / "keeper.sock").exists()


def test_an_agent_that_comes_back_in_time_finds_them_and_programs_have_a_lease_of_their_own(
    tmp_path: Path,
) -> None:
    async def come_back() -> None:
        client, pids = await start(tmp_path, 60 * LEASE_SECONDS)
        client.close()
        await asyncio.sleep(1.5 * LEASE_SECONDS)
        ends: list[Ended] = []
        again = ZygoteClient(tmp_path / "z.sock", tmp_path / "zygote.log", ends.append)
        await again.open()
        assert set(again.children) == {"store", "job1/keeper", "job1/worker0"}
        assert alive(pids) == pids
        again.renew_programs(LEASE_SECONDS, LEASE_SECONDS)  # and nobody renews it
        deadline = time.monotonic() + 60
        while not (ends and alive(pids) == pids[:3]) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)  # its end is told after it has ended
        assert alive(pids) == pids[:3]  # the program and what it started are gone, nothing else
        assert "had not answered" in ends[-1].why and ends[-1].status == -signal.SIGKILL
        await again.leave()
        deadline = time.monotonic() + 90
        while alive(pids) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert alive(pids) == []

    asyncio.run(come_back())
