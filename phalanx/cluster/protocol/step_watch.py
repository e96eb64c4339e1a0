"""Watches running gangs: records in, findings out as events.

Not logged, like liveness: a controller that takes over starts with empty windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec import Struct, structs

from phalanx.cluster.detectors import (
    ActivityWindow,
    behind,
    loss_spike,
    regression,
    slow_compute,
    slow_host,
    slow_transfer,
    starved,
)
from phalanx.cluster.detectors.robust import Ints
from phalanx.cluster.jobs.job import ClusterJob, GangShape, Placement
from phalanx.cluster.jobs.measured import reports_steps
from phalanx.cluster.policy import TimeoutPolicy
from phalanx.cluster.protocol.events import (
    DataStarved,
    EventBody,
    LossSpike,
    NoProgress,
    SlowRank,
    ThroughputRegression,
)
from phalanx.cluster.protocol.messages import Activity, Busy
from phalanx.cluster.protocol.timeouts import HangLimits, Limit, hang_limits

WINDOW = 12  # steps that one judgement of ranks is made on
EVERY = 4  # steps between two judgements
SERIES_KEPT = 96
QUIET_STEPS = 200  # a finding is not repeated within this many steps
WORSE_PERCENT = 150  # of what was told of a rank: then it is told again, whatever was decided


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
    host_ns: Ints | None = None  # by rank: of compute_ns, at the host's pace
    launch_ns: Ints | None = None  # by rank: that its host took to give the device its work
    transfer_ns: Ints | None = None  # by rank: of as many bytes of its own sends at each
    printed: bool = False  # read from a program's output: no hang is judged by it


class WatchedGang(Struct):
    """One gang's windows."""

    generation: int
    shape: GangShape
    placement: Placement
    limits_of: Callable[[int], HangLimits]
    limits: HangLimits
    since_ns: int  # of its last step, or of its start
    activity: ActivityWindow
    members: dict[int, None] = {}  # the nodes of its placement
    reports: bool = True  # steps; False: its processes alone tell whether it does anything
    told_of_each: bool = False  # of its steps, one by one
    stepped: bool = False  # in this generation
    phase: str = ""  # what it does between two steps, where it said so
    phase_step: int = 0  # after which
    due_ns: int | None = None  # when it counts as hung; None: nothing says so yet
    idle_told: bool = False
    step: int = 0  # of the newest record
    reached: int = 0  # that the gang is known to have completed
    collectives: dict[int, int] = {}
    compute: deque[Ints] = deque()
    host: deque[Ints] = deque()
    launch: deque[Ints] = deque()
    transfer: deque[Ints] = deque()
    steps: list[int] = []
    losses: list[float | None] = []
    waits: list[int] = []
    said: dict[str, int] = {}  # finding: step it was last reported at
    slowdowns: dict[str, int] = {}  # finding: how slow its rank was then, in ppm


