"""Clusters of tests find a zygote that is ready, and end it as if it were their own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from phalanx.control.host.process_tree import own_children
from phalanx.testing.fork_server import VARIABLE, fork_server, fork_zygote


@pytest.fixture
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


async def connected(path: Path, log: Path) -> tuple[int, bool]:
    """The zygote that listens there, and whether it had to be started first; it is ended."""
    client = ZygoteClient(path, log, lambda end: None)
    await client.open()
    pid, started = client.pid, client._process is not None
    await client.leave()
    client.close()
    return pid, started


def test_zygotes_are_forked_from_one_process(nobody_asked: None, tmp_path: Path) -> None:
    before = set(own_children())
    with fork_server(tmp_path):
        (server,) = set(own_children()) - before
        for number in (1, 2):
            path, log = tmp_path / f"{number}.sock", tmp_path / f"{number}.log"
            fork_zygote(path, log)
            pid, started = asyncio.run(connected(path, log))
            assert not started and pid not in (0, server)
            assert not path.exists() and not Path(f"/proc/{pid}").exists()
    assert VARIABLE not in os.environ and set(own_children()) == before


def test_without_a_server_nothing_happens(nobody_asked: None, tmp_path: Path) -> None:
    fork_zygote(tmp_path / "zygote.sock", tmp_path / "zygote.log")
    assert list(tmp_path.iterdir()) == []
