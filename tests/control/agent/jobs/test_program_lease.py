"""Programs may run for as long as the server is known to count on their node, and no longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import pytest

from phalanx.control.agent.jobs.program_lease import ProgramLease
from phalanx.control.agent.spawn.program_fence import ProgramFence
from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from phalanx.control.wire.zygote_messages import RenewPrograms


class FakeZygote:
    """Keeps what it is told."""

    def __init__(self, program_lease: float = 0.0) -> None:
        self.program_lease = program_lease
        self.renewed: list[tuple[float, float]] = []

    def renew_programs(self, lease: float, left: float) -> None:
        self.renewed.append((lease, left))


class FakeServer:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []

    def ask(self, answered: Callable[[], None]) -> None:
        self.asked.append(answered)


def lease_of(zygote: FakeZygote, server: FakeServer, *, runs: bool = True) -> ProgramLease:
    return ProgramLease(cast(ZygoteClient, zygote), server.ask, lambda: runs)


def test_a_lease_is_counted_from_the_question_and_not_from_its_answer() -> None:
    zygote, server = FakeZygote(), FakeServer()
    lease = lease_of(zygote, server)
    lease.agree(20.0, 5.0)
    time.sleep(0.05)
    server.asked[0]()
    ((seconds, left),) = zygote.renewed
    assert seconds == 20.0 and 10.0 < left <= 19.95


def test_an_answer_that_comes_too_late_renews_nothing() -> None:
    zygote, server = FakeZygote(), FakeServer()
    lease = lease_of(zygote, server)
    lease.agree(0.01, 5.0)
    time.sleep(0.02)
    server.asked[0]()
    assert zygote.renewed == []


def test_nobody_is_asked_where_no_program_runs() -> None:
    server = FakeServer()
    lease_of(FakeZygote(), server, runs=False).agree(20.0, 5.0)
    assert server.asked == []


def test_a_program_starts_only_when_the_server_has_answered() -> None:
    zygote, server = FakeZygote(), FakeServer()
    lease = lease_of(zygote, server, runs=False)
    lease.agree(20.0, 5.0)

    async def start() -> None:
        starting = asyncio.create_task(lease.held())
        await asyncio.sleep(0.05)
        assert not starting.done() and len(server.asked) == 1
        server.asked[0]()
        await asyncio.wait_for(starting, 120)
        await lease.held()  # it has been told for long enough

    asyncio.run(start())
    assert len(server.asked) == 1 and len(zygote.renewed) == 1


def test_an_older_server_asks_for_no_lease() -> None:
    lease = lease_of(FakeZygote(), FakeServer())
    lease.agree(0.0, 5.0)
    asyncio.run(asyncio.wait_for(lease.held(), 120))


def test_while_no_server_runs_an_agent_that_was_restarted_renews_as_the_last_one_did() -> None:
    zygote = FakeZygote(program_lease=20.0)
    lease_of(zygote, FakeServer()).counted_on(time.monotonic())
    assert [lease for lease, _ in zygote.renewed] == [20.0]


def test_a_zygote_ends_programs_whose_time_is_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    fence = ProgramFence()
    fence.programs = {"job1/worker0": None, "job2/worker0": None}
    assert fence.wait_seconds() is None and fence.due() == []  # nobody has said anything
    fence.renew(RenewPrograms(lease=20.0, left=15.0))
    fence.renew(RenewPrograms(lease=20.0, left=2.0))  # late on its way: nothing gets shorter
    now = 114.0
    assert fence.wait_seconds() == 1.0 and fence.due() == []
    assert fence.ended("job2/worker0") == ""
    now = 115.0
    assert fence.due() == ["job1/worker0"] and fence.due() == [] and fence.wait_seconds() is None
    assert "had not answered for 20 s" in fence.ended("job1/worker0")
    fence.programs["job1/worker0"] = None  # the next generation
    fence.renew(RenewPrograms(lease=20.0, left=20.0))
    assert fence.due() == [] and fence.wait_seconds() == 20.0
