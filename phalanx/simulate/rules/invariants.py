"""What must hold after every event, whatever happened. Found violations are kept, not raised.

Each rule is checked on what the event touched; the whole state is swept now and then. A claim of a
job on GPUs is taken from its placement, not from the fleet's own books, so that both are checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec
import numpy as np
from msgspec import Struct

from phalanx.cluster.core import Core
from phalanx.cluster.forecast.why import explainer
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.commands import Command, Drain, Form, Restore
from phalanx.cluster.protocol.events import Event
from phalanx.simulate.rules.site_rules import SiteRules, held_by

RULES = {
    "crash": "the core must never raise",
    "one_gang": "no GPU is in two gangs",
    "whole_gang": "a gang has all its slots, or none",
    "books": "what the fleet says a job holds is what its placement says",
    "quota": "a team never holds more than its ceiling, and nothing is counted twice",
    "sent_away": "who leaves for others is preemptible or on loan, and has run for a while",
    "kept_out": "nobody starts who is held, or before the time that it asked for",
    "array": "no more members of an array run than its width allows",
    "dependency": "a job starts after what it waits for, and waits for ever only if it must",
    "window": "reserved nodes are used by those they are reserved for",
    "partition": "nodes of a partition are used by those whom its rules let in",
    "emptied": "a node that must be empty by a time is",
    "limit": "no job outlasts its time limit or its budget by more than it takes to leave",
    "starved": "no job waits for ever",
    "quarantined": "a quarantined node holds no work",
    "spares": "a spare holds no work, and a job's spare belongs to a job that runs",
    "generation": "generations of a job only rise",
    "epoch": "epochs of the controller only rise",
    "two_generations": "two generations never both commit",
    "two_writers": "two processes of a program's rank never run at a time",
    "committed": "no committed step is lost while its copies live",
    "losses": "every committed step that is lost is said, and no other",
    "exactly_once": "each sample is trained exactly once in the surviving history",
    "flushes": "no more jobs write to storage at a time than may",
    "ledger": "every GPU-second is in exactly one bucket",
    "asking": "a look at why jobs wait changes nothing",
    "replay": "the log replayed gives the same state",
    "given_up": "no node is given up that spoke, or had no time to speak or to come back",
    "overlooked": "a node that says nothing for too long is given up",
    "delivery": "an order that nobody confirmed is sent again",
    "liveness": "after faults stop, every job that can run makes progress",
}


QUARANTINED = int(NodeState.QUARANTINED)  # numpy takes ten times as long to see that an enum is one
ASKED = 8  # pending jobs in a sweep


class Violation(Struct, frozen=True):
    """Something that must not be."""

    rule: str
    time_ns: int
    sequence: int
    detail: str

    def __str__(self) -> str:
        return f"{self.rule} at event {self.sequence}: {self.detail} ({RULES[self.rule]})"


class Invariants:
    """Checks of one core."""

    def __init__(self, core: Core, sweep_events: int = 2000, replay_events: int = 0) -> None:
        self.found: list[Violation] = []
        self._sweep_events = self._sweep_at = sweep_events
        self._replay_events = replay_events
        self._events = 0
        self._generations: dict[int, int] = {}
        self._epoch = 0
        self._starved: dict[int, None] = {}
        self._placements: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._claims: dict[int, dict[int, int]] = {}  # node: job: mask
        self._tail: list[Event] = []
        self._site = SiteRules(core, self.add)
        self.watch(core)

    def watch(self, core: Core) -> None:
        """This core is the one from now on; it may know events that the last one did not handle."""
        self.core = core
        self._site.core = core
        self._placements, self._claims = {}, {}
        for number in core.view.active:
            self._gang(core.view.jobs[number], seen=True)
        if self._replay_events:
            self._snapshot = core.snapshot()
            self._tail = []

    def add(self, rule: str, detail: str) -> None:
        """Keeps a violation."""
        now, sequence = self.core.view.now_ns, self.core.sequence
        self.found.append(Violation(rule, now, sequence, detail))

    def after(self, event: Event, commands: list[Command]) -> None:
        """The core has taken in an event."""
        for command in commands:
            self._ordered(command)
        self._site.heard(event)
        known = [self.core.view.jobs.get(number) for number in _touched(event, commands)]
        touched = [job for job in known if job is not None]
        for job in touched:  # one event may take a node from one job and give it to another
            self._give_up(job)
        for job in touched:
            self._gang(job)
        if commands:  # what moves work or nodes is said; the sweep looks without that
            self._idle_nodes()
        self._events += 1
        if self._events >= self._sweep_at:
            # A sweep looks at every job there ever was: as they become more, it comes less often.
            self._sweep_at += max(self._sweep_events, len(self.core.ledger.accounts))
            self.sweep()
        if self._replay_events:
            self._tail.append(event)
            if len(self._tail) >= self._replay_events:
                self.replay()

    def sweep(self) -> None:
        """Looks at everything."""
        view = self.core.view
        for number in {**self._placements, **view.active}:
            job = view.jobs.get(number)
            if job is not None:
                self._gang(job)
        self._idle_nodes()
        self._books()
        self._spares()
        self._quotas()
        self._flushes()
        self._site.sweep()
        self._ask_why()
        try:
            self.core.ledger.check(view)
        except Exception as error:
            self.add("ledger", str(error))

    def replay(self) -> None:
        """Plays the log since the last snapshot again and compares."""
        again = Core.restore(self._snapshot)
        for event in self._tail:
            again.handle(event)
        now = self.core.snapshot()
        if again.snapshot() != now:
            self.add("replay", f"{len(self._tail)} events since the snapshot give another state")
        self._snapshot, self._tail = now, []

    def starved(self, bound_ns: int) -> None:
        """No eligible job waits longer than this; each is told once."""
        view = self.core.view
        for number in view.pending:
            waited = view.now_ns - view.jobs[number].queued_ns
            if waited > bound_ns and number not in self._starved:
                self._starved[number] = None
                self.add("starved", f"job {number} has waited {waited // 10**9} s")

    def _ordered(self, command: Command) -> None:
        if command.controller_epoch < self._epoch:
            self.add("epoch", f"{command.controller_epoch} after {self._epoch}")
        self._epoch = max(self._epoch, command.controller_epoch)
        body = command.body
        if isinstance(body, Drain):
            self._site.told_to_leave(self.core.view.jobs[body.job])
        if not isinstance(body, Form | Restore):
            return
        last = self._generations.get(body.job, 0)
        if body.generation < last:
            self.add("generation", f"job {body.job}: {body.generation} after {last}")
        self._generations[body.job] = max(last, body.generation)
        job = self.core.view.jobs[body.job]
        if isinstance(body, Restore) and body.source == "remote" and body.step > job.durable:
            self.add("committed", f"job {job.id}: step {body.step} was never durable")

    def _gang(self, job: ClusterJob, seen: bool = False) -> None:
        placement = job.placement
        nodes = placement.nodes if placement else ()
        masks = placement.gpus if placement else ()
        before = self._placements.get(job.id, ((), ()))
        if (nodes, masks) == before:
            return
        self._give_up(job)
        self._claim(job, nodes, masks)
        if placement is None:
            self._placements.pop(job.id, None)
            return
        self._placements[job.id] = (nodes, masks)
        self._site.placed(job)
        if not before[0] and not seen:
            self._site.started(job)
        shape = job.spec.gang
        if len(nodes) != shape.slots(placement.replicas) or len(set(nodes)) != len(nodes):
            wanted = shape.slots(placement.replicas)
            self.add("whole_gang", f"job {job.id} has {len(set(nodes))} of {wanted} nodes")
        if not shape.floor <= placement.replicas <= shape.ceiling:
            self.add("whole_gang", f"job {job.id} runs with {placement.replicas} replicas")

    def _give_up(self, job: ClusterJob) -> None:
        """Forgets what a job claims no longer."""
        placed = job.placement.nodes if job.placement else ()
        nodes, _ = self._placements.get(job.id, ((), ()))
        if nodes != placed:
            for node in sorted(set(nodes).difference(placed)):
                self._claims.get(node, {}).pop(job.id, None)

    def _claim(self, job: ClusterJob, nodes: tuple[int, ...], masks: tuple[int, ...]) -> None:
        """Takes over what a job claims; only what changed is looked at."""
        old_nodes, _ = self._placements.get(job.id, ((), ()))
        whole = job.spec.gang.whole_nodes
        fleet = self.core.view.fleet
        # A node that is taken whole is claimed once; of others the mask may have changed.
        new = sorted(set(nodes).difference(old_nodes)) if whole else nodes
        for slot, node in enumerate(new):
            full = (1 << fleet.nodes[node].gpus) - 1
            mask = full if whole or not masks else masks[slot]
            claims = self._claims.setdefault(node, {})
            for other, taken in claims.items():
                if other != job.id and taken & mask:
                    self.add("one_gang", f"node {node}: jobs {other} and {job.id}")
            claims[job.id] = mask

    def _books(self) -> None:
        fleet = self.core.view.fleet
        for node, jobs in enumerate(fleet.held):
            claims = self._claims.get(node, {})
            if jobs.keys() != claims.keys():
                self.add("books", f"node {node}: held by {list(jobs)}, claimed by {list(claims)}")
            taken = 0
            for job, claim in jobs.items():
                if claims.get(job) is not None and claim.gpus != claims[job]:
                    self.add("books", f"node {node}: job {job} holds {claim.gpus:b}")
                taken |= claim.gpus
            if taken & fleet.free_mask(node):
                self.add("books", f"node {node}: a held GPU counts as free")

    def _spares(self) -> None:
        view = self.core.view
        owners = {
            node: number
            for number in view.active
            if (placement := view.jobs[number].placement) is not None
            for node in placement.spares
        }
        for node in np.nonzero(view.fleet.columns.state == NodeState.SPARE)[0].tolist():
            owner = view.fleet.spare_for(node)
            if view.fleet.held[node]:
                self.add("spares", f"node {node} holds jobs {list(view.fleet.held[node])}")
            if owner != owners.get(node, 0):
                told = f"node {node} is kept for job {owner}; placements say {owners.get(node, 0)}"
                self.add("spares", told)

    def _idle_nodes(self) -> None:
        fleet = self.core.view.fleet
        if not fleet.history:
            return  # no node has ever changed its state
        away = np.flatnonzero(fleet.columns.state == QUARANTINED).tolist()
        bad = [node for node in away if fleet.held[node]]
        if bad:
            self.add("quarantined", f"nodes {bad[:5]} hold work")

    def _ask_why(self) -> None:
        """People ask at any time; what that does later is for ``replay`` to find."""
        core = self.core
        waiting = (
            number for number, job in core.view.jobs.items() if job.state == JobState.PENDING
        )
        before = msgspec.json.encode(core.queue.state)
        answers = explainer(core.queue, core.view)
        for number in list(islice(waiting, ASKED)):
            answers.of(number)
            if msgspec.json.encode(core.queue.state) != before:
                self.add("asking", f"about job {number}")

    def _flushes(self) -> None:
        most, writing = self.core.view.policy.storage.flushes, self.core.writing
        if most and len(writing) > most:
            self.add("flushes", f"jobs {list(writing)} write, {most} may")

    def _quotas(self) -> None:
        view = self.core.view
        for team, gpus in held_by(view, lambda spec: spec.team).items():
            quota = view.quotas.get(team)
            if quota is not None and quota.ceiling and gpus > quota.ceiling:
                self.add("quota", f"team {team} holds {gpus} of {quota.ceiling} GPUs")
        held = sum(h.gpus.bit_count() for jobs in view.fleet.held for h in jobs.values())
        if sum(view.fleet.idle_gpus) + held != view.fleet.total_gpus:
            self.add("quota", f"{held} GPUs held and {sum(view.fleet.idle_gpus)} idle")


def _touched(event: Event, commands: Iterable[Command]) -> Iterator[int]:
    seen = getattr(event.body, "job", 0)
    if seen:
        yield seen
    for command in commands:
        job = getattr(command.body, "job", 0)
        if job and job != seen:
            seen = job
            yield job
