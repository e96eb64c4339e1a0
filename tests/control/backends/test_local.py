"""Nodes of a local cluster come back, however soon after their end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phalanx.control.agent.spawn.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.backends.local import LocalCluster, LocalNode, processes_of
from phalanx.testing.fork_server import fork_zygote

SECONDS = 60


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[LocalCluster, LocalNode, ZygoteClient]]:
    """One node whose zygote runs, without an agent, and the parent of zygotes."""
    local = LocalCluster(folder, "", folder / "join.token", nodes=1, gpus_per_node=1)
    fork_zygote(local.parent_socket, local.parent_log)
    parent = local._parent_zygote
    await parent.open()
    try:
        async with asyncio.timeout(SECONDS):
            await local.start_zygote(local.nodes[0])
            yield local, local.nodes[0], parent
    finally:
        await local.end()


class MissingNetworks:
    """Networks that nobody made."""

    card = "lo"

    def space(self, node: int) -> str:
        return f"missing-{node}"

    def path(self, node: int) -> Path:
        return Path("/run/netns") / self.space(node)

    def address(self, node: int) -> str:
        return f"127.0.0.{node + 1}"


def wait_for_end(pid: int) -> None:
    """Until a process has ended, though nobody has asked for its exit code."""
    deadline = time.monotonic() + SECONDS
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_killed_zygote_is_not_taken_for_its_successor(tmp_path: Path) -> None:
    async def play() -> None:
        async with cluster(tmp_path) as (local, node, parent):
            first = parent.children[node.name].pid
            os.kill(parent.pid, signal.SIGSTOP)  # it has not seen the end when it is asked
            local.kill_node(node)
            wait_for_end(first)
            asyncio.get_running_loop().call_later(0.2, os.kill, parent.pid, signal.SIGCONT)
            await local.start_zygote(node)
            second = parent.children[node.name].pid
            assert second != first and processes_of(node) == [second]

    asyncio.run(play())


def test_a_zygote_that_ends_at_its_start_is_an_error(tmp_path: Path) -> None:
    async def play() -> None:
        async with cluster(tmp_path) as (local, node, _):
            local.kill_node(node)
            local._network = MissingNetworks()
            with pytest.raises(ZygoteError, match="the zygote of node-0 ended at its start"):
                await local.start_zygote(node)

    asyncio.run(play())
