"""A controller in the world: the real core and the real controller machine around a log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from phalanx.cluster.core import Core
from phalanx.cluster.protocol.commands import Ask, Command, Form
from phalanx.cluster.protocol.controller_machine import ControllerMachine
from phalanx.cluster.protocol.controller_outputs import (
    AskRanks,
    Close,
    Disbelieved,
    GangOver,
    GangRuns,
    Output,
    Send,
)
from phalanx.cluster.protocol.events import (
    Answer,
    ControllerStarted,
    Event,
    EventBody,
    NodeSilent,
    Tick,
)
from phalanx.cluster.protocol.messages import AgentMessage, Heartbeat, NodeSeen
from phalanx.simulate.chaos.network import CONTROLLER
from phalanx.simulate.chaos.stores import DeposedError
from phalanx.simulate.rules.contact_rules import ContactRules

if TYPE_CHECKING:
    from phalanx.simulate.chaos.world import ChaosWorld

SECOND = 10**9


class Crash(Exception):  # noqa: N818 - not an error: the controller process dies here
    """The controller's process ends at this point."""


class SimulatedController:
    """One process. It may die anywhere, stand still, or be deposed without knowing."""

    def __init__(self, world: ChaosWorld, core: Core, epoch: int) -> None:
        self.world = world
        self.core = core
        self.epoch = epoch
        self.alive = True
        self.machine: ControllerMachine[int] = ControllerMachine(core.view)
        self.contact = ContactRules(core.view, world.complain, world.agenda.now_ns)
        self.connections = self.machine.connections  # by node: the connection's number
        self.crash_in = -1  # events until it dies; -1: it does not
        self.crash_where = 0
        self._opened: dict[int, int] = {}  # by node: the newest connection that it had
        self._waiting: deque[Output[int]] = deque()
        self._acting = False
        self._armed_ns: int | None = None
        self._stalled_ns: int | None = None  # since when it stands still
        self._inbox: list[Callable[[], None]] = []  # what happened meanwhile

    def start(self) -> None:
        """Takes over: everybody's time starts now, and what was not answered is said again."""
        now = self.world.agenda.now_ns
        self.machine.take_over(now)
        for number in list(self.core.view.active):
            self._act(self.machine.resume(number, now))
        self.tell(ControllerStarted(epoch=self.epoch))

    def die(self) -> None:
        """The process ends; connections break."""
        if self.alive:
            self.alive = False
            self.world.controller_gone(self)

    @property
    def answers(self) -> bool:
        """Whether it does what it is asked for."""
        return self.alive and self._stalled_ns is None

    def stall(self, for_ns: int) -> None:
        """It stands still, and hears later what came meanwhile."""
        if self.answers:
            self._stalled_ns = self.world.agenda.now_ns
            self.world.agenda.after(for_ns, self._go_on)

    def _go_on(self) -> None:
        assert self._stalled_ns is not None
        now = self.world.agenda.now_ns
        passed, self._stalled_ns = now - self._stalled_ns, None
        inbox, self._inbox = self._inbox, []
        self.contact.deaf(passed)
        self._armed_ns = None
        self._act(self.machine.tick(now, passed))
        for each in inbox:
            each()

    def _put_off(self, call: Callable[[], None]) -> None:
        """Something happens while it stands still; a process that is gone never hears of it."""
        if self.alive:
            self._inbox.append(call)

    # In.

    def receive(self, node: int, connection: int, message: AgentMessage) -> None:
        """A message of an agent arrives; the first one of a connection opens it."""
        if not self.answers:
            self._put_off(partial(self.receive, node, connection, message))
            return
        now = self.world.agenda.now_ns
        if isinstance(message, NodeSeen) and connection > self._opened.get(node, 0):
            self._opened[node] = connection
            self.contact.opened(node, connection, now)
            incarnation = message.inventory.incarnation
            self._act(self.machine.connected(node, connection, incarnation, now))
        if self.connections.get(node) != connection:
            self.world.reset(self, node, connection)  # as a socket that nobody knows would be
            return
        self.contact.heard(message, now)
        outputs = self.machine.received(node, message, now)
        if outputs:
            self._act(outputs)

    def asked(self, connection: int, alive: Heartbeat, asked_ns: int) -> None:
        """A node asks for an answer: it comes after all that was sent on its connection before.

        Also after the sign of life that the node gave before it asked, which is heard with it.
        """
        node = alive.node
        if not self.answers:
            self._put_off(partial(self.asked, connection, alive, asked_ns))
        elif self.connections.get(node) == connection and not self.machine.outbox.waits(node):
            self.receive(node, connection, alive)
            host = self.world.hosts[node]
            self.world.network.send(CONTROLLER, node, host.answered, connection, asked_ns)

    def broke(self, node: int, connection: int) -> None:
        """A connection broke, and the controller noticed."""
        if not self.answers:
            self._put_off(partial(self.broke, node, connection))
            return
        now = self.world.agenda.now_ns
        self.contact.broke(node, connection, now)
        self._act(self.machine.disconnected(node, connection, now))

    def tell(self, body: EventBody) -> None:
        """Something happened that the core must know."""
        self._act([body])

    def _act(self, outputs: Iterable[Output[int]]) -> None:
        """Does what the machine wants done, in its order, until nothing is left or it dies."""
        self._waiting.extend(outputs)
        if self._acting or not self.answers:
            return
        self._acting = True
        while self.answers and self._waiting:
            self._do(self._waiting.popleft())
        self._acting = False
        if self.alive:
            self._arm()

    def _do(self, output: Output[int]) -> None:
        match output:
            case Send(command=command, nodes=nodes):
                self._send(command, nodes)
            case Close(node=node, connection=connection):
                self.world.hang_up(self, node, connection)
            case AskRanks(order=order, nodes=nodes):
                for node in nodes:
                    host, connection = self.world.hosts[node], self.connections[node]
                    self.world.network.send(CONTROLLER, node, host.look, connection, order)
            case GangRuns() | GangOver() | Disbelieved():
                pass  # nothing is measured or counted here
            case _:
                self._handle(output)

    def _handle(self, body: EventBody) -> None:
        """An event: stored, handled, its commands sent. The process may die at each point."""
        now = self.world.agenda.now_ns
        if isinstance(body, NodeSilent):
            self.contact.given_up(body, now)
        event = Event(self.core.sequence + 1, now, body)
        try:
            self._dies_here(0)
            self.world.store.append(self.epoch, event)
            self.world.stored(event)
            self._dies_here(1)
            commands = self.world.handled(self, event)
            for output in self.machine.ordered(commands, now):
                self._do(output)
                self._dies_here(2)
            self.crash_in -= 1
            self.world.store.keep(self.epoch, self.core)
        except (Crash, DeposedError):
            self.die()
            return
        if isinstance(body, NodeSilent):
            self.contact.handled(body)
        for order in (each.body for each in commands if isinstance(each.body, Ask)):
            delay = self.world.luck.below(90) * SECOND
            approve = self.world.luck.chance(0.7)
            self.world.agenda.after(delay, self._answer, order.question, approve)
        self._act(self.machine.handled(event, commands, now))

    def _dies_here(self, where: int) -> None:
        if self.crash_in == 0 and self.crash_where == where:
            raise Crash

    # Out.

    def _send(self, command: Command, nodes: tuple[int, ...]) -> None:
        if isinstance(command.body, Form):
            self.world.forms[command.body.job, command.body.generation] = command.body
        self.contact.sent(command, nodes, self.world.agenda.now_ns)
        for node in nodes:
            connection = self.connections.get(node)
            if connection is not None:
                host = self.world.hosts[node]
                self.world.network.send(CONTROLLER, node, host.command, connection, command)

    def _answer(self, question: int, approve: bool) -> None:
        self.world.leader.tell(Answer(question=question, approve=approve, by="operator"))

    # Time.

    def _arm(self) -> None:
        deadlines = self.core.next_deadline_ns(), self.machine.next_deadline_ns()
        first = min((at for at in deadlines if at is not None), default=None)
        if first is not None and (self._armed_ns is None or first < self._armed_ns):
            self._armed_ns = first
            self.world.agenda.at(first, self._poll, first)

    def _poll(self, asked_ns: int) -> None:
        if not self.answers or self._armed_ns != asked_ns:
            return
        self._armed_ns = None
        now = self.world.agenda.now_ns
        self._act(self.machine.tick(now))
        deadline = self.core.next_deadline_ns()
        if self.answers and deadline is not None and deadline <= now:
            self.tell(Tick())
