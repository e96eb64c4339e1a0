"""The agents' connections: the server's end of the controller machine, which decides about them."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from phalanx.cluster.protocol.commands import Command, Form
from phalanx.cluster.protocol.controller_machine import ControllerMachine, names_another
from phalanx.cluster.protocol.controller_outputs import (
    AskRanks,
    Close,
    CloseReason,
    Disbelieved,
    GangOver,
    GangRuns,
    Output,
    Send,
)
from phalanx.cluster.protocol.events import Event, EventBody, NodeDescribed
from phalanx.cluster.protocol.messages import Applied, Heartbeat
from phalanx.cluster.state import View
from phalanx.control.server.agent_link.acceptances import Acceptances
from phalanx.control.server.agent_link.gang_watch import GangWatch
from phalanx.control.server.agent_link.handshake import REVOKED, bad_node
from phalanx.control.server.agent_link.refusals import Refusals
from phalanx.control.server.controller import Controller
from phalanx.control.server.history.node_facts import NodeFactHistory, described, set_up
from phalanx.control.server.http.log_requests import LogRequests
from phalanx.control.server.http.shells import ShellSessions
from phalanx.control.trust.server_key import ServerKey
from phalanx.control.wire.agent_messages import (
    AcceptanceNews,
    Deliver,
    Described,
    LogPart,
    OrderRefused,
    Register,
    RejectCode,
    Rejected,
    SetUp,
    Signed,
    StartAcceptance,
    Up,
    encode,
)
from phalanx.control.wire.shell_messages import OpenShell, ShellOutput
from phalanx.control.wire.websocket_frames import framed
from phalanx.doctor.setup import NodeSetup, bad_setup
from phalanx.hardware.probe.description import NodeDescription, bad_description
from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_sample import NodeSample
from phalanx.observe.store.recorder import Recorder

if TYPE_CHECKING:
    from phalanx.control.server.agent_link.connection import AgentSocket

logger = logging.getLogger("phalanx.server")

SWEEP_SECONDS = 0.25  # between two looks at deadlines
SWEEP_NS = int(SWEEP_SECONDS * 1e9)
OfServer = OrderRefused | NodeRecords | NodeSample | Described | SetUp | AcceptanceNews
UNLIMITED = (Heartbeat, Applied)  # messages that nothing is stored of
CLOSED = {  # what an agent is told: the code, the words, and whether it connects again
    CloseReason.REPLACED: (RejectCode.REPLACED, "this agent has connected again", False),
    CloseReason.GIVEN_UP: (
        RejectCode.REPLACED,
        "you were silent for too long: connect again and say what you run",
        True,
    ),
    CloseReason.SILENT: (RejectCode.REPLACED, "you were silent", True),
    CloseReason.WRONG_NODE: (
        RejectCode.WRONG_NODE,
        "node {node} may not speak for another node",
        False,
    ),
}


class Hub:
    """Everything of the agents that is not logged. One instance a leadership."""

    def __init__(
        self,
        controller: Controller,
        version: str,
        recorder: Recorder | None = None,
        secret: bytes = b"",
        key: ServerKey | None = None,
        link_secret: bytes = b"",
    ) -> None:
        self.key = key or ServerKey(bytes(32))  # that agents prove themselves to
        self.link_secret = link_secret  # that agents' link keys are made from
        self._secret = secret  # that the keys of jobs' keepers are made from
        self.controller = controller
        self.version = version
        self.machine: ControllerMachine[AgentSocket] = ControllerMachine(controller.core.view)
        self.timeouts = self.machine.timeouts
        self.connections = self.machine.connections
        self.gangs = GangWatch(controller, self.machine.watch, recorder)
        self.logs = LogRequests(self.push)
        self.shells = ShellSessions(self.push, self.signed)
        self.acceptances = Acceptances(self.push, self.signed)
        self.refusals = Refusals()
        self.skew_ns: dict[int, int] = {}  # of each node's clock, ahead of the server's
        self.stores: dict[int, str] = {}  # host:port of each node's store
        # What each node says of itself: agents say it anew to whoever leads next.
        self.descriptions: dict[int, NodeDescription] = {}
        self._timer: asyncio.TimerHandle | None = None  # for the machine's next deadline
        self._armed_ns: int | None = None
        self._leads = True
        self._ticked_ns = self._now_ns()  # when the machine last looked at deadlines
        controller.listeners.append(self.deliver)
        self._take_over()

    def _take_over(self) -> None:
        now = self._now_ns()
        self.machine.take_over(now)
        for number in self._view.active:
            try:
                self._act(self.machine.resume(number, now))
            except Exception as error:  # one job must not keep the server from starting
                self.controller.alarms.raised("the watch over gangs", error, f"job {number}")

    @property
    def _view(self) -> View:
        return self.controller.core.view

    def _now_ns(self) -> int:
        return self.controller.clock.now_ns()

    def connect(self, connection: AgentSocket, incarnation: int) -> None:
        """An agent was let in."""
        now = self._now_ns()
        self._act(self.machine.connected(connection.node, connection, incarnation, now))
        self.acceptances.connected(connection.node)

    def disconnect(self, connection: AgentSocket) -> None:
        """A connection broke."""
        if self.connections.get(connection.node) is connection:
            self.logs.lost(connection.node)
            self.shells.lost(connection.node)
        self._act(self.machine.disconnected(connection.node, connection, self._now_ns()))

    def cut(self, token: str) -> None:
        """An agent's token is worth nothing any more: its connection ends."""
        for connection in list(self.connections.values()):
            if connection.token == token:
                connection.close(self.rejected(RejectCode.REPLACED, REVOKED, retry=True))

    def receive(self, connection: AgentSocket, message: Up) -> None:
        """A message of an agent."""
        node = connection.node
        if isinstance(message, UNLIMITED):
            outputs = self.machine.received(node, message, self._now_ns())
            if outputs:
                self._act(outputs)
        elif isinstance(message, ShellOutput):
            self.shells.receive(node, message)
        elif isinstance(message, LogPart):
            self.logs.receive(node, message)
        elif names_another(node, message):
            self._act(self.machine.spoke_for_another(node))
        elif isinstance(message, Register):
            return
        elif isinstance(message, OfServer):
            self._of_server(node, message)
        elif not self.refusals.too_many(self._view, node, message):
            self._act(self.machine.received(node, message, self._now_ns()))

    def _of_server(self, node: int, message: OfServer) -> None:
        """A message that is not the protocol's but this server's."""
        if self.refusals.refused(self._view, node, message):
            return
        name = self._view.fleet.nodes[node].name
        if isinstance(message, OrderRefused):
            logger.error("%s refuses an order: %s", name, ascii(message.problem[:200]))
        elif isinstance(message, Described):
            self._described(node, message)
        elif isinstance(message, SetUp):
            self._set_up(name, NodeSetup(versions=message.versions, settings=message.settings))
        elif isinstance(message, AcceptanceNews):
            self.acceptances.receive(node, name, message, self._now_ns())
        else:
            self.gangs.receive(message, self._now_ns())

    def _described(self, node: int, message: Described) -> None:
        """A node describes itself anew: the core is told where that concerns it."""
        registered, now_is = self._view.fleet.nodes[node], message.described
        problem = bad_node(now_is) or bad_description(message.description)
        if now_is.name != registered.name:
            problem = f"{now_is.name[:40]!a} is not its name"
        if problem:
            logger.warning(
                "%s describes itself as what cannot be: %s", registered.name, ascii(problem)
            )
            return
        self.describe(node, message.description)
        if now_is != registered:
            self.controller.tell([NodeDescribed(node=node, described=now_is)])

    def describe(self, node: int, description: NodeDescription) -> None:
        """Keep what a node says of itself."""
        self.descriptions[node] = description
        if self.facts is not None:
            name = self._view.fleet.nodes[node].name
            self.facts.note(described(name, description, self._now_ns()))

    def _set_up(self, name: str, setup: NodeSetup) -> None:
        if problem := bad_setup(setup):
            logger.warning("%s tells settings that cannot be: %s", name, problem)
        elif self.facts is not None:
            self.facts.note(set_up(name, setup, self._now_ns()))

    @property
    def facts(self) -> NodeFactHistory | None:
        """Where facts of nodes are kept; None: nowhere."""
        return self.acceptances.facts

    def deliver(self, event: Event, commands: Sequence[Command]) -> None:
        """Sends what an event gave to the nodes that it is for."""
        now = self._now_ns()
        outputs = self.machine.ordered(commands, now)
        outputs += self.machine.handled(event, commands, now)
        self._act(outputs)

    def _act(self, outputs: Iterable[Output[AgentSocket]]) -> None:
        """Does what the machine wants done."""
        events: list[EventBody] = []
        try:
            for output in outputs:
                self._do(output, events)
        finally:
            if events:
                self.controller.tell(events)
            self._arm()

    def _do(self, output: Output[AgentSocket], events: list[EventBody]) -> None:
        """Does one thing; events are collected, to be stored together."""
        match output:
            case Send(command=command, nodes=nodes):
                frame = self._frame(command)  # once for all nodes
                for node in nodes:
                    self.push(node, frame)
            case Close(node=node, connection=connection, reason=reason):
                code, text, retry = CLOSED[reason]
                connection.close(self.rejected(code, text.format(node=node), retry=retry))
            case AskRanks(order=order, nodes=nodes):
                frame = framed(encode(order))
                if not all(self.push(node, frame) for node in nodes):
                    self.machine.not_asked(order.job)
            case GangRuns(job=job):
                self.gangs.begin(job)
            case GangOver(job=job):
                self.gangs.end(job)
            case Disbelieved(node=node, message=message, why=why):
                self.refusals.note(self._view, node, message, why)
            case _:
                events.append(self.gangs.metrics.with_stragglers(output))

    def _arm(self) -> None:
        """Recovery waits for some deadlines: the machine ticks at them, not at the next sweep."""
        at_ns = self.machine.soon_ns() if self._leads else None
        if at_ns == self._armed_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_ns, self._timer = at_ns, None
        if at_ns is not None:
            seconds = max(0.0, (at_ns - self._now_ns()) / 1e9)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._on_time)

    def _on_time(self) -> None:
        self._armed_ns = self._timer = None
        self._tick()

    def _frame(self, command: Command) -> bytes:
        body = command.body
        if not isinstance(body, Form):
            return framed(encode(Deliver(command=command)))
        # The same for all nodes and generations of a job: keepers outlive both.
        key = hmac.digest(self._secret, f"job {body.job}".encode(), "sha256")
        store = self.stores.get(body.store, "")
        return self.signed(Deliver(command=command, store=store, key=key))

    def signed(self, order: Deliver | OpenShell | StartAcceptance) -> bytes:
        """The frame of an order that starts something on nodes; once for a whole gang."""
        data = encode(order)
        return framed(encode(Signed(order=data, signature=self.key.sign_order(data))))

    def push(self, node: int, frame: bytes) -> bool:
        """Sends a frame to a node; False when it is not connected."""
        connection = self.connections.get(node)
        if connection is None or connection.closed:
            return False
        connection.push(frame)
        return True

    async def sweep(self) -> None:
        """Looks at deadlines until it is cancelled."""
        self._ticked_ns = self._now_ns()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._tick()

    def _tick(self) -> None:
        now, before = self._now_ns(), self._ticked_ns
        self._ticked_ns = now
        self._act(self.machine.tick(now, now - before - SWEEP_NS))

    def close(self, leader: str) -> None:
        """This server leads no more: agents look for the one that does."""
        self._leads = False
        self._arm()
        text = "this server does not lead"
        for connection in list(self.connections.values()):
            connection.close(self.rejected(RejectCode.NOT_LEADER, text, retry=True, leader=leader))
        self.connections.clear()

    def rejected(
        self, code: RejectCode, message: str, *, retry: bool = False, leader: str = ""
    ) -> Rejected:
        """A refusal in this server's name."""
        return Rejected(
            code=code,
            message=message,
            version=self.version,
            retry=retry,
            leader=leader,
        )
