"""Answers of agents, gathered into one event a gang and phase.

Lives beside the core in the controller and is not logged: a controller that takes over sends the
outstanding orders again, and agents answer again. The events that it emits are logged.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

from phalanx.cluster.detectors import vote
from phalanx.cluster.protocol.commands import Abort, Command, Drain, Form, Restore, Stop
from phalanx.cluster.protocol.events import (
    CheckResult,
    Corruption,
    DeviceError,
    EventBody,
    FlushWanted,
    GangDrained,
    GangJoined,
    GangReady,
    GangStuck,
    JobFinished,
    KeeperSilent,
    NodeNotice,
    NodeSeen,
    Progress,
    RestoreFailed,
    WorkerExited,
)
from phalanx.cluster.protocol.last_reports import LastWords
from phalanx.cluster.protocol.messages import (
    AgentMessage,
    Checked,
    Differed,
    Drained,
    Exited,
    Finished,
    FlushAsked,
    Hello,
    Joined,
    KeeperChanged,
    LastSteps,
    Noticed,
    Ready,
    Refused,
    Steps,
    Trouble,
)

Phase = Literal["join", "restore", "drain", "run"]

CONFIRM_NS = 5_000_000_000  # for a second node to say the same of replicas that disagree


class Expected(Struct):
    """What one gang is expected to say."""

    generation: int
    phase: Phase
    nodes: dict[int, None]
    deadline_ns: int
    kept_nodes: tuple[int, ...] = ()  # by slot of the last generation that ran
    kept_shift: int = 0
    slot_gpus: int = 0  # ranks of a node, but perhaps the last; 0: all have equally many
    answers: dict[int, AgentMessage] = {}
    heard: dict[int, tuple[int, int]] = {}  # by node: the last step and checkpoint it spoke of
    steps: dict[int, Steps] = {}  # what was said since the last report
    reported: int = -1
    reported_ns: int = 0
    differed: bool = False  # said already
    doubts: dict[int, Differed] = {}  # by node: what it says of replicas that disagree
    doubts_due_ns: int = 0  # when what nobody confirmed is said without names; 0: nothing is
    durable: int = 0  # newest checkpoint that was reported


class Gather:
    """One instance a controller. Feed it every command that goes out and every message."""

    def __init__(self, report_ns: int = 5_000_000_000) -> None:
        self.report_ns = report_ns  # between two reports of a gang's progress
        self.gangs: dict[int, Expected] = {}
        self.last_words = LastWords()

    def expect(self, command: Command) -> None:
        """A command goes out: its answers are waited for."""
        body = command.body
        if isinstance(body, Form):
            self._form(body)
        elif isinstance(body, Restore | Drain):
            phase: Phase = "restore" if isinstance(body, Restore) else "drain"
            gang = self.gangs.get(body.job)
            if gang is None or gang.generation != body.generation:
                nodes = dict.fromkeys(command.target)
                gang = Expected(body.generation, phase, nodes, body.deadline_ns)
                self.gangs[body.job] = gang
            if phase == "restore" and gang.phase in ("run", "drain"):
                return  # sent again to a node that came back, and all have answered meanwhile
            if gang.phase != phase:
                gang.phase, gang.answers = phase, {}
            gang.deadline_ns = body.deadline_ns
        elif isinstance(body, Abort | Stop):
            gang = self.gangs.get(body.job)
            if gang is not None and gang.generation == body.generation:
                self.last_words.expect(body, command.target, gang.nodes)
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
        self.last_words.forget(body.job)
        kept = (body.kept_nodes or body.nodes) if body.kept_generation else ()
        self.gangs[body.job] = Expected(
            body.generation,
            "join",
            dict.fromkeys(body.nodes),
            body.deadline_ns,
            kept,
            body.kept_shift,
            body.slot_gpus,
        )

    def running(
        self, job: int, generation: int, nodes: tuple[int, ...], now_ns: int, slot_gpus: int = 0
    ) -> None:
        """A controller took over while this gang runs: its progress and its end are waited for."""
        self.gangs[job] = Expected(
            generation,
            "run",
            dict.fromkeys(nodes),
            0,
            slot_gpus=slot_gpus,
            reported_ns=now_ns,
        )

    def receive(self, message: AgentMessage, now_ns: int) -> list[EventBody]:
        """Takes in a message; returns the events it completes."""
        match message:
            case Joined() | Ready() | Drained() | Finished():
                return self._answer(message, now_ns)
            case Steps():
                return self._steps(message, now_ns)
            case Refused():
                return self._refused(message)
            case LastSteps():
                return [*self.last_words.receive(message, now_ns)]
            case Exited(node=n, job=j, generation=g, rank=r, cause=c, step=s, detail=d):
                return [
                    *self._newest(j, g, now_ns),
                    WorkerExited(job=j, generation=g, node=n, rank=r, cause=c, step=s, detail=d),
                ]
            case Trouble(node=n, cause=c, gpu=u, rail=r, job=j, detail=d):
                return [DeviceError(node=n, cause=c, gpu=u, rail=r, job=j, detail=d)]
            case Noticed(node=n, deadline_ns=at, cause=c):
                return [NodeNotice(node=n, deadline_ns=at, cause=c)]
            case Checked(node=n, check=k, passed=p, command=m, cause=c, detail=d):
                return [CheckResult(node=n, check=k, passed=p, command=m, cause=c, detail=d)]
            case Hello(node=n, inventory=inventory):
                return [NodeSeen(node=n, inventory=inventory)]
            case Differed():
                return self._differed(message, now_ns)
            case KeeperChanged(node=n, job=j, state=state, seconds=s):
                return [KeeperSilent(node=n, job=j, state=state, seconds=s)]
            case FlushAsked(node=n, job=j, generation=g):
                gang = self._gang_of(n, j, g)
                return [FlushWanted(job=j, generation=g)] if gang is not None else []
        return []  # heartbeats and receipts are for Liveness and Outbox

    def due(self, now_ns: int) -> list[EventBody]:
        """Gangs whose deadline has passed, with the nodes that are missing; each said once."""
        found: list[EventBody] = []
        for job, gang in self.gangs.items():
            if 0 < gang.doubts_due_ns <= now_ns:
                found.append(_unconfirmed(job, gang))
            phase = gang.phase
            if phase == "run" or gang.deadline_ns > now_ns or not gang.deadline_ns:
                continue
            missing = tuple(node for node in gang.nodes if node not in gang.answers)
            gang.deadline_ns = 0
            found.append(GangStuck(job=job, generation=gang.generation, phase=phase, nodes=missing))
        return [*found, *self.last_words.due(now_ns)]

    def next_deadline_ns(self) -> int | None:
        """When the first gang is late."""
        waiting = [g.deadline_ns for g in self.gangs.values() if g.phase != "run"]
        waiting.append(self.last_words.next_deadline_ns() or 0)
        waiting += [gang.doubts_due_ns for gang in self.gangs.values()]
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
            return self._joined(message.job, gang, [a for a in answers if isinstance(a, Joined)])
        job, generation = message.job, message.generation
        step = min(a.step for a in answers if isinstance(a, Ready | Drained | Finished))
        if isinstance(message, Ready):
            gang.phase, gang.reported, gang.reported_ns = "run", step, now_ns
            skipped = message.skipped
            return [GangReady(job=job, generation=generation, step=step, skipped=skipped)]
        events = self._report(job, gang, now_ns)
        del self.gangs[job]
        if isinstance(message, Drained):
            durable = all(a.durable for a in answers if isinstance(a, Drained))
            return [
                *events,
                GangDrained(job=job, generation=generation, step=step, durable=durable),
            ]
        return [*events, JobFinished(job=job, generation=generation, step=step)]

    def _joined(self, job: int, gang: Expected, answers: list[Joined]) -> list[EventBody]:
        """The newest step of which every slot of the last generation has a copy here."""
        step = _common_step(gang, {a.node: a for a in answers})
        empty = tuple(a.node for a in answers if not _holds(a, step))
        events: list[EventBody] = []
        reached = [(a.reached, a.reached_ns) for a in answers if a.reached_ns]
        if reached:
            last = min(at for at, _ in reached)
            # The step that all had completed, when the last of them had.
            ended = max(ns for at, ns in reached if at == last)
            events.append(
                Progress(
                    job=job,
                    generation=gang.generation,
                    step=last,
                    committed=max(0, step),
                    durable=0,
                    at_ns=ended,
                )
            )
        joined = GangJoined(
            job=job,
            generation=gang.generation,
            step=step,
            empty=empty,
            durable=max(a.durable for a in answers),
            newest=min((a.committed for a in answers if a.committed >= 0), default=-1),
        )
        return [*events, joined]

    def _newest(self, job: int, generation: int, now_ns: int) -> list[EventBody]:
        """Something happened to a gang: how far it was is said before, as far as all have told."""
        gang = self.gangs.get(job)
        if gang is None or gang.generation != generation or gang.phase not in ("run", "drain"):
            return []
        return self._report(job, gang, now_ns)

    def _gang_of(self, node: int, job: int, generation: int) -> Expected | None:
        """The gang that a node may speak of: one that it is in."""
        gang = self.gangs.get(job)
        if gang is None or gang.generation != generation or node not in gang.nodes:
            return None
        return gang

    def _refused(self, message: Refused) -> list[EventBody]:
        gang = self._gang_of(message.node, message.job, message.generation)
        if gang is None:
            return []
        gang.answers = {}
        return [
            RestoreFailed(
                job=message.job,
                generation=message.generation,
                node=message.node,
                source=message.source,
                step=message.step,
                detail=message.detail,
                there=message.there,
            )
        ]

    def _differed(self, message: Differed, now_ns: int) -> list[EventBody]:
        """Replicas disagree. Weights that changed between two updates say who is wrong; else a
        vote does. Without either the core gets to know what each of them said.

        All nodes with such replicas say the same: what one alone says of others is not believed.
        """
        gang = self._gang_of(message.node, message.job, message.generation)
        if gang is None or gang.differed or message.node in gang.doubts:
            return []
        nodes = list(gang.nodes)
        each = gang.slot_gpus or max(1, message.world // len(nodes))
        meant = (*message.changed, *(rank for rank, _ in message.copies))
        if not all(0 <= rank < each * len(nodes) for rank in meant):
            return []
        alone = all(nodes[rank // each] == message.node for rank in meant)
        named = _accused(message, nodes, each)
        agreed = any(
            structs.replace(other, node=message.node) == message
            or (named and _accused(other, nodes, each) == named)
            for other in gang.doubts.values()
        )
        gang.doubts[message.node] = message
        if not alone and not agreed:
            gang.doubts_due_ns = gang.doubts_due_ns or now_ns + CONFIRM_NS
            return []
        gang.differed, gang.doubts_due_ns = True, 0
        claims = ((nodes[rank // each], said) for rank, said in message.copies)
        return [
            Corruption(
                job=message.job,
                generation=message.generation,
                step=message.step,
                clean_step=message.clean_step,
                nodes=named,
                claims=() if named else tuple(claims),
                block=min((rank for rank, _ in message.copies), default=0),
            )
        ]

    def _steps(self, message: Steps, now_ns: int) -> list[EventBody]:
        gang = self._gang_of(message.node, message.job, message.generation)
        if gang is None:
            return []
        step, durable = gang.heard.get(message.node, (-1, -1))
        if step >= message.step and durable >= message.durable:
            return []  # said twice, or overtaken by a later one
        gang.heard[message.node] = max(step, message.step), max(durable, message.durable)
        before = gang.steps.get(message.node)
        gang.steps[message.node] = message if before is None else _sum(before, message)
        # One rank that knows a checkpoint to be complete is enough: it is so for all.
        if message.durable > gang.durable and len(gang.steps) < len(gang.nodes):
            return [self._checkpointed(message, gang)]
        durable = max(each.durable for each in gang.steps.values())
        late = gang.phase == "drain" or now_ns - gang.reported_ns >= self.report_ns
        if not late and durable <= gang.durable:
            return []
        return self._report(message.job, gang, now_ns)

    def _checkpointed(self, message: Steps, gang: Expected) -> Progress:
        """A new checkpoint is said at once: whoever has yet to report may never do so again."""
        gang.durable, gang.reported = message.durable, max(gang.reported, message.durable)
        return Progress(
            job=message.job,
            generation=gang.generation,
            step=gang.reported,
            committed=0,  # not known of all
            durable=message.durable,
            at_ns=message.at_ns,
        )

    def _report(self, job: int, gang: Expected, now_ns: int) -> list[EventBody]:
        """Progress of the whole gang: the least over its nodes; waits are the longest of any."""
        if len(gang.steps) < len(gang.nodes):
            return []
        said = list(gang.steps.values())
        least, durable = min(each.step for each in said), max(each.durable for each in said)
        step = max(least, durable)  # a checkpoint is complete when all have made its step
        if step <= gang.reported and durable <= gang.durable:
            return []
        gang.reported, gang.reported_ns, gang.steps = max(step, gang.reported), now_ns, {}
        gang.durable = max(durable, gang.durable)
        return [
            Progress(
                job=job,
                generation=gang.generation,
                step=step,
                # A program that reports steps need not make snapshots.
                committed=max(0, min(each.committed for each in said)),
                durable=durable,
                at_ns=max(each.at_ns for each in said if each.step == least),
                data_wait_ns=max(each.data_wait_ns for each in said),
                checkpoint_ns=max(each.checkpoint_ns for each in said),
                straggler_ns=max(each.straggler_ns for each in said),
                busy_ns=max(each.busy_ns for each in said),
            )
        ]


def _accused(message: Differed, nodes: list[int], each: int) -> tuple[int, ...]:
    """Nodes whose replicas are wrong, as far as one message tells."""
    wrong = message.changed or vote({0: message.copies}).wrong
    return tuple(dict.fromkeys(nodes[rank // each] for rank in wrong))


def _unconfirmed(job: int, gang: Expected) -> Corruption:
    """Replicas disagree, as one node says: the step is made again, and nobody is accused."""
    gang.differed, gang.doubts_due_ns = True, 0
    first = next(iter(gang.doubts.values()))
    clean_step = min(each.clean_step for each in gang.doubts.values())
    return Corruption(
        job=job, generation=gang.generation, step=first.step, clean_step=clean_step, nodes=()
    )


def _common_step(gang: Expected, answers: dict[int, Joined]) -> int:
    """The newest step that each slot's own node or its buddy holds; -1: there is none.

    A slot of which neither is in the gang any more does not count: whether what it kept can still
    be had is the core's to know.
    """
    common: set[int] | None = None
    slots = len(gang.kept_nodes)
    for slot, node in enumerate(gang.kept_nodes):
        own = answers.get(node)
        buddy = gang.kept_nodes[(slot + gang.kept_shift) % slots] if gang.kept_shift else -1
        other = answers.get(buddy)
        if own is None and other is None:
            continue
        copies = {own.committed, own.previous, own.oldest} if own else set()
        if other:
            copies |= {other.ward, other.ward_previous}
        common = copies if common is None else common & copies
    return max(common, default=-1) if common else -1


def _holds(answer: Joined, step: int) -> bool:
    """Whether a node keeps anything of a step; of none: anything at all."""
    if step < 0:
        return answer.committed >= 0
    own = answer.committed, answer.previous, answer.oldest
    return step in (*own, answer.ward, answer.ward_previous)


def _sum(before: Steps, after: Steps) -> Steps:
    return Steps(
        node=after.node,
        job=after.job,
        generation=after.generation,
        step=after.step,
        committed=after.committed,
        durable=max(before.durable, after.durable),
        at_ns=after.at_ns,
        data_wait_ns=before.data_wait_ns + after.data_wait_ns,
        checkpoint_ns=before.checkpoint_ns + after.checkpoint_ns,
        straggler_ns=before.straggler_ns + after.straggler_ns,
        busy_ns=before.busy_ns + after.busy_ns,
    )
