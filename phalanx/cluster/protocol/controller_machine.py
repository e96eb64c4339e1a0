"""What a controller decides about its agents: whose connection counts, who is lost and when, what
is sent and sent again, which gang hangs.

A sans-I/O machine: connections, messages, handled events and the time go in; what the shell is to
do comes out as data. The server drives it over sockets, the simulator over played links. Nothing of
it is logged: a controller that takes over begins a new one, and the events that come out are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic

from msgspec import Struct, structs

from phalanx.cluster.causes import Cause
from phalanx.cluster.jobs.job import Expected
from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.absence import AbsentNodes
from phalanx.cluster.protocol.commands import Command, Form, job_of
from phalanx.cluster.protocol.controller_outputs import (
    AskRanks,
    Close,
    CloseReason,
    Connection,
    Disbelieved,
    GangOver,
    GangRuns,
    Output,
    Send,
)
from phalanx.cluster.protocol.events import (
    Event,
    EventBody,
    GangReady,
    NodeJoined,
    NodeSilent,
    NoProgress,
    Progress,
)
from phalanx.cluster.protocol.gather import Gather
from phalanx.cluster.protocol.hang_diagnosis import HangDiagnosis
from phalanx.cluster.protocol.liveness import Liveness, newcomers
from phalanx.cluster.protocol.message_rights import refusal
from phalanx.cluster.protocol.messages import (
    Activity,
    AgentMessage,
    Applied,
    Busy,
    FlushWanted,
    Heartbeat,
    InspectGang,
    Inventory,
    Joined,
    LastSteps,
    NodeSeen,
    ProgramEnded,
    Seen,
    Steps,
    StepsPrinted,
    WorkerExited,
)
from phalanx.cluster.protocol.outbox import Outbox
from phalanx.cluster.protocol.step_watch import GangRecord, StepWatch
from phalanx.cluster.protocol.timeouts import derive
from phalanx.cluster.state import View

SEVERAL_NS = 3_000_000_000  # for agents to come back where a gang lost a peer, or forms
LATE_NS = 250_000_000  # a tick that comes later than this shows that the controller was busy


class ControllerMachine(Generic[Connection]):
    """One instance a leadership. ``view`` is the core's state, read after each handled event."""

    def __init__(self, view: View) -> None:
        policy = view.policy.timeouts
        self.timeouts = derive(policy, Expected())
        self.connections: dict[int, Connection] = {}  # by node
        self.liveness = Liveness(self.timeouts.silent_ns, len(view.fleet))
        self.gather = Gather()
        self.outbox = Outbox(2 * policy.round_trip_ns)
        self.watch = StepWatch()
        self.diagnosis = HangDiagnosis(self.watch)
        self._view = view
        self._reconnect_ns = min(policy.reconnect_ns, self.timeouts.silent_ns)
        self._heard: dict[int, None] = {}  # nodes that have connected to this controller
        self._joined: dict[int, Inventory] = {}  # of nodes that run nothing and have just joined
        self._absent = AbsentNodes()

    # A leadership begins.

    def take_over(self, now_ns: int) -> None:
        """Everybody gets the whole time to connect."""
        fleet = self._view.fleet
        for node in range(len(fleet)):
            if fleet.state(node) is not NodeState.DEAD:
                self.liveness.watch(node, now_ns)

    def resume(self, number: int, now_ns: int) -> list[Output[Connection]]:
        """A job that was active before: if its gang runs, it is listened to again."""
        job = self._view.jobs[number]
        if job.gang is not None and job.placement is not None and job.gang.phase == "running":
            slot_gpus = job.spec.gang.slot_gpus
            self.gather.running(number, job.generation, job.placement.nodes, now_ns, slot_gpus)
        return self._follow(number, now_ns)

    # Connections.

    def connected(
        self, node: int, connection: Connection, incarnation: int, now_ns: int
    ) -> Sequence[Output[Connection]]:
        """An agent was let in; a connection that it had before is over."""
        before = self.connections.get(node)
        if before is not None:
            self._joined.pop(node, None)
        self.connections[node] = connection
        self._heard[node] = None
        self._absent.back(node)
        self.liveness.watch(node, now_ns, incarnation)
        return () if before is None else (Close(node, before, CloseReason.REPLACED),)

    def disconnected(
        self, node: int, connection: Connection, now_ns: int
    ) -> Sequence[Output[Connection]]:
        """A connection broke: the node is lost unless its agent comes back in time."""
        if self.connections.get(node) != connection:
            return ()
        del self.connections[node]
        self._joined.pop(node, None)
        self._absent.left(node, now_ns)
        if self.liveness.asked(node):
            return self._lost(node)  # a gang misses somebody already
        self._absent.wait(node, now_ns + self._reconnect_ns)
        return ()

    def _lost(self, node: int) -> Sequence[NodeSilent]:
        if node in self.connections:
            return ()
        silent = self.liveness.lost(node, self._absent.left_ns(node))
        return () if silent is None else (silent,)

    def _confirm_lost(self, exit: WorkerExited, now_ns: int) -> Sequence[NodeSilent]:
        """A gang lost a peer: a node of it without a connection is dead, not its agent alone."""
        job = self._view.jobs.get(exit.job)
        nodes = job.placement.nodes if job is not None and job.placement is not None else ()
        if exit.node not in nodes:
            return ()
        away = [node for node in nodes if node not in self.connections]
        if len(away) == 1 and away[0] in self._heard:
            return self._lost(away[0])
        # One of several is dead, and the agents of others may only be starting again, or have yet
        # to find this controller.
        self._expect_soon(away, now_ns)
        return ()

    def _expect_soon(self, nodes: Iterable[int], now_ns: int) -> None:
        """A gang waits for these nodes: their agents have less time to come back than usually."""
        for node in nodes:
            self._absent.wait(node, now_ns + SEVERAL_NS)

    # Messages.

    def received(
        self, node: int, message: AgentMessage, now_ns: int
    ) -> Sequence[Output[Connection]]:
        """A message on a node's connection; what it says about another node is not believed."""
        if names_another(node, message):
            return self.spoke_for_another(node)
        if isinstance(message, Heartbeat):
            if self.liveness.heartbeat(node, now_ns, message.incarnation):
                return self._close(node, CloseReason.GIVEN_UP)
            return ()
        if isinstance(message, Applied):
            self.liveness.spoke(node, now_ns)
            self.outbox.applied(node, message.sequence, message.index)
            return ()
        late = isinstance(message, LastSteps | Steps | ProgramEnded)
        why = refusal(self._view, node, message, last_word=late)
        if why is not None:
            return (Disbelieved(node, message, why),)
        return self._believed(node, message, now_ns)

    def _believed(
        self, node: int, message: AgentMessage, now_ns: int
    ) -> Sequence[Output[Connection]]:
        match message:
            case Seen():
                return self.diagnosis.receive(message, now_ns)
            case Activity():
                self.watch.active(message, now_ns)
                return ()
            case Busy():
                self.watch.busy(message, now_ns)
                return ()
            case FlushWanted(job=job, generation=generation):
                return (message,) if self.gather.takes_part(node, job, generation) else ()
            case ProgramEnded(job=job):
                return (message,) if node in self._view.jobs[job].fenced else ()
            case NodeSeen(inventory=inventory):
                self.liveness.watch(node, now_ns, inventory.incarnation)
                if self._joined.pop(node, None) == inventory:
                    return ()  # it said so when it joined, and the log has that
            case WorkerExited(cause=Cause.LOST_PEER):
                lost = self._confirm_lost(message, now_ns)
                return [*lost, *self.gather.receive(message, now_ns)]
        return self.gather.receive(_not_in_future(message, now_ns), now_ns)

    def spoke_for_another(self, node: int) -> Sequence[Output[Connection]]:
        """A node's message named another one."""
        return self._close(node, CloseReason.WRONG_NODE)

    def _close(self, node: int, reason: CloseReason) -> Sequence[Output[Connection]]:
        connection = self.connections.get(node)
        return () if connection is None else (Close(node, connection, reason),)

    # What the core did.

    def ordered(self, commands: Sequence[Command], now_ns: int) -> list[Output[Connection]]:
        """Commands of the core go out to the nodes that they are for."""
        sends: list[Output[Connection]] = []
        for command in commands:
            if not command.target:
                continue
            for node in command.target if self._joined else ():
                self._joined.pop(node, None)  # it has work now: what it says next matters
            self.gather.expect(command)
            self.outbox.send(command, now_ns)
            self.liveness.sent(command, now_ns + self.timeouts.abort_ns)
            if isinstance(command.body, Form):
                new = newcomers(command.body, command.target)
                self._expect_soon((n for n in new if n not in self.connections), now_ns)
            sends.append(Send(command, command.target))
        return sends

    def handled(
        self, event: Event, commands: Sequence[Command], now_ns: int
    ) -> list[Output[Connection]]:
        """The core has taken in an event, which gave these commands."""
        body = event.body
        if isinstance(body, NodeJoined):
            self._remember_joined(body, now_ns)
        elif isinstance(body, NodeSilent):
            self._joined.pop(body.node, None)
            if self._view.fleet.state(body.node) is NodeState.DEAD:
                self.outbox.forget(body.node)
        outputs: list[Output[Connection]] = []
        for number in dict.fromkeys(job_of(each) for each in (body, *(c.body for c in commands))):
            outputs += self._follow(number, now_ns)
        if isinstance(body, Progress):
            outputs += self._progressed(body, now_ns)
        elif isinstance(body, GangReady):
            self.watch.restored(body.job, body.generation, body.step)
        return outputs

    def _remember_joined(self, fact: NodeJoined, now_ns: int) -> None:
        node, inventory = self._view.fleet.index.get(fact.node.name), fact.inventory
        if node is None:
            return
        if node not in self.connections:  # it may never come: then it is lost like any other
            self.liveness.watch(node, now_ns, inventory.incarnation)
        if not inventory.jobs and not inventory.snapshots:
            self._joined[node] = inventory

    def _follow(self, number: int, now_ns: int) -> list[Output[Connection]]:
        """A gang's steps are watched for as long as it runs."""
        job, watched = self._view.jobs.get(number), self.watch.gangs.get(number)
        if job is None or job.placement is None or job.gang is None or job.gang.phase != "running":
            if watched is None:
                return []
            self.watch.end(number)
            return [GangOver(number)]
        if watched is not None and watched.generation == job.generation:
            return []
        self.watch.follow(job, self._view.policy.timeouts, now_ns)
        return [GangRuns(number)]

    def _progressed(self, body: Progress, now_ns: int) -> Sequence[EventBody]:
        """A gang has made steps; where its nodes tell of each, that is all this says."""
        if self.watch.told_of_each(body.job, body.generation):
            self.watch.alive(body.job, body.generation, body.step, now_ns)
            return ()
        job = self._view.jobs.get(body.job)
        record = GangRecord(
            job=body.job,
            generation=body.generation,
            step=body.step,
            step_ns=job.step_ns if job else 0,
            data_wait_ns=body.data_wait_ns,
        )
        return self.watch.record(record, now_ns)

    # Time.

    def tick(self, now_ns: int, late_ns: int = 0) -> Iterator[Output[Connection]]:
        """Looks at all deadlines. ``late_ns``: how long the shell could not, and heard nobody."""
        if late_ns > LATE_NS:  # a busy controller hears its agents late
            self.forgive(late_ns)
        for node in self._absent.due(now_ns):
            yield from self._lost(node)
        for silent in self.liveness.silent(now_ns):
            yield from self._close(silent.node, CloseReason.SILENT)
            self.connections.pop(silent.node, None)
            yield silent
        yield from self.gather.due(now_ns)
        yield from self.diagnosis.due(now_ns)
        for fact in self.watch.due(now_ns):
            yield from self._look_at(fact, now_ns)
        yield from self._send_again(now_ns)

    def _send_again(self, now_ns: int) -> list[Send]:
        again: dict[tuple[int, int], tuple[Command, list[int]]] = {}
        for node, command in self.outbox.due(now_ns):
            again.setdefault((command.sequence, command.index), (command, []))[1].append(node)
        return [Send(command, tuple(nodes)) for command, nodes in again.values()]

    def _look_at(self, fact: EventBody, now_ns: int) -> Sequence[Output[Connection]]:
        """Before anything is done about a gang that hangs, its ranks are asked what they do.

        While a node cannot be asked, as after the controller's own restart, nothing is told: its
        silence is for liveness to judge, and the gang is looked at again at its next deadline.
        """
        job = self._view.jobs.get(job_of(fact))
        if not isinstance(fact, NoProgress) or job is None or job.placement is None:
            return (fact,)
        nodes = job.placement.nodes
        there = all(node in self.connections for node in nodes)
        if not there or not self.diagnosis.begin(fact, nodes, now_ns):
            return ()
        return (AskRanks(InspectGang(job=fact.job, generation=fact.generation), nodes),)

    def not_asked(self, job: int) -> None:
        """A node that ``AskRanks`` named cannot be reached."""
        self.diagnosis.abandon(job)

    def forgive(self, deaf_ns: int) -> None:
        """The controller did not listen for this long: nobody was silent or away meanwhile."""
        self.liveness.forgive(deaf_ns)
        self._absent.forgive(deaf_ns)

    def soon_ns(self) -> int | None:
        """The first deadline that a tick must not be late for: recovery waits for it."""
        absent, diagnosed = self._absent.next_deadline_ns(), self.diagnosis.next_deadline_ns()
        if absent is None or diagnosed is None:
            return diagnosed if absent is None else absent
        return min(absent, diagnosed)

    def next_deadline_ns(self) -> int | None:
        """When the next tick is due."""
        deadlines = (
            self.soon_ns(),
            self.gather.next_deadline_ns(),
            self.liveness.next_deadline_ns(),
            self.outbox.next_deadline_ns(),
            self.watch.next_deadline_ns(),
        )
        return min((at for at in deadlines if at is not None), default=None)


def names_another(node: int, message: Struct) -> bool:
    """Whether a message on a node's connection names another one; some name none."""
    return getattr(message, "node", node) != node


def _not_in_future(message: AgentMessage, now_ns: int) -> AgentMessage:
    """Times that an agent reports lie before now, whatever its clock says."""
    if isinstance(message, Steps | StepsPrinted) and message.at_ns > now_ns:
        return structs.replace(message, at_ns=now_ns)
    if isinstance(message, Joined) and message.reached_ns > now_ns:
        return structs.replace(message, reached_ns=now_ns)
    return message
