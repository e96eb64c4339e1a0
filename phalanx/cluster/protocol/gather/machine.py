"""Answers of agents, gathered into one event a gang and phase.

Lives beside the core in the controller and is not logged: a controller that takes over sends the
outstanding orders again, and agents answer again. The events that it emits are logged.
"""

from __future__ import annotations

from typing import Literal

from phalanx.cluster.protocol.commands import Abort, Command, Drain, Form, Restore, Stop
from phalanx.cluster.protocol.events import (
    EventBody,
    GangDrained,
    GangReady,
    GangStuck,
    JobFinished,
)
from phalanx.cluster.protocol.gather.disagreement import Disagreement
from phalanx.cluster.protocol.gather.joining import joined
from phalanx.cluster.protocol.gather.last_reports import LastReports
from phalanx.cluster.protocol.gather.progress import GangProgress
from phalanx.cluster.protocol.messages import (
    AgentMessage,
    CheckResult,
    DeviceError,
    Drained,
    Finished,
    Joined,
    KeeperSilent,
    LastSteps,
    NodeNotice,
    NodeSeen,
    Ready,
    ReplicasDiffer,
    RestoreFailed,
    Steps,
    StepsPrinted,
    WorkerExited,
)

Phase = Literal["join", "restore", "drain", "run"]


class ExpectedReports:
    """What one gang is expected to say."""

    def __init__(
        self, generation: int, phase: Phase, nodes: tuple[int, ...], now_ns: int = 0
    ) -> None:
        self.generation = generation
        self.phase = phase
        self.nodes = dict.fromkeys(nodes)
        self.deadline_ns = 0
        self.kept_nodes: tuple[int, ...] = ()  # by slot of the last generation that ran
        self.kept_shift = 0
        self.kept_backup = -1
        self.slot_gpus = 0  # ranks of a node, but perhaps the last; 0: all have equally many
        self.answers: dict[int, AgentMessage] = {}
        self.progress = GangProgress(generation, now_ns)
        self.disagreement = Disagreement()