class StepWatch:
    """All running gangs."""

    def __init__(self) -> None:
        self.gangs: dict[int, WatchedGang] = {}

    def follow(self, job: ClusterJob, policy: TimeoutPolicy, now_ns: int) -> None:
        """A job's gang runs from now on, or a controller that took over hears of it again."""
        assert job.placement is not None and job.gang is not None
        limits_of = partial(hang_limits, policy, job.spec, job.step_ns, job.first_step_ns)
        self.begin(
            job.id,
            job.generation,
            job.spec.gang,
            job.placement,
            limits_of,
            now_ns,
            reports=reports_steps(job),
            stepped=job.committed > job.gang.restored,
        )

    def begin(
        self,
        job: int,
        generation: int,
        shape: GangShape,
        placement: Placement,
        limits_of: Callable[[int], HangLimits],
        now_ns: int,
        *,
        reports: bool = True,
        stepped: bool = False,
    ) -> None:
        """A gang runs from now on; ``limits_of``: its limits for steps of a length, 0 at first.

        ``reports``: it is known to report steps; ``stepped``: it has made some in this generation.
        """
        gang = self.gangs[job] = WatchedGang(
            generation,
            shape,
            placement,
            limits_of,
            limits_of(0),
            now_ns,
            ActivityWindow(since_ns=now_ns),
            dict.fromkeys(placement.nodes),
            reports=reports,
            stepped=stepped,
            compute=deque(maxlen=WINDOW),
            host=deque(maxlen=WINDOW),
            launch=deque(maxlen=WINDOW),
            transfer=deque(maxlen=WINDOW),
        )
        gang.due_ns = now_ns + _limit(gang).ns if reports else None

    def end(self, job: int) -> None:
        """A gang no longer runs."""
        self.gangs.pop(job, None)

    def entered(self, job: int, rank: int, collectives: int) -> None:
        """A rank's count of collectives, from its flight recorder: evidence for a hang."""
        if job in self.gangs:
            self.gangs[job].collectives[rank] = collectives

    def hosts(self, job: int, node: int, rank: int) -> bool:
        """Whether a rank of a running gang is on a node."""
        gang = self.gangs.get(job)
        if gang is None or not 0 <= rank < gang.shape.gpus(gang.placement.replicas):
            return False
        return self._node(gang, rank) == node

    def tells_each(self, job: int, generation: int) -> None:
        """The nodes of a gang report its steps one by one."""
        gang = self.gangs.get(job)
        if gang is not None and gang.generation == generation:
            gang.told_of_each = True

    def told_of_each(self, job: int, generation: int) -> bool:
        """Whether the steps of a gang are reported one by one."""
        gang = self.gangs.get(job)
        return gang is not None and gang.generation == generation and gang.told_of_each

    def restored(self, job: int, generation: int, step: int) -> None:
        """The gang goes on from a step, which it has not made itself."""
        gang = self.gangs.get(job)
        if gang is not None and gang.generation == generation:
            gang.reached = max(gang.reached, step)

    def alive(self, job: int, generation: int, step: int, now_ns: int) -> None:
        """The gang is at a step; what it was like, its records tell later."""
        gang = self.gangs.get(job)
        if gang is not None and gang.generation == generation and step > gang.reached:
            self._stepped(gang, step, now_ns)

    def busy(self, fact: Busy, now_ns: int) -> None:
        """The gang does something that is no step: it has an allowance until its next one."""
        gang = self.gangs.get(fact.job)
        if gang is not None and gang.generation == fact.generation and fact.node in gang.members:
            gang.phase, gang.phase_step, gang.reports = fact.what, fact.step, True
            gang.due_ns = now_ns + _limit(gang).ns

    def active(self, fact: Activity, now_ns: int) -> None:
        """What the processes of a program did on a node: one without steps is judged by that."""
        gang = self.gangs.get(fact.job)
        if gang is None or gang.generation != fact.generation or fact.node not in gang.members:
            return
        busy = gang.activity.add(fact, now_ns)
        if fact.reports_steps and not gang.reports:
            gang.reports = True
            gang.due_ns = gang.since_ns + _limit(gang).ns
        elif busy and not gang.reports:
            gang.activity.restart(now_ns)
            gang.due_ns, gang.idle_told = None, False
        elif not gang.reports and not gang.idle_told and self._idle(gang, now_ns):
            gang.due_ns = now_ns

    def _idle(self, gang: WatchedGang, now_ns: int) -> bool:
        """Whether every node has told, since something last happened, that nothing did."""
        activity, idle_ns = gang.activity, gang.limits.idle.ns
        if not idle_ns or now_ns - activity.since_ns < idle_ns:
            return False
        heard = [activity.heard.get(node) for node in gang.placement.nodes]
        return all(each is not None and each[0] > activity.since_ns for each in heard)

    def _stepped(self, gang: WatchedGang, step: int, now_ns: int) -> None:
        gang.reached, gang.since_ns = step, now_ns
        gang.reports = gang.stepped = True
        gang.phase = gang.phase if step <= gang.phase_step else ""
        gang.activity.restart(now_ns)
        gang.due_ns = now_ns + _limit(gang).ns

    def record(self, fact: GangRecord, now_ns: int) -> list[EventBody]:
        """A step was made; what it says about the gang."""
        gang = self.gangs.get(fact.job)
        if gang is None or gang.generation != fact.generation or fact.step <= gang.step:
            return []
        gang.step = fact.step
        gang.steps = [*gang.steps[1 - SERIES_KEPT :], fact.step_ns]
        if fact.step % EVERY == 0 and len(gang.steps) >= EVERY:
            gang.limits = gang.limits_of(_median(gang.steps[-WINDOW:]))
        if fact.step > gang.reached and not fact.printed:
            self._stepped(gang, fact.step, now_ns)
        gang.waits = [*gang.waits[1 - SERIES_KEPT :], fact.data_wait_ns]
        if fact.compute_ns is not None:
            gang.compute.append(fact.compute_ns)
        if fact.host_ns is not None:
            gang.host.append(fact.host_ns)
        if fact.launch_ns is not None:
            gang.launch.append(fact.launch_ns)
        if fact.transfer_ns is not None:
            gang.transfer.append(fact.transfer_ns)
        events: list[EventBody] = []
        if fact.has_loss:
            gang.losses = [*gang.losses[1 - SERIES_KEPT :], fact.loss]
            if loss_spike(gang.losses) is not None and self._new(gang, "loss"):
                events.append(
                    LossSpike(
                        job=fact.job,
                        generation=fact.generation,
                        step=fact.step,
                        not_finite=fact.loss is None,
                    )
                )
        if fact.step % EVERY == 0:
            events.extend(self._ranks(fact, gang))
            events.extend(self._series(fact, gang))
        return events

    def slow_ranks(self, job: int, step: int) -> list[int]:
        """Ranks of a gang that were lately found to be slow."""
        gang = self.gangs.get(job)
        said = gang.said if gang is not None else {}
        slow = [name for name, at in said.items() if 0 <= step - at < QUIET_STEPS]
        return [int(name.split()[1]) for name in slow if name.startswith("slow ")]

    def due(self, now_ns: int) -> list[EventBody]:
        """Gangs without a step or activity for too long, each said once, with who is behind."""
        events: list[EventBody] = []
        for job, gang in self.gangs.items():
            if gang.due_ns is None or gang.due_ns > now_ns:
                continue
            limit = _limit(gang)
            # Whoever is idle is said again when it was active in between.
            gang.due_ns = now_ns + limit.ns if gang.reports else None
            gang.idle_told = not gang.reports
            events.append(self.named(_no_progress(job, gang, limit, now_ns)))
        return events

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
        known = (gang.due_ns for gang in self.gangs.values() if gang.due_ns is not None)
        return min(known, default=None)

    def _ranks(self, fact: GangRecord, gang: WatchedGang) -> list[EventBody]:
        slow, stages = [], stages_of(gang.shape, gang.placement.replicas)
        host = np.stack(gang.host) if gang.host else None
        if gang.compute:
            slow += slow_compute(np.stack(gang.compute), stages, host)
        if gang.compute and gang.launch and host is not None:
            launch, compute = np.stack(gang.launch), np.stack(gang.compute)
            slow += slow_host(launch, host, compute, stages)
        if gang.transfer:
            slow += slow_transfer(np.stack(gang.transfer), stages)
        return [
            SlowRank(
                job=fact.job,
                generation=fact.generation,
                node=self._node(gang, each.rank),
                rank=each.rank,
                part=each.part,
                slowdown_ppm=each.slowdown_ppm,
                step_ns=_median(gang.steps[-WINDOW:]),
            )
            for each in slow
            if self._new(gang, f"slow {each.rank} {each.part}", each.slowdown_ppm)
        ]

    def _series(self, fact: GangRecord, gang: WatchedGang) -> list[EventBody]:
        events: list[EventBody] = []
        slower = regression(gang.steps)
        if slower is not None and self._new(gang, "regression"):
            events.append(
                ThroughputRegression(
                    job=fact.job,
                    generation=fact.generation,
                    step=fact.step,
                    slowdown_ppm=slower,
                )
            )
        share = starved(sum(gang.waits), sum(gang.steps)) if len(gang.steps) >= WINDOW else None
        if share is not None and self._new(gang, "starved"):
            events.append(DataStarved(job=fact.job, generation=fact.generation, share_ppm=share))
        return events

    def _new(self, gang: WatchedGang, finding: str, slowdown_ppm: int = 0) -> bool:
        """Whether a finding has not been reported lately, or of a rank that was less slow then."""
        last = gang.said.get(finding)
        worse = 100 * slowdown_ppm > WORSE_PERCENT * gang.slowdowns.get(finding, 0)
        if last is not None and gang.step - last < QUIET_STEPS and not worse:
            return False
        gang.said[finding], gang.slowdowns[finding] = gang.step, slowdown_ppm
        return True

    def _node(self, gang: WatchedGang, rank: int) -> int:
        return gang.placement.nodes[rank // max(1, gang.shape.slot_gpus)]


def _limit(gang: WatchedGang) -> Limit:
    """What a gang is judged by now."""
    if not gang.reports:
        return gang.limits.idle
    if gang.phase:
        return gang.limits.phase
    return gang.limits.step if gang.stepped else gang.limits.first_step


def _no_progress(job: int, gang: WatchedGang, limit: Limit, now_ns: int) -> NoProgress:
    """The verdict, with the limit and what its processes did meanwhile."""
    activity = gang.activity
    measured = bool(activity.heard)
    return NoProgress(
        job=job,
        generation=gang.generation,
        step=gang.reached,
        limit=limit.kind,
        phase=gang.phase,
        limit_ns=limit.ns,
        setting=limit.setting,
        quiet_ns=now_ns - (gang.since_ns if gang.reports else activity.since_ns),
        cpu_ns=activity.cpu_ns if measured else -1,
        output_bytes=activity.output_bytes if measured else -1,
        gpu_ppm=activity.gpu_ppm,
    )


def stages_of(shape: GangShape, replicas: int) -> Ints:
    """The pipeline stage of every rank."""
    return np.arange(shape.gpus(replicas), dtype=np.int64) // (
        replicas * shape.context * shape.tensor
    )


def _median(step_ns: Sequence[int]) -> int:
    return sorted(step_ns)[len(step_ns) // 2]
