"""The task that owns the core: stored first, then handled, then sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.cluster.handlers import HANDLERS
from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.node import Node
from phalanx.cluster.policy import Policy, QueuePolicy
from phalanx.cluster.protocol.commands import Accept, Command
from phalanx.cluster.protocol.events import (
    Cancel,
    Event,
    NodeJoined,
    NodeRepaired,
    NodeSilent,
    Submit,
    Tick,
)
from phalanx.cluster.protocol.messages import Inventory
from phalanx.control.server.controller import Controller, CoreFailedError, UnavailableError
from phalanx.control.server.replay import recover
from phalanx.control.server.store.chain import START
from phalanx.control.server.store.interface import CommandRow, Row, StoreError, tail
from phalanx.control.server.store.sqlite import SqliteStore
from tests.control.sql import change_file


class WatchedStore(SqliteStore):
    """A real store that can be held up, fail, and counts its commits."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.commits = 0
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()  # with a closed gate
        self.failing = False

    def append(self, events: Sequence[Row], commands: Sequence[CommandRow]) -> None:
        if not self.gate.is_set():
            self.entered.set()
        self.gate.wait(100)
        if self.failing:
            raise StoreError("no space left on device")
        self.commits += 1
        super().append(events, commands)


def joined(name: str) -> NodeJoined:
    return NodeJoined(node=Node(name=name, gpus=8), inventory=Inventory())