class Gather:
    """One instance a controller. Feed it every command that goes out and every message."""

    def __init__(self, report_ns: int = 5_000_000_000) -> None:
        self.report_ns = report_ns  # between two reports of a gang's progress
        self.gangs: dict[int, ExpectedReports] = {}
        self.last_reports = LastReports()

    def expect(self, command: Command) -> None:
        """A command goes out: its answers are waited for."""
        body = command.body
        if isinstance(body, Form):
            self._form(body)
        elif isinstance(body, Restore | Drain):
            phase: Phase = "restore" if isinstance(body, Restore) else "drain"
            gang = self.gangs.get(body.job)
            if gang is None or gang.generation != body.generation:
                gang = ExpectedReports(body.generation, phase, command.target)
                self.gangs[body.job] = gang
            if phase == "restore" and gang.phase in ("run", "drain"):
                return  # sent again to a node that came back, and all have answered meanwhile
            if gang.phase != phase:
                gang.phase, gang.answers = phase, {}
            gang.deadline_ns = body.deadline_ns
        elif isinstance(body, Abort | Stop):
            gang = self.gangs.get(body.job)
            if gang is not None and gang.generation == body.generation:
                self.last_reports.expect(body, command.target, gang.nodes)
        if isinstance(body, Stop):
            gang = self.gangs.get(body.job)
            whole = gang is not None and all(node in command.target for node in gang.nodes)
            if gang is not None and whole and body.generation >= gang.generation:
                del self.gangs[body.job]

    def _form(self, body: Form) -> None:
        gang = self.gangs.get(body.job)
        if gang is not None and gang.generation == body.generation:
            gang.deadline_ns = body.deadline_ns  # sent again
            return
        self.last_reports.forget(body.job)
        gang = self.gangs[body.job] = ExpectedReports(body.generation, "join", body.nodes)
        gang.deadline_ns = body.deadline_ns
        gang.kept_nodes = (body.kept_nodes or body.nodes) if body.kept_generation else ()
        gang.kept_shift, gang.kept_backup = body.kept_shift, body.kept_backup
        gang.slot_gpus = body.slot_gpus

    def running(
        self, job: int, generation: int, nodes: tuple[int, ...], now_ns: int, slot_gpus: int = 0
    ) -> None:
        """A controller took over while this gang runs: its progress and its end are waited for."""
        gang = self.gangs[job] = ExpectedReports(generation, "run", nodes, now_ns)
        gang.slot_gpus = slot_gpus

    def receive(self, message: AgentMessage, now_ns: int) -> list[EventBody]:
        """Takes in a message; returns the events it completes."""
        match message:
            case Joined() | Ready() | Drained() | Finished():
                return self._answer(message, now_ns)
            case Steps():
                return self._steps(message, now_ns)
            case StepsPrinted(node=node, job=job, generation=generation):
                return [message] if self.takes_part(node, job, generation) else []
            case RestoreFailed():
                return self._restore_failed(message)
            case LastSteps():
                return [*self.last_reports.receive(message, now_ns)]
            case WorkerExited(job=job, generation=generation):
                return [*self._newest(job, generation, now_ns), message]
            case NodeSeen() | DeviceError() | NodeNotice() | CheckResult() | KeeperSilent():
                return [message]
            case ReplicasDiffer():
                return self._differ(message, now_ns)
        return []  # heartbeats and receipts are for Liveness and Outbox

    def due(self, now_ns: int) -> list[EventBody]:
        """Gangs whose deadline has passed, with the nodes that are missing; each said once."""
        events: list[EventBody] = []
        for job, gang in self.gangs.items():
            events += gang.disagreement.due(now_ns)
            phase = gang.phase
            if phase == "run" or gang.deadline_ns > now_ns or not gang.deadline_ns:
                continue
            missing = tuple(node for node in gang.nodes if node not in gang.answers)
            gang.deadline_ns = 0
            events.append(
                GangStuck(job=job, generation=gang.generation, phase=phase, nodes=missing)
            )
        return [*events, *self.last_reports.due(now_ns)]

    def next_deadline_ns(self) -> int | None:
        """When the first gang is late."""
        waiting = [g.deadline_ns for g in self.gangs.values() if g.phase != "run"]
        waiting.append(self.last_reports.next_deadline_ns() or 0)
        waiting += [gang.disagreement.due_ns for gang in self.gangs.values()]
        return min((at for at in waiting if at), default=None)

    def _answer(self, message: Joined | Ready | Drained | Finished, now_ns: int) -> list[EventBody]:
        gang = self._gang_of(message.node, message.job, message.generation)
        if gang is None:
            return []
        phases = {Joined: "join", Ready: "restore", Drained: "drain", Finished: "run"}
        if phases[type(message)] != gang.phase:
            return []
        gang.answers[message.node] = message
        if len(gang.answers) < len(gang.nodes):
            return []
        answers, gang.answers = list(gang.answers.values()), {}
        if isinstance(message, Joined):
            gang.deadline_ns = 0
            there = [a for a in answers if isinstance(a, Joined)]
            kept = gang.kept_nodes, gang.kept_shift, gang.kept_backup
            return [*joined(message.job, gang.generation, *kept, there)]
        job, generation = message.job, message.generation
        step = min(a.step for a in answers if isinstance(a, Ready | Drained | Finished))
        if isinstance(message, Ready):
            gang.phase = "run"
            gang.progress.begin(step, now_ns)
            skipped = message.skipped
            return [GangReady(job=job, generation=generation, step=step, skipped=skipped)]
        events = gang.progress.report(job, len(gang.nodes), now_ns)
        del self.gangs[job]
        if isinstance(message, Drained):
            durable = all(a.durable for a in answers if isinstance(a, Drained))
            return [
                *events,
                GangDrained(job=job, generation=generation, step=step, durable=durable),
            ]
        told = (a.not_archived for a in answers if isinstance(a, Finished))
        missing = next(filter(None, told), "")
        left = (a.result for a in answers if isinstance(a, Finished))
        finished = JobFinished(
            job=job,
            generation=generation,
            step=step,
            not_archived=missing,
            result=next(filter(None, left), ""),
        )
        return [*events, finished]

    def _newest(self, job: int, generation: int, now_ns: int) -> list[EventBody]:
        """Something happened to a gang: how far it was is said before, as far as all have told."""
        gang = self.gangs.get(job)
        if gang is None or gang.generation != generation or gang.phase not in ("run", "drain"):
            return []
        return [*gang.progress.report(job, len(gang.nodes), now_ns)]

    def _gang_of(self, node: int, job: int, generation: int) -> ExpectedReports | None:
        """The gang that a node may speak of: one that it is in."""
        gang = self.gangs.get(job)
        if gang is None or gang.generation != generation or node not in gang.nodes:
            return None
        return gang

    def takes_part(self, node: int, job: int, generation: int) -> bool:
        """Whether a node is in the gang of this generation."""
        return self._gang_of(node, job, generation) is not None

    def _restore_failed(self, message: RestoreFailed) -> list[EventBody]:
        gang = self._gang_of(message.node, message.job, message.generation)
        if gang is None:
            return []
        gang.answers = {}
        return [message]

    def _differ(self, message: ReplicasDiffer, now_ns: int) -> list[EventBody]:
        gang = self._gang_of(message.node, message.job, message.generation)
        if gang is None:
            return []
        return [*gang.disagreement.receive(message, list(gang.nodes), gang.slot_gpus, now_ns)]

    def _steps(self, message: Steps, now_ns: int) -> list[EventBody]:
        gang = self._gang_of(message.node, message.job, message.generation)
        if gang is None:
            return []
        report_ns = None if gang.phase == "drain" else self.report_ns
        return [*gang.progress.receive(message, len(gang.nodes), now_ns, report_ns)]
