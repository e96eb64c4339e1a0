"""The agents: their connections, signs of life, answers gathered, commands sent until confirmed."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from phalanx.cluster.fleet.node import NodeState
from phalanx.cluster.jobs.job import Expected, Job
from phalanx.cluster.protocol.commands import Command, Form
from phalanx.cluster.protocol.events import (
    Event,
    GangReady,
    NodeSilent,
    Progress,
)
from phalanx.cluster.protocol.gather import Gather
from phalanx.cluster.protocol.liveness import Liveness, newcomers
from phalanx.cluster.protocol.messages import (
    AgentMessage,
    Applied,
    Exited,
    Heartbeat,
    Hello,
    Joined,
    Steps,
)
from phalanx.cluster.protocol.outbox import Outbox
from phalanx.cluster.protocol.timeouts import derive
from phalanx.control.server.agent_link.gang_watch import GangWatch, Measured
from phalanx.control.server.agent_link.refusals import Refusals
from phalanx.control.server.controller import Controller
from phalanx.control.server.http.log_requests import LogRequests
from phalanx.control.server.http.shells import ShellSessions
from phalanx.control.server.http.views import job_of
from phalanx.control.trust.server_key import ServerKey
from phalanx.control.wire.agent_messages import (
    Deliver,
    LogPart,
    OrderRefused,
    Register,
    Rejected,
    Signed,
    Up,
    encode,
)
from phalanx.control.wire.shell_messages import OpenShell, ShellOutput
from phalanx.control.wire.websocket_frames import framed
from phalanx.observe.store.recorder import Recorder

if TYPE_CHECKING:
    from phalanx.control.server.agent_link.connection import AgentSocket

logger = logging.getLogger("phalanx.server")

SWEEP_SECONDS = 0.25  # between two looks at deadlines
SEVERAL_SECONDS = 3.0  # for agents to come back where a gang lost a peer, or forms


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
        self._key = key or ServerKey(bytes(32))
        self.server_key = self._key.public  # what agents prove themselves to
        self.link_secret = link_secret  # that agents' link keys are made from
        self._secret = secret  # that the keys of jobs' keepers are made from
        self.controller = controller
        self.version = version
        core = controller.core
        self.timeouts = derive(core.view.policy.timeouts, Expected())
        round_trip = core.view.policy.timeouts.round_trip_ns
        allowed = core.view.policy.timeouts.reconnect_ns
        self.reconnect_seconds = min(allowed, self.timeouts.silent_ns) / 1e9
        self.liveness = Liveness(self.timeouts.silent_ns)
        self.gather = Gather()
        self.outbox = Outbox(2 * round_trip)
        self.gangs = GangWatch(controller, self.push, recorder)
        self.logs = LogRequests(self.push)
        self.shells = ShellSessions(self.push, self.signed)
        self.refusals = Refusals()
        self.connections: dict[int, AgentSocket] = {}
        self._heard: dict[int, None] = {}  # nodes that have connected to this server
        self._broke_ns: dict[int, int] = {}  # when the connection of a node that is away broke
        self.skew_ns: dict[int, int] = {}  # of each node's clock, ahead of the server's
        self.stores: dict[int, str] = {}  # host:port of each node's store
        controller.listeners.append(self.deliver)
        self._take_over()

    def _take_over(self) -> None:
        """Everybody gets the whole time to connect; running gangs are listened to again."""
        core, now = self.controller.core, self.controller.clock.now_ns()
        for node in range(len(core.view.fleet)):
            if core.view.fleet.state(node) is not NodeState.DEAD:
                self.liveness.watch(node, now)
        for number in core.view.active:
            try:
                self._listen_again(core.view.jobs[number], now)
            except Exception as error:  # one job must not keep the server from starting
                self.controller.alarms.raised("the watch over gangs", error, f"job {number}")

    def _listen_again(self, job: Job, now: int) -> None:
        if job.gang is not None and job.placement is not None and job.gang.phase == "running":
            slot_gpus = job.spec.gang.slot_gpus
            self.gather.running(job.id, job.generation, job.placement.nodes, now, slot_gpus)
        self.gangs.follow(job.id)

    def connect(self, connection: AgentSocket, incarnation: int) -> None:
        """An agent was let in; a connection that it had before is over."""
        before = self.connections.get(connection.node)
        if before is not None:
            before.close(self.rejected("replaced", "this agent has connected again"))
        self.connections[connection.node] = connection
        self._heard[connection.node] = None
        self._broke_ns.pop(connection.node, None)
        now = self.controller.clock.now_ns()
        self.liveness.watch(connection.node, now, incarnation)

    def disconnect(self, connection: AgentSocket) -> None:
        """A connection broke: the node is lost unless its agent comes back in time."""
        if self.connections.get(connection.node) is connection:
            del self.connections[connection.node]
            self._broke_ns[connection.node] = self.controller.clock.now_ns()
            self.logs.lost(connection.node)
            self.shells.lost(connection.node)
            if self.liveness.asked(connection.node):
                self._lost(connection.node)  # a gang misses somebody already
                return
            loop = asyncio.get_running_loop()
            loop.call_later(self.reconnect_seconds, self._lost, connection.node)

    def cut(self, token: str) -> None:
        """An agent's token is worth nothing any more: its connection ends."""
        for connection in list(self.connections.values()):
            if connection.token == token:
                text = "this node's token was revoked: join again"
                connection.close(self.rejected("replaced", text, retry=True))

    def _lost(self, node: int) -> None:
        if node not in self.connections:
            self._silent(self.liveness.lost(node, self._broke_ns.get(node, -1)))

    def _confirm_lost(self, exit: Exited) -> None:
        """A gang lost a peer: a node of it without a connection is dead, not its agent alone."""
        job = self.controller.core.view.jobs.get(exit.job)
        nodes = job.placement.nodes if job is not None and job.placement is not None else ()
        if exit.node not in nodes:
            return
        away = [node for node in nodes if node not in self.connections]
        if len(away) == 1 and away[0] in self._heard:
            self._lost(away[0])
            return
        # One of several is dead, and the agents of others may only be starting again, or have yet
        # to find this server.
        self._lost_soon(away)

    def _lost_soon(self, nodes: Sequence[int]) -> None:
        """A gang waits for these nodes: their agents have less time to come back than usually."""
        for node in nodes:
            asyncio.get_running_loop().call_later(SEVERAL_SECONDS, self._lost, node)

    def _silent(self, found: NodeSilent | None) -> None:
        if found is not None:
            self.controller.tell([found])

    def receive(self, connection: AgentSocket, message: Up) -> None:
        """A message of an agent; what it says about another node is not believed."""
        if isinstance(message, ShellOutput):
            self.shells.receive(connection.node, message)
            return
        if isinstance(message, LogPart):
            self.logs.receive(connection.node, message)
            return
        if getattr(message, "node", -1) != connection.node:
            text = f"node {connection.node} may not speak for another node"
            connection.close(self.rejected("wrong_node", text))
            return
        now = self.controller.clock.now_ns()
        if isinstance(message, Heartbeat):
            if self.liveness.heartbeat(connection.node, now, message.incarnation):
                # It was given up, so what it runs may be wrong by now: it is asked by connecting.
                text = "you were silent for too long: connect again and say what you run"
                connection.close(self.rejected("replaced", text, retry=True))
            return
        if isinstance(message, Applied):
            self.liveness.spoke(message.node, now)
            self.outbox.applied(message.node, message.sequence, message.index)
            return
        view = self.controller.core.view
        if isinstance(message, Register) or self.refusals.refused(view, connection.node, message):
            return
        if isinstance(message, OrderRefused):
            name = view.fleet.nodes[connection.node].name
            logger.error("%s refuses an order: %s", name, ascii(message.problem[:200]))
            return
        if isinstance(message, Measured):
            self.gangs.receive(message, now)
            return
        if isinstance(message, Hello):
            self.liveness.watch(message.node, now, message.inventory.incarnation)
        if isinstance(message, Exited) and message.cause == "lost_peer":
            self._confirm_lost(message)
        events = self.gather.receive(_not_in_future(message, now), now)
        if events:
            self.controller.tell([self.gangs.metrics.with_stragglers(event) for event in events])

    def deliver(self, event: Event, commands: Sequence[Command]) -> None:
        """Sends what an event gave to the nodes that it is for."""
        now = self.controller.clock.now_ns()
        for command in commands:
            if not command.target:
                continue
            self.gather.expect(command)
            self.outbox.send(command, now)
            self.liveness.sent(command, now + self.timeouts.abort_ns)
            if isinstance(command.body, Form):
                there = self.connections
                self._lost_soon([node for node in newcomers(command.body) if node not in there])
            frame = self._frame(command)  # once for all nodes
            for node in command.target:
                self.push(node, frame)
        body = event.body
        fleet = self.controller.core.view.fleet
        if isinstance(body, NodeSilent) and fleet.state(body.node) is NodeState.DEAD:
            self.outbox.forget(body.node)
        for job in dict.fromkeys(job_of(each) for each in (body, *(c.body for c in commands))):
            self.gangs.follow(job)
        if isinstance(body, Progress):
            self.gangs.progressed(body, now)
        elif isinstance(body, GangReady):
            self.gangs.watch.restored(body.job, body.generation, body.step)

    def _frame(self, command: Command) -> bytes:
        body = command.body
        if not isinstance(body, Form):
            return framed(encode(Deliver(command=command)))
        # The same for all nodes and generations of a job: keepers outlive both.
        key = hmac.digest(self._secret, f"job {body.job}".encode(), "sha256")
        store = self.stores.get(body.store, "")
        return self.signed(Deliver(command=command, store=store, key=key))

    def signed(self, order: Deliver | OpenShell) -> bytes:
        """The frame of an order that starts something on nodes; once for a whole gang."""
        data = encode(order)
        return framed(encode(Signed(order=data, signature=self._key.sign_order(data))))

    def push(self, node: int, frame: bytes) -> bool:
        """Sends a frame to a node; False when it is not connected."""
        connection = self.connections.get(node)
        if connection is None or connection.closed:
            return False
        connection.push(frame)
        return True

    async def sweep(self) -> None:
        """Looks at deadlines until it is cancelled."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(SWEEP_SECONDS)
            late_seconds = time.monotonic() - began - SWEEP_SECONDS
            if late_seconds > SWEEP_SECONDS:  # a busy server hears its agents late
                self.liveness.forgive(int(late_seconds * 1e9))
            now = self.controller.clock.now_ns()
            for silent in self.liveness.silent(now):
                connection = self.connections.pop(silent.node, None)
                if connection is not None:
                    connection.close(self.rejected("replaced", "you were silent", retry=True))
                self._silent(silent)
            late = self.gather.due(now)
            if late:
                self.controller.tell(late)
            self.gangs.sweep(now)
            again: dict[tuple[int, int], bytes] = {}
            for node, command in self.outbox.due(now):
                key = command.sequence, command.index
                frame = again.get(key) or again.setdefault(key, self._frame(command))
                self.push(node, frame)

    def close(self, leader: str) -> None:
        """This server leads no more: agents look for the one that does."""
        text = "this server does not lead"
        for connection in list(self.connections.values()):
            connection.close(self.rejected("not_leader", text, retry=True, leader=leader))
        self.connections.clear()

    def rejected(
        self, code: str, message: str, *, retry: bool = False, leader: str = ""
    ) -> Rejected:
        """A refusal in this server's name."""
        return Rejected(
            code=code,  # type: ignore[arg-type]
            message=message,
            version=self.version,
            retry=retry,
            leader=leader,
        )


def _not_in_future(message: AgentMessage, now_ns: int) -> AgentMessage:
    """Times that an agent reports lie before now, whatever its clock says."""
    if isinstance(message, Steps) and message.at_ns > now_ns:
        return structs.replace(message, at_ns=now_ns)
    if isinstance(message, Joined) and message.reached_ns > now_ns:
        return structs.replace(message, reached_ns=now_ns)
    return message
