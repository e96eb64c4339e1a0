"""Watches running gangs: records in, findings out as events.

Not logged, like liveness: a controller that takes over starts with empty windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from msgspec import Struct, structs

from phalanx.cluster.detectors import (
    behind,
    loss_spike,
    regression,
    slow_compute,
    slow_transfer,
    starved,
)
from phalanx.cluster.detectors.robust import Ints
from phalanx.cluster.events import (
    DataStarved,
    EventBody,
    LossSpike,
    NoProgress,
    SlowRank,
    ThroughputRegression,
)
from phalanx.cluster.job import GangShape, Placement

WINDOW = 12  # steps that one judgement of ranks is made on
EVERY = 4  # steps between two judgements
SERIES_KEPT = 96
QUIET_STEPS = 200  # a finding is not repeated within this many steps


class GangRecord(Struct, frozen=True, kw_only=True):
    """One step of a gang, aggregated over its ranks."""

    job: int
    generation: int
    step: int
    step_ns: int
    loss: float | None = None
    has_loss: bool = False
    data_wait_ns: int = 0
    compute_ns: Ints | None = None  # by rank
    transfer_ns: Ints | None = None  # by rank


class Watched(Struct):
    """One gang's windows."""

    generation: int
    shape: GangShape
    placement: Placement
    hang_of: Callable[[int], int]
    hang_ns: int
    due_ns: int
    step: int = 0  # of the newest record
    reached: int = 0  # that the gang is known to have completed
    collectives: dict[int, int] = {}
    compute: deque[Ints] = deque()
    transfer: deque[Ints] = deque()
    steps: list[int] = []
    losses: list[float | None] = []
    waits: list[int] = []
    said: dict[str, int] = {}  # finding: step it was last reported at


