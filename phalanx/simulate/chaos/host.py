"""One node: the real agent machine, simulated worker processes, a keeper's memory, a disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from phalanx.cluster.protocol.commands import (
    Abort,
    AgentAction,
    Check,
    Command,
    Drain,
    Flush,
    Form,
    Go,
    Restore,
    Stop,
)
from phalanx.cluster.protocol.local_gang import Output
from phalanx.cluster.protocol.messages import (
    THIS_NODE,
    CheckResult,
    Connected,
    Disconnected,
    FlushWanted,
    Heartbeat,
    InspectGang,
    LocalFact,
    NodeSeen,
    ProgramEnded,
    Restored,
    RestoreFailed,
    Sealed,
    Seen,
    Source,
    Wake,
    WardSealed,
    WorkerExited,
    WorkerUp,
)
from phalanx.simulate.chaos.machine import SimulatedMachine
from phalanx.simulate.chaos.network import CONTROLLER
from phalanx.simulate.chaos.workers import SECOND, NodeWorkers


def _nothing() -> None:
    """Nobody waits for it."""


class SimulatedHost(SimulatedMachine):
    """A machine with the processes on it."""

    # The agent's shell.

    def connect(self) -> None:
        """Tries to reach the controller that leads."""
        if not self.alive or self.agent is None or self.controller is not None:
            return
        leader = self.world.leader
        if leader.alive and self.world.network.open(self.node):
            self.world.connections += 1
            self.connection = self.world.connections
            self.controller = leader
            self.feed(Connected())
        else:
            if not leader.alive and self.world.network.open(self.node):
                self.programs.counted_on(self.world.agenda.now_ns)  # nobody starts them elsewhere
            self.world.agenda.after(self._pause(), self.connect)

    def _pause(self) -> int:
        return SECOND * (1 + self.world.luck.below(3))

    def disconnect(self) -> None:
        """The connection is gone, as this side sees."""
        if self.controller is None:
            return
        self.controller = None
        self.connection = 0
        if self.alive and self.agent is not None:
            self.feed(Disconnected())
            self.world.agenda.after(self._pause(), self.connect)

    def command(self, connection: int, command: Command) -> None:
        """A command arrives."""
        if self.alive and self.agent is not None and connection == self.connection:
            if self.frozen:
                self.world.agenda.after(5 * SECOND, self.command, connection, command)
                return
            self._out(self.agent.handle(command, self.clock()))

    def answered(self, connection: int, asked_ns: int) -> None:
        """The controller has answered what this node asked."""
        listens = self.alive and self.agent is not None and not self.frozen
        if listens and connection == self.connection:
            self.programs.counted_on(asked_ns)

    def _ask(self) -> None:
        """Has the controller answer, while a program of this node runs or is to."""
        controller, agent = self.controller, self.agent
        if controller is None or agent is None or not any(map(self._is_program, self.workers)):
            return
        alive = Heartbeat(node=self.node, incarnation=agent.incarnation)
        asked = self.connection, alive, self.world.agenda.now_ns
        self.world.network.send(self.node, CONTROLLER, controller.asked, *asked)

    def _is_program(self, job: int) -> bool:
        return not self.world.spec(job).reports_steps

    def look(self, connection: int, order: InspectGang) -> None:
        """The controller asks what the ranks of a gang do."""
        worker = self._worker(order.job, order.generation)
        if not self.alive or self.agent is None or connection != self.connection:
            return
        if self.frozen or worker is None:
            return
        seen = Seen(
            node=self.node,
            job=order.job,
            generation=order.generation,
            ranks=self.world.workers.entered(self, worker),
            folder="",
        )
        self._out([seen])

    def feed(self, fact: LocalFact) -> None:
        """Tells the agent of something that happened on this node."""
        if self.alive and self.agent is not None:
            self._out(self.agent.handle(fact, self.clock()))

    def clock(self) -> int:
        """The time that this node believes it is."""
        return max(0, self.world.agenda.now_ns + self.skew_ns)

    def _out(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, AgentAction):
                self._act(output)
            elif self.controller is not None:
                controller, connection = self.controller, self.connection
                self.world.network.send(
                    self.node, CONTROLLER, controller.receive, self.node, connection, output
                )
                if isinstance(output, Heartbeat | NodeSeen):
                    self._ask()
        self._arm()

    def _arm(self) -> None:
        assert self.agent is not None
        deadline = self.agent.next_deadline_ns()
        if deadline is not None:
            at = max(deadline - self.skew_ns, self.world.agenda.now_ns)
            if self._armed_ns is None or at < self._armed_ns:
                self._armed_ns = at
                self.world.agenda.at(at, self._wake, at)

    def _wake(self, asked_ns: int) -> None:
        if self._armed_ns != asked_ns:
            return
        self._armed_ns = None
        if self.alive and self.agent is not None:
            self._out(self.agent.handle(Wake(), self.clock()))

    # What the agent wants done.

    def _act(self, action: AgentAction) -> None:
        match action:
            case Form():
                self._form(action)
            case Restore(job=job, generation=generation, step=step, source=source):
                worker = self._worker(job, generation)
                if worker is not None:
                    worker.phase, worker.saves = "restoring", source if action.saves else ""
                    worker.token += 1
                    delay = int(self.world.restore_ns(source) * self.slow)
                    token = worker.token
                    self.world.agenda.after(delay, self._restore, worker, token, step, source)
            case Go(job=job, generation=generation):
                worker = self._worker(job, generation)
                if worker is not None:
                    self._go(worker)
            case Abort(job=job, generation=generation):
                worker = self._worker(job, generation)
                if worker is not None:
                    worker.phase = "up"
                    worker.token += 1
                    self.world.workers.leave(job, generation, self.node)
            case Drain(job=job, generation=generation):
                worker = self._worker(job, generation)
                if worker is not None:
                    self.world.workers.drain(self, worker)
            case Flush(job=job, generation=generation):
                self.world.workers.granted(job, generation, self.node)
            case Stop(job=job, keep_snapshots=keep, confirm=confirm, generation=generation):
                ended = ProgramEnded(node=THIS_NODE, job=job, generation=generation)
                self.programs.end(job, partial(self.feed, ended) if confirm else _nothing)
                self.stop(job)
                if not keep:
                    self.memory.pop(job, None)
            case Command(sequence=command, body=Check(check=check)):
                delay = SECOND * (5 + self.world.luck.below(20))
                self.world.agenda.after(delay, self._checked, check, command, self.incarnation)

    def _worker(self, job: int, generation: int) -> NodeWorkers | None:
        worker = self.workers.get(job)
        return worker if worker is not None and worker.generation == generation else None

    def _form(self, order: Form) -> None:
        old = self.workers.get(order.job)
        if old is not None:
            self.world.workers.leave(order.job, old.generation, self.node)
        ranks = order.ranks_on(self.node)
        worker = NodeWorkers(job=order.job, generation=order.generation, ranks=ranks)
        self.workers[order.job] = worker
        ended = ProgramEnded(node=THIS_NODE, job=order.job, generation=order.generation)
        spare = self.node in order.spares
        self.programs.end(order.job, partial(self.feed, ended) if spare else _nothing)
        if spare:
            return
        warm = old is not None and old.phase != "out"
        seconds = 1 + self.world.luck.below(2) if warm else 4 + self.world.luck.below(8)
        self.world.agenda.after(int(seconds * SECOND * self.slow), self._up, worker, worker.token)

    def _up(self, worker: NodeWorkers, token: int) -> None:
        if not self._current(worker, token):
            return
        if self.broken:
            self.die(worker, self.broken)
            return
        worker.phase = "up"
        for rank in worker.ranks:
            self.feed(WorkerUp(job=worker.job, generation=worker.generation, rank=rank))

    def _current(self, worker: NodeWorkers, token: int) -> bool:
        known = self.workers.get(worker.job)
        return self.alive and known is worker and worker.token == token

    def _restore(self, worker: NodeWorkers, token: int, step: int, source: Source) -> None:
        if not self._current(worker, token):
            return
        if source == "remote" and self.world.remote.down:
            self.world.agenda.after(5 * SECOND, self._restore, worker, token, step, source)
            return
        if self.broken:
            self.die(worker, self.broken)
            return
        branch = self.world.branch_of(self, worker.job, worker.generation, step, source)
        if branch is not None:
            worker.phase, worker.step, worker.branch = "ready", step, branch
            form = self.world.forms[worker.job, worker.generation]
            slot, count = form.nodes.index(self.node), len(form.nodes)
            self.keep(form, "own", slot, step, branch)
            if form.buddy_shift:
                buddy = self.world.hosts[form.nodes[(slot + form.buddy_shift) % count]]
                if buddy.alive:
                    buddy.keep(form, "ward", slot, step, branch)
            elif form.backup >= 0 and not self._is_program(form.job):  # it seals its next step
                self.world.hosts[form.backup].back_up(form, step, branch)
        job, generation = worker.job, worker.generation
        for rank in worker.ranks:
            if branch is not None:
                restored = Restored(
                    job=job, generation=generation, rank=rank, step=step, source=source
                )
                self.feed(restored)
                continue
            failed = RestoreFailed(
                job=job,
                generation=generation,
                node=THIS_NODE,
                source=source,
                step=step,
                detail="it is not there, or is damaged",
            )
            self.feed(failed)

    def _go(self, worker: NodeWorkers) -> None:
        if worker.phase != "ready":
            return
        program = self._is_program(worker.job)
        if program and not self.programs.may_start:
            self._ask()
            self.world.agenda.after(SECOND, self._go_on, worker, worker.token)
        else:
            if program:
                self.programs.start(worker)
            worker.phase = "running"
            job, step = worker.job, worker.step
            self.gone[job] = worker.generation
            self.durable[job] = min(self.durable.get(job, 0), step)
            self.disk[job] = {k: v for k, v in self.disk.get(job, {}).items() if k <= step}
            self.world.workers.restored(self, worker, worker.step, worker.branch)

    def _go_on(self, worker: NodeWorkers, token: int) -> None:
        if self._current(worker, token):
            self._go(worker)

    def lapsed(self, job: int) -> None:
        """The node's lease has ended a program here."""
        worker = self.workers.get(job)
        if worker is not None:
            self.die(worker, "worker_killed")

    def stop(self, job: int) -> None:
        """Workers of a job end here."""
        self.programs.end(job)
        worker = self.workers.pop(job, None)
        if worker is not None:
            worker.token += 1
            self.world.workers.leave(job, worker.generation, self.node)

    def _checked(self, check: str, command: int, incarnation: int) -> None:
        if self.alive and incarnation == self.incarnation and not self.frozen:
            passed = not self.broken or self.lying
            self.feed(
                CheckResult(
                    node=THIS_NODE, check=check, passed=passed, command=command, cause=self.broken
                )
            )

    # What happens to workers.

    def die(self, worker: NodeWorkers, cause: str) -> None:
        """A worker process dies; the others of the node end with it."""
        if worker.phase == "out":
            return
        worker.phase = "out"
        worker.token += 1
        self.world.workers.leave(worker.job, worker.generation, self.node)
        rank = worker.ranks[0] if worker.ranks else 0
        fact = WorkerExited(
            job=worker.job,
            generation=worker.generation,
            node=THIS_NODE,
            rank=rank,
            step=worker.step,
            cause=cause,
        )
        if worker.ranks:
            self.feed(fact)

    def lost_peer(self, job: int, generation: int) -> None:
        """A worker notices that another one is gone, and ends."""
        worker = self._worker(job, generation)
        if self.alive and worker is not None and worker.phase == "running":
            self.die(worker, "lost_peer")

    def left(self, job: int, generation: int, step: int) -> None:
        """Workers end as they should."""
        worker = self._worker(job, generation)
        if not self.alive or worker is None:
            return
        worker.phase = "out"
        self.programs.left(worker)
        for rank in worker.ranks:
            fact = WorkerExited(
                job=job, generation=generation, node=THIS_NODE, rank=rank, cause="", step=step
            )
            self.feed(fact)

    def sealed(self, worker: NodeWorkers, step: int, acknowledged: bool) -> None:
        """The ranks of this node tell of a step."""
        for rank in worker.ranks:
            fact = Sealed(
                job=worker.job,
                generation=worker.generation,
                rank=rank,
                step=step,
                at_ns=self.clock(),
                acknowledged=acknowledged,
                durable=self.durable.get(worker.job, 0),
            )
            self.feed(fact)

    def wants_flush(self, form: Form) -> None:
        """The ranks of this node ask for leave to write a checkpoint."""
        self.feed(FlushWanted(job=form.job, generation=form.generation))

    def ward_sealed(self, form: Form, step: int) -> None:
        """This node keeps a neighbour's snapshot."""
        self.feed(WardSealed(job=form.job, generation=form.generation, step=step))

    def back_up(self, form: Form, step: int, branch: int) -> None:
        """This spare keeps a snapshot of a gang's only node, unless it has more to do by now."""
        known = self.workers.get(form.job)
        if self.alive and known is not None and known.generation == form.generation:
            self.keep(form, "ward", 0, step, branch)
            self.ward_sealed(form, step)

    def knows(self, form: Form, step: int) -> bool:
        """Whether the agent has heard that its ranks sealed a step."""
        if not self.alive or self.agent is None:
            return False
        return self.agent.committed(form.job) >= step
