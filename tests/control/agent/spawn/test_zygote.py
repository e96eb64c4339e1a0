"""The zygote of a node lives on whatever its machine lacks: everything that runs there is its."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path

from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from phalanx.control.wire.zygote_messages import Ended, Spawn


def test_a_child_that_ends_while_there_are_no_descriptors_is_told_and_another_can_start(
    tmp_path: Path,
) -> None:
    async def scenario() -> list[str]:
        told: asyncio.Queue[Ended] = asyncio.Queue()
        zygote = ZygoteClient(tmp_path / "zygote.sock", tmp_path / "zygote.log", told.put_nowait)
        await zygote.open()
        zygote.lease(1.0)  # it does not outlive this test
        try:
            for key in ("one", "two"):
                await zygote.spawn(Spawn(key=key, role="store", host="127.0.0.1"))
            before = resource.prlimit(zygote.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(zygote.pid, resource.RLIMIT_NOFILE, (3, before[1]))
            ended = []
            for key in ("one", "two"):  # the second is told after it has looked what the first left
                zygote.signal(key, signal.SIGKILL)
                ended.append((await asyncio.wait_for(told.get(), 60.0)).key)
            resource.prlimit(zygote.pid, resource.RLIMIT_NOFILE, before)
            again = await zygote.spawn(Spawn(key="again", role="store", host="127.0.0.1"))
            return [*ended, again.key]
        finally:
            await zygote.leave()
            zygote.close()

    assert asyncio.run(scenario()) == ["one", "two", "again"]