class Running:
    """A controller on a store, with what it sent."""

    def __init__(self, folder: Path) -> None:
        self.store = WatchedStore(folder / "log.sqlite")
        self.lead = self.store.lead("http://x", "1")
        self.sent: list[tuple[Event, Sequence[Command]]] = []

    async def __aenter__(self) -> Running:
        self.found = recover(self.store, Policy())
        self.controller = Controller(self.store, self.found, self.lead.epoch)
        self.controller.listeners.append(lambda *handled: self.sent.append(handled))
        await self.controller.start()
        self.task = asyncio.create_task(self.controller.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        self.store.gate.set()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.controller.close()
        self.store.close()


async def placed(running: Running, job: int) -> None:
    """Until the queue was looked at and has given a job its nodes, and all of it is stored."""
    async with asyncio.timeout(60):
        while running.controller.core.view.jobs[job].state == "pending" or stirs(running):
            await asyncio.sleep(0.01)


def stirs(running: Running) -> bool:
    """Whether a deadline is near: its event might be stored, and not handled, at any moment."""
    deadline = running.controller.core.next_deadline_ns()
    return deadline is not None and deadline < running.controller.clock.now_ns() + 2 * 10**9


def test_nothing_leaves_before_its_event_is_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Running(tmp_path) as running:
            await running.controller.order(joined("a"))
            running.store.gate.clear()
            order = asyncio.create_task(running.controller.order(Submit(spec=JobSpec(name="j"))))
            await asyncio.sleep(0.1)
            assert not order.done()
            assert not any(isinstance(event.body, Submit) for event, _ in running.sent)
            assert not running.controller.core.view.jobs
            running.store.gate.set()
            outcome = await order
            assert outcome.accepted and outcome.jobs == (1,)
            stored = [row[0] for row in running.store.events(0, 100)]
            assert outcome.sequence in stored

    asyncio.run(scenario())


def test_what_is_being_stored_when_the_server_stops_is_answered_and_not_replayed(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with Running(tmp_path) as running:
            await running.controller.order(joined("a"))
            running.store.gate.clear()
            order = asyncio.create_task(running.controller.order(Submit(spec=JobSpec(name="j"))))
            await asyncio.to_thread(running.store.entered.wait, 60)
        outcome = await order
        assert outcome.accepted and outcome.jobs == (1,)
        async with Running(tmp_path) as again:
            assert again.found.replayed == 0 and list(again.controller.core.view.jobs) == [1]

    asyncio.run(scenario())


def test_many_orders_share_a_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Running(tmp_path) as running:
            await running.controller.order(joined("a"))
            before = running.store.commits
            spec = JobSpec(name="j")
            orders = [running.controller.order(Submit(spec=spec)) for _ in range(500)]
            outcomes = await asyncio.gather(*orders)
            assert sorted(o.jobs[0] for o in outcomes) == list(range(1, 501))
            assert running.store.commits - before <= 5

    asyncio.run(scenario())


def test_the_same_request_is_done_once_also_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Running(tmp_path) as running:
            await running.controller.order(joined("a"))
            submit = Submit(spec=JobSpec(name="j"))
            both = await asyncio.gather(
                *(running.controller.order(submit, "same") for _ in range(2))
            )
            third = await running.controller.order(submit, "same")
            assert {o.jobs for o in (*both, third)} == {(1,)}
            await running.controller.snapshot()
            kept = await running.controller.order(submit, "after the snapshot")
        async with Running(tmp_path) as again:
            assert (await again.controller.order(submit, "same")).jobs == (1,)
            assert (await again.controller.order(submit, "after the snapshot")) == kept
            assert len(again.controller.core.view.jobs) == 2

    asyncio.run(scenario())


def test_a_store_that_fails_refuses_orders_and_keeps_facts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Running(tmp_path) as running:
            await running.controller.order(joined("a"))
            running.store.failing = True
            running.controller.tell([NodeSilent(node=0)])
            with pytest.raises(UnavailableError, match="no space left"):
                await running.controller.order(Submit(spec=JobSpec(name="j")))
            assert running.controller.problem
            running.store.failing = False
            while running.controller.problem:
                await asyncio.sleep(0.05)
            handled = [event.body for event, _ in running.sent]
            assert NodeSilent(node=0) in handled
            assert not running.controller.core.view.jobs
            assert (await running.controller.order(Submit(spec=JobSpec(name="j")))).jobs == (1,)

    asyncio.run(scenario())


def test_a_restart_rebuilds_the_same_state_from_any_snapshot(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Running(tmp_path) as running:
            for name in "abcd":
                await running.controller.order(joined(name))
            await running.controller.order(Submit(spec=JobSpec(name="before")))
            await running.controller.snapshot()
            await running.controller.order(Submit(spec=JobSpec(name="behind")))
            await running.controller.order(Cancel(job=1))
            await placed(running, 2)
            state = running.controller.core.snapshot()
        found = recover(SqliteStore(tmp_path / "log.sqlite"), Policy())
        assert found.core.snapshot() == state

    asyncio.run(scenario())


def test_a_replay_of_the_tail_gives_the_commands_that_were_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        running = Running(tmp_path)
        await running.__aenter__()
        for name in "abcd":
            await running.controller.order(joined(name))
        for _ in range(5):
            await running.controller.order(Submit(spec=JobSpec(name="j")))
        await placed(running, 4)
        running.task.cancel()  # as if it were killed: no snapshot at the end
        await asyncio.gather(running.task, return_exceptions=True)
        store = SqliteStore(tmp_path / "log.sqlite")
        found = recover(store, Policy())
        assert found.replayed > 9 and not found.diverged
        assert found.core.snapshot() == running.controller.core.snapshot()
        running.store.append([], [(3, b"\x90")])
        assert recover(store, Policy()).diverged == 0  # event 3 gave none, and says so
        store.close()
        await running.__aexit__()

    asyncio.run(scenario())


def test_an_event_that_breaks_the_core_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise AssertionError("a mistake in the core")

    monkeypatch.setitem(HANDLERS, NodeRepaired, breaks)

    async def scenario() -> None:
        async with Running(tmp_path) as running:
            await running.controller.order(joined("a"))
            with pytest.raises(UnavailableError, match="error in the server"):
                await running.controller.order(NodeRepaired(node=0))
            with pytest.raises(CoreFailedError):
                await running.task
        async with Running(tmp_path) as again:
            bodies = [event.body for event in tail(again.store, 0, START)]
            assert NodeRepaired(node=0) not in bodies and Tick() in bodies
            outcome = await again.controller.order(Submit(spec=JobSpec(name="j")))
            assert outcome.accepted
            assert len(again.controller.core.view.fleet) == 1

    asyncio.run(scenario())


def test_a_changed_policy_holds_from_the_restart_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        policy = Policy(queue=QueuePolicy(age_weight=7))
        async with Running(tmp_path) as running:
            await running.controller.order(joined("a"))
            await running.controller.start(policy)
        found = recover(SqliteStore(tmp_path / "log.sqlite"), Policy())
        assert found.core.view.policy == policy

    asyncio.run(scenario())


def test_a_replay_from_before_a_changed_policy_has_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        policy = Policy(queue=QueuePolicy(age_weight=7))
        async with Running(tmp_path) as running:
            await running.controller.order(joined("a"))
            await running.controller.start(policy)
            await running.controller.order(Submit(spec=JobSpec(name="j")))
        change_file(tmp_path / "log.sqlite", "UPDATE snapshots SET core = x'00'")
        store = SqliteStore(tmp_path / "log.sqlite")
        found = recover(store, Policy())
        store.close()
        assert found.replayed > 3 and not found.diverged
        assert found.core.view.policy == policy and len(found.core.view.jobs) == 1

    asyncio.run(scenario())


def test_answers_carry_the_core_s_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Running(tmp_path) as running:
            refused = await running.controller.order(Cancel(job=9))
            assert not refused.accepted and str(refused.reason) == "there is no job 9"
            body = running.sent[-1][1][-1].body
            assert not isinstance(body, Accept)

    asyncio.run(scenario())
