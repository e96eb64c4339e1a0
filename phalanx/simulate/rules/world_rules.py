"""What must hold of a fleet whose gangs answer as one: told by the world, not by the core.

Beside the rules of every event: nobody stands still, nobody goes back further than it must, the
log replays, and the books are closed at the end of time.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.commands import Command, Restore
from phalanx.cluster.protocol.events import Event
from phalanx.cluster.protocol.timeouts import derive
from phalanx.cluster.units import SECOND_NS
from phalanx.simulate.rules.invariants import Invariants
from phalanx.simulate.scenario.shape import ns

if TYPE_CHECKING:
    from phalanx.simulate.world.world import World

REPLAYED = 500  # events that are replayed at a time
SLACK_NS = 600 * SECOND_NS  # for whatever comes between two bounds


class WorldRules(Invariants):
    """Checks of a world with one core."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: dict[tuple[int, int], None] = {}  # (job, generation) that stood still
        self._idle_since_ns = -1  # nothing runs, though something could
        self._replay_at = 1
        super().__init__(world.core)

    def after(self, event: Event, commands: list[Command]) -> None:
        """The core has taken in an event."""
        super().after(event, commands)
        if not self._replay_events and self._events >= self._replay_at:
            self._replay_events = REPLAYED
            self._snapshot, self._tail = self.core.snapshot(), []

    def replay(self) -> None:
        """Plays the log since the last snapshot again; the next time when there is twice as much.

        A log of any length is so looked at a few times, early and late.
        """
        super().replay()
        self._replay_events = 0
        self._replay_at = 2 * self._events

    def look(self) -> None:
        """What takes long to go wrong."""
        self._stands_still()
        self._idle_fleet()
        load = self._world.scenario.workload
        if load.kind == "multi-tenant" and load.starved_days and load.utilisation < 1:
            self.starved(ns(load.starved_days * 86400))

    def close(self) -> None:
        """The end of time."""
        self.sweep()
        if self._tail:
            self.replay()
        ledger, now = self.core.ledger, self._world.end_ns
        passed = self._world.fleet.total_gpus * now
        if ledger.fleet_gpu_ns != passed:
            self.add("ledger", f"{ledger.fleet_gpu_ns} of {passed} GPU-ns at the end of time")

    def restores(self, body: Restore) -> None:
        """A gang is told to go on from a step: no earlier than it must, and from a clean one."""
        gangs, job = self._world.gangs, self.core.view.jobs[body.job]
        saved, clean = gangs.saved.get(job.id, []), gangs.clean.get(job.id)
        if clean is not None and body.step > clean:
            sentence = (
                f"job {job.id}: step {body.step} has wrong numbers, {clean} was the last without"
            )
            self.add("committed", sentence)
        count = bisect_right(saved, clean) if clean is not None else len(saved)
        newest, expected = saved[count - 1] if count else 0, job.spec.expected
        # A step in memory may be older: what is redone is less than the time to read a newer one.
        if (newest - body.step) * expected.step_ns > expected.restore_remote_ns:
            sentence = f"job {job.id} goes back to step {body.step}, and step {newest} was durable"
            self.add("committed", sentence)

    def _stands_still(self) -> None:
        """A gang that makes no steps is found, or has an end of its deadlines."""
        world = self._world
        for number in self.core.view.active:
            job, run = self.core.view.jobs[number], world.gangs.runs.get(number)
            if run is not None and run.phase == "running":
                continue
            since = job.started_ns if run is None else max(run.formed_ns, run.stopped_ns)
            stood = world.agenda.now_ns - max(since, world.gangs.brownouts.last_ns)
            if stood > self._bound_ns(job) and (number, job.generation) not in self._told:
                self._told[number, job.generation] = None
                told = f"generation {job.generation} of job {number} makes no steps"
                self.add("liveness", f"{told} since {stood // SECOND_NS} s")

    def _bound_ns(self, job: ClusterJob) -> int:
        """The longest time until somebody must have noticed that a gang makes no steps."""
        part, policy = self._world.scenario.detection, self.core.view.policy.timeouts
        limits = derive(policy, job.spec.expected, job.step_ns)
        seconds = (part.seconds, part.hang_seconds, part.exit_seconds, part.peer_seconds)
        noticed = max(limits.silent_ns, limits.hang_ns, *(ns(s or 0) for s in seconds))
        return noticed + 2 * (limits.abort_ns + limits.join_ns + limits.restore_ns) + SLACK_NS

    def _idle_fleet(self) -> None:
        """Nothing runs for as long as from one look to the next, and a job that waits would fit."""
        view, before = self.core.view, self._idle_since_ns
        self._idle_since_ns = -1
        if view.active or not view.pending:
            return
        state = view.fleet.columns.state
        up = int(np.sum((state == NodeState.HEALTHY) | (state == NodeState.SPARE)))
        fits = [
            number
            for number in view.pending
            if view.jobs[number].spec.gang.slots(view.jobs[number].spec.gang.floor) <= up
        ]
        if not fits:
            return
        now = self._world.agenda.now_ns
        self._idle_since_ns = now if before < 0 else before
        if now > self._idle_since_ns and (fits[0], -1) not in self._told:
            self._told[fits[0], -1] = None
            self.add("liveness", f"job {fits[0]} waits, {up} nodes are up and nothing runs")
