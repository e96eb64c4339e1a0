"""What workers say to their agent: an end without a noise."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from phalanx.control.ears import Ears


def unused(*_: object) -> Any:
    raise AssertionError("nobody has said anything")


def test_an_agent_that_ends_prints_nothing_of_its_connected_workers(tmp_path: Path) -> None:
    complaints: list[str] = []

    async def end_with_a_worker_connected() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: complaints.append(told["message"]))
        met = asyncio.Event()
        ears = Ears(unused, unused, unused)

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            loop.call_soon(met.set)  # once it waits for words
            await ears._meet(reader, writer)

        path = str(tmp_path / "agent.sock")
        server = await asyncio.start_unix_server(meet, path)
        _, worker = await asyncio.open_unix_connection(path)
        await met.wait()
        own = asyncio.current_task()
        ended = [task for task in asyncio.all_tasks() if task is not own]
        for task in ended:
            task.cancel()
        await asyncio.wait(ended)
        await asyncio.sleep(0)  # the callbacks of those that ended
        worker.close()
        server.close()

    asyncio.run(end_with_a_worker_connected())
    assert complaints == []
