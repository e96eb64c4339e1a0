"""What an agent does all the time goes on where it fails now and then."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path

import pytest

from phalanx.cluster.protocol.messages import Activity
from phalanx.control.agent import tasks
from phalanx.control.agent.jobs import program_activity
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.jobs.program_activity import ProgramActivity
from phalanx.control.agent.tasks import kept
from phalanx.control.wire.payload import Script


def with_program(folder: Path) -> LocalJob:
    """A job whose program runs."""
    job = LocalJob(1, folder, folder / "sockets")
    job.work, job.generation = Script(argv=("true",)), 1
    process = job.processes[0] = job.new_process(0, 0)
    process.pid = 4711
    return job


def test_a_program_is_looked_at_again_where_one_look_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be taken to stand still otherwise, and be ended for it."""
    looks = iter([OSError(errno.EMFILE, "Too many open files"), RuntimeError("no thread"), {}])

    def look() -> object:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(program_activity, "read_all", look)
    monkeypatch.setattr(program_activity, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(tasks, "AGAIN_SECONDS", 0.001)

    async def scenario() -> Activity:
        told: asyncio.Queue[Activity] = asyncio.Queue()
        activity = ProgramActivity({1: with_program(tmp_path)}, told.put_nowait, lambda: 7, dict)
        loop = asyncio.create_task(kept(activity.run))
        try:
            return await asyncio.wait_for(told.get(), 60.0)
        finally:
            loop.cancel()

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(scenario()).node == 7
    assert "ProgramActivity.run failed and goes on: OSError(24" in caplog.text


def test_what_fails_each_time_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "AGAIN_SECONDS", 0.0)
    left = 50

    async def fails() -> None:
        nonlocal left
        left -= 1
        if left:
            raise OSError(errno.ENOSPC, "No space left on device")

    with caplog.at_level(logging.ERROR):
        asyncio.run(kept(fails))
    assert left == 0 and caplog.text.count("failed and goes on") == 1
