"""A controller in the world: the real core, gathering, outbox, liveness and watch around a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.node import NodeState
from phalanx.cluster.jobs.job import Expected
from phalanx.cluster.protocol.commands import Ask, Command, Form
from phalanx.cluster.protocol.events import (
    Answer,
    ControllerStarted,
    Event,
    EventBody,
    NodeSilent,
    Progress,
    Tick,
)
from phalanx.cluster.protocol.gather import Gather
from phalanx.cluster.protocol.liveness import Liveness
from phalanx.cluster.protocol.messages import AgentMessage, Applied, Heartbeat, Hello
from phalanx.cluster.protocol.outbox import Outbox
from phalanx.cluster.protocol.timeouts import derive
from phalanx.cluster.watch import GangRecord, StepWatch
from phalanx.simulate.chaos.network import CONTROLLER
from phalanx.simulate.chaos.stores import DeposedError

if TYPE_CHECKING:
    from phalanx.simulate.chaos.world import ChaosWorld

SECOND = 10**9


class Crash(Exception):  # noqa: N818 - not an error: the controller process dies here
    """The controller's process ends at this point."""


class SimulatedController:
    """One process. It may die anywhere, or be deposed without knowing."""

    def __init__(self, world: ChaosWorld, core: Core, epoch: int) -> None:
        self.world = world
        self.core = core
        self.epoch = epoch
        self.alive = True
        self.connections: dict[int, int] = {}  # node: number of its connection
        self.crash_in = -1  # events until it dies; -1: it does not
        self.crash_where = 0
        policy = core.view.policy.timeouts
        self._answer_ns = derive(policy, Expected()).abort_ns
        silent = policy.heartbeat_ns * policy.missed_heartbeats + policy.round_trip_ns
        self.liveness = Liveness(silent, len(core.view.fleet))
        self.gather = Gather(5 * SECOND)
        self.outbox = Outbox(3 * SECOND)
        self.watch = StepWatch()
        self._armed_ns: int | None = None

    def start(self) -> None:
        """Takes over: everybody's time starts now, and what was not answered is said again."""
        now = self.world.agenda.now_ns
        for node in range(len(self.core.view.fleet)):
            if self.core.view.fleet.state(node) is not NodeState.DEAD:
                self.liveness.watch(node, now)
        self.tell(ControllerStarted(epoch=self.epoch))
        for number in list(self.core.view.active):
            self._watch(number)
            job = self.core.view.jobs[number]
            if job.gang is not None and job.gang.phase == "running" and job.placement is not None:
                slot_gpus = job.spec.gang.slot_gpus
                self.gather.running(number, job.generation, job.placement.nodes, now, slot_gpus)
        self._arm()

    def die(self) -> None:
        """The process ends; connections break."""
        if self.alive:
            self.alive = False
            self.world.controller_gone(self)

    # In.

    def receive(self, node: int, connection: int, message: AgentMessage) -> None:
        """A message of an agent arrives."""
        if not self.alive:
            return
        if self.connections.get(node) != connection:
            self.world.reset(node, connection)  # as a socket that nobody knows would be
            return
        now = self.world.agenda.now_ns
        match message:
            case Heartbeat(incarnation=incarnation):
                if self.liveness.heartbeat(node, now, incarnation):
                    self.world.hang_up(self, node)  # it reconnects and says what it has
                return
            case Applied(sequence=sequence, index=index):
                self.liveness.spoke(node, now)
                self.outbox.applied(node, sequence, index)
                return
            case Hello(inventory=inventory):
                self.liveness.watch(node, now, inventory.incarnation)
        for body in self.gather.receive(message, now):
            self.tell(body)
        self._arm()

    def lost(self, node: int) -> None:
        """A connection broke, and the controller noticed."""
        if self.alive and self.connections.pop(node, None) is not None:
            found = self.liveness.lost(node)
            if found is not None:
                self.tell(found)
                self._arm()

    def tell(self, body: EventBody) -> None:
        """An event: stored, handled, its commands sent. The process may die at each point."""
        if not self.alive:
            return
        now = self.world.agenda.now_ns
        event = Event(self.core.sequence + 1, now, body)
        try:
            self._dies_here(0)
            self.world.store.append(self.epoch, event)
            self.world.stored(event)
            self._dies_here(1)
            commands = self.world.handled(self, event)
            for command in commands:
                self.gather.expect(command)
                self._send(command)
                self._dies_here(2)
            self.crash_in -= 1
            self.world.store.keep(self.epoch, self.core)
        except (Crash, DeposedError):
            self.die()
            return
        self._after(event, commands)

    def _dies_here(self, where: int) -> None:
        if self.crash_in == 0 and self.crash_where == where:
            raise Crash

    def _after(self, event: Event, commands: list[Command]) -> None:
        body = event.body
        if isinstance(body, NodeSilent) and self.core.view.fleet.state(body.node) is NodeState.DEAD:
            self.outbox.forget(body.node)
        touched = dict.fromkeys(getattr(command.body, "job", 0) for command in commands)
        touched[getattr(body, "job", 0)] = None
        for job in touched:
            if job:
                self._watch(job)
        if isinstance(body, Progress):
            fact = GangRecord(
                job=body.job, generation=body.generation, step=body.step, step_ns=SECOND
            )
            for found in self.watch.record(fact, self.world.agenda.now_ns):
                self.tell(found)

    def _watch(self, number: int) -> None:
        job = self.core.view.jobs.get(number)
        known = self.watch.gangs.get(number)
        if job is None or job.gang is None or job.gang.phase != "running":
            if known is not None:
                self.watch.end(number)
            return
        if known is None or known.generation != job.generation:
            policy, now = self.core.view.policy.timeouts, self.world.agenda.now_ns
            self.watch.follow(job, policy, now)

    # Out.

    def _send(self, command: Command) -> None:
        now = self.world.agenda.now_ns
        if isinstance(command.body, Ask):
            delay = self.world.luck.below(90) * SECOND
            approve = self.world.luck.chance(0.7)
            self.world.agenda.after(delay, self._answer, command.body.question, approve)
        if isinstance(command.body, Form):
            self.world.forms[command.body.job, command.body.generation] = command.body
        self.liveness.sent(command, now + self._answer_ns)
        if command.target:
            self.outbox.send(command, now)
            for node in command.target:
                self._send_to(node, command)

    def _send_to(self, node: int, command: Command) -> None:
        connection = self.connections.get(node)
        if connection is not None:
            host = self.world.hosts[node]
            self.world.network.send(CONTROLLER, node, host.command, connection, command)

    def _answer(self, question: int, approve: bool) -> None:
        self.world.leader.tell(Answer(question=question, approve=approve, by="operator"))

    # Time.

    def _arm(self) -> None:
        deadlines = (
            self.core.next_deadline_ns(),
            self.gather.next_deadline_ns(),
            self.liveness.next_deadline_ns(),
            self.outbox.next_deadline_ns(),
            self.watch.next_deadline_ns(),
        )
        first = min((at for at in deadlines if at is not None), default=None)
        if first is not None and (self._armed_ns is None or first < self._armed_ns):
            self._armed_ns = first
            self.world.agenda.at(first, self._poll, first)

    def _poll(self, asked_ns: int) -> None:
        if not self.alive or self._armed_ns != asked_ns:
            return
        self._armed_ns = None
        now = self.world.agenda.now_ns
        for silent in self.liveness.silent(now):
            self.world.hang_up_later(self, silent.node)
            self.tell(silent)
        for body in (*self.gather.due(now), *self.watch.due(now)):
            self.tell(body)
        for node, command in self.outbox.due(now):
            self._send_to(node, command)
        deadline = self.core.next_deadline_ns()
        if deadline is not None and deadline <= now:
            self.tell(Tick())
        if self.alive:
            self._arm()
