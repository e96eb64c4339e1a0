"""What processes of a job find when they start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from phalanx.control.agent.config import AgentConfig
from phalanx.control.agent.jobs.local_job import LocalJob, NodeSettings
from phalanx.control.agent.jobs.start import Processes
from phalanx.control.agent.spawn.child import CannotStartError, secrets_of
from phalanx.control.wire.payload import Script
from phalanx.control.wire.zygote_messages import Spawn


class Orders:
    """A zygote that only notes what it is to start."""

    def __init__(self) -> None:
        self.spawned: list[Spawn] = []

    async def spawn(self, order: Spawn) -> None:
        self.spawned.append(order)


def test_a_keeper_has_the_keys_of_the_jobs_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watch(processes: Processes, job: LocalJob, ranks: int, seconds: float = 0.0) -> bool:
        return seconds > 0  # there is none before it was started

    monkeypatch.setattr(Processes, "watch", watch)
    settings = NodeSettings("n0", tmp_path, "127.0.0.1", False, 1, AgentConfig())
    zygote = Orders()
    job = LocalJob(1, tmp_path, tmp_path)
    job.work = Script(argv=("x",), environment={"AWS_ACCESS_KEY_ID": "key"})
    processes = Processes(settings, cast(Any, zygote), lambda fact: None)
    asyncio.run(processes.ensure_keeper(job, 0))
    (order,) = zygote.spawned
    assert order.role == "keeper" and order.environment["AWS_ACCESS_KEY_ID"] == "key"


def test_a_secret_that_cannot_be_read_is_told_by_workers_and_keeps_no_keeper_away() -> None:
    environment = {"KEY": "secret-file:/nowhere"}
    assert secrets_of(Spawn(key="k", role="keeper", environment=environment)) == {}
    with pytest.raises(CannotStartError, match="KEY cannot be read"):
        secrets_of(Spawn(key="w", role="program", environment=environment))