class Watch:
    """All running gangs."""

    def __init__(self) -> None:
        self.gangs: dict[int, Watched] = {}

    def begin(
        self,
        job: int,
        generation: int,
        shape: GangShape,
        placement: Placement,
        hang_of: Callable[[int], int],
        now_ns: int,
    ) -> None:
        """A gang runs from now on; ``hang_of``: the deadline for steps of a length, 0 at first."""
        hang_ns = hang_of(0)
        self.gangs[job] = Watched(
            generation,
            shape,
            placement,
            hang_of,
            hang_ns,
            now_ns + hang_ns,
            compute=deque(maxlen=WINDOW),
            transfer=deque(maxlen=WINDOW),
        )

    def end(self, job: int) -> None:
        """A gang no longer runs."""
        self.gangs.pop(job, None)

    def entered(self, job: int, rank: int, collectives: int) -> None:
        """A rank's count of collectives, from its flight recorder: evidence for a hang."""
        if job in self.gangs:
            self.gangs[job].collectives[rank] = collectives

    def alive(self, job: int, generation: int, step: int, now_ns: int) -> None:
        """The gang is at a step; what it was like, its records tell later."""
        gang = self.gangs.get(job)
        if gang is not None and gang.generation == generation and step > gang.reached:
            gang.reached = step
            gang.due_ns = now_ns + gang.hang_ns

    def record(self, fact: GangRecord, now_ns: int) -> list[EventBody]:
        """A step was made; what it says about the gang."""
        gang = self.gangs.get(fact.job)
        if gang is None or gang.generation != fact.generation or fact.step <= gang.step:
            return []
        gang.step = fact.step
        gang.steps = [*gang.steps[1 - SERIES_KEPT :], fact.step_ns]
        if fact.step % EVERY == 0 and len(gang.steps) >= EVERY:
            lately = sorted(gang.steps[-WINDOW:])
            gang.hang_ns = gang.hang_of(lately[len(lately) // 2])
        if fact.step > gang.reached:
            gang.reached = fact.step
            gang.due_ns = now_ns + gang.hang_ns
        gang.waits = [*gang.waits[1 - SERIES_KEPT :], fact.data_wait_ns]
        if fact.compute_ns is not None:
            gang.compute.append(fact.compute_ns)
        if fact.transfer_ns is not None:
            gang.transfer.append(fact.transfer_ns)
        found: list[EventBody] = []
        if fact.has_loss:
            gang.losses = [*gang.losses[1 - SERIES_KEPT :], fact.loss]
            if loss_spike(gang.losses) is not None and self._new(gang, "loss"):
                found.append(
                    LossSpike(
                        job=fact.job,
                        generation=fact.generation,
                        step=fact.step,
                        not_finite=fact.loss is None,
                    )
                )
        if fact.step % EVERY == 0:
            found.extend(self._ranks(fact, gang))
            found.extend(self._series(fact, gang))
        return found

    def slow_ranks(self, job: int, step: int) -> list[int]:
        """Ranks of a gang that were lately found to be slow."""
        gang = self.gangs.get(job)
        said = gang.said if gang is not None else {}
        slow = [name for name, at in said.items() if 0 <= step - at < QUIET_STEPS]
        return [int(name.split()[1]) for name in slow if name.startswith("slow ")]

    def due(self, now_ns: int) -> list[EventBody]:
        """Gangs without a step for too long, each said once, with who is behind."""
        found: list[EventBody] = []
        for job, gang in self.gangs.items():
            if gang.due_ns > now_ns:
                continue
            gang.due_ns = now_ns + gang.hang_ns
            fact = NoProgress(job=job, generation=gang.generation, step=gang.reached)
            found.append(self.named(fact))
        return found

    def named(self, fact: NoProgress) -> NoProgress:
        """The same with the nodes that are behind, as far as ranks have told how far they are."""
        gang = self.gangs.get(fact.job)
        if gang is None or gang.generation != fact.generation or not gang.collectives:
            return fact
        count = gang.shape.gpus(gang.placement.replicas)
        late = behind([gang.collectives.get(rank, -1) for rank in range(count)])
        nodes = dict.fromkeys(self._node(gang, rank) for rank in late)
        return structs.replace(fact, nodes=tuple(nodes))

    def next_deadline_ns(self) -> int | None:
        """When the first gang would count as hung."""
        return min((gang.due_ns for gang in self.gangs.values()), default=None)

    def _ranks(self, fact: GangRecord, gang: Watched) -> list[EventBody]:
        slow = []
        if gang.compute:
            stages = stages_of(gang.shape, gang.placement.replicas)
            slow += slow_compute(np.stack(gang.compute), stages)
        if gang.transfer:
            slow += slow_transfer(np.stack(gang.transfer))
        return [
            SlowRank(
                job=fact.job,
                generation=fact.generation,
                node=self._node(gang, each.rank),
                rank=each.rank,
                part=each.part,
                slowdown_ppm=each.slowdown_ppm,
            )
            for each in slow
            if self._new(gang, f"slow {each.rank} {each.part}")
        ]

    def _series(self, fact: GangRecord, gang: Watched) -> list[EventBody]:
        found: list[EventBody] = []
        slower = regression(gang.steps)
        if slower is not None and self._new(gang, "regression"):
            found.append(
                ThroughputRegression(
                    job=fact.job,
                    generation=fact.generation,
                    step=fact.step,
                    slowdown_ppm=slower,
                )
            )
        share = starved(sum(gang.waits), sum(gang.steps)) if len(gang.steps) >= WINDOW else None
        if share is not None and self._new(gang, "starved"):
            found.append(DataStarved(job=fact.job, generation=fact.generation, share_ppm=share))
        return found

    def _new(self, gang: Watched, finding: str) -> bool:
        """Whether a finding has not been reported lately."""
        last = gang.said.get(finding)
        if last is not None and gang.step - last < QUIET_STEPS:
            return False
        gang.said[finding] = gang.step
        return True

    def _node(self, gang: Watched, rank: int) -> int:
        return gang.placement.nodes[rank // max(1, gang.shape.slot_gpus)]


def stages_of(shape: GangShape, replicas: int) -> Ints:
    """The pipeline stage of every rank."""
    return np.arange(shape.gpus(replicas), dtype=np.int64) // (
        replicas * shape.context * shape.tensor
    )
