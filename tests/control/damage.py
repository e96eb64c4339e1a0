"""State folders of servers that were stopped or killed, ways to damage them, and their starts."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from pathlib import Path

from msgspec import Struct

from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.node import Node
from phalanx.cluster.protocol.events import Hold, NodeJoined, Submit
from phalanx.cluster.protocol.messages import Inventory
from phalanx.control.server.leading import Leading
from phalanx.control.server.process import Options, Server
from phalanx.control.server.store.interface import StoreError

JOBS = 30
LOG = "log.sqlite"


class Started(Struct):
    """What came of a start."""

    jobs: list[str] = []  # that it has
    refusal: str = ""
    tokens: int = 0


async def _led(server: Server) -> tuple[asyncio.Task[None], Leading]:
    """Until it leads; StoreError or OSError as `phalanx up` would get them."""
    task = asyncio.create_task(server.lead_forever())
    settled = asyncio.create_task(server.settled.wait())
    async with asyncio.timeout(240):
        await asyncio.wait([task, settled], return_when=asyncio.FIRST_COMPLETED)
    settled.cancel()
    if server.leading is None:
        await task
    assert server.leading is not None
    return task, server.leading


def fill(
    state: Path, *, killed: bool, jobs: int = JOBS, snapshot_after: int = 12, holds: bool = False
) -> None:
    """A server that has acknowledged so many jobs and was killed, or stopped in order.

    ``holds``: last of all, somebody holds a job.
    """

    async def scenario() -> None:
        running = state if not killed else state.with_name(f"{state.name}-running")
        server = Server(Options(state=running))
        task, leading = await _led(server)
        joined = NodeJoined(node=Node(name="n0", gpus=1), inventory=Inventory())
        await leading.controller.order(joined)
        for number in range(jobs):
            spec = JobSpec(name=f"job-{number}")
            assert (await leading.controller.order(Submit(spec=spec))).accepted
            if number == snapshot_after:
                await leading.controller.snapshot()
        if holds:
            await leading.controller.order(Hold(job=jobs, held=True, request="last"))
        leading.tokens.create("user", "alice")
        if killed:
            # As the disk is between two writes: by the thread that makes them.
            leading.controller._writer.submit(shutil.copytree, running, state).result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()

    asyncio.run(scenario())


def start(state: Path) -> Started:
    """What a server says when it starts on a folder; anything but a refusal in words raises."""

    async def scenario() -> Started:
        try:
            server = Server(Options(state=state))
        except StoreError as error:
            return Started(refusal=str(error))
        try:
            task, leading = await _led(server)
        except StoreError as error:
            server.close()
            return Started(refusal=str(error))
        await asyncio.sleep(0)
        found = Started(
            jobs=sorted(job.spec.name for job in leading.core.view.jobs.values()),
            tokens=len(leading.tokens),
        )
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()
        return found

    return asyncio.run(scenario())


ALL_JOBS = sorted(f"job-{number}" for number in range(JOBS))


def flip(path: Path, at: int, bit: int) -> None:
    """One bit of a file is another one."""
    with path.open("rb+") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def damage(folder: Path, chance: random.Random) -> str:
    """Delete a file, cut it or flip one of its bits, mostly of the log; says what was done."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size]
    log = [path for path in files if path.name.startswith("log.")]
    path = chance.choice(log if chance.random() < 0.8 else files)
    size = path.stat().st_size
    match chance.choice(["delete", "cut", "flip", "flip", "flip", "flip"]):
        case "delete":
            path.unlink()
            return f"{path.name} deleted"
        case "cut":
            length = chance.randrange(size)
            os.truncate(path, length)
            return f"{path.name} cut to {length} of {size}"
        case _:
            at, bit = chance.randrange(size), chance.randrange(8)
            flip(path, at, bit)
            return f"{path.name}: bit {bit} of byte {at} of {size}"
