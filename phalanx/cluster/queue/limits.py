"""How much teams and classes of service may hold, and for whom that is saved."""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.placement.free_index import free_index_of
from phalanx.cluster.placement.request import gpus_of
from phalanx.cluster.queue.holdings import Holdings, Limited
from phalanx.cluster.queue.pending import Demand, Lane, PendingJobs, starves
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.state import View

Saved = dict[tuple[Limited, str], int]  # by limit and its name: the job that starves by it


class AtLimit(Struct, frozen=True):
    """A limit that keeps a job from starting even if there is room."""

    limited: Limited
    name: str  # of the team or class of service
    held: int
    most: int
    gpus: int  # that the job needs

    @property
    def reason(self) -> Reason:
        """The same for a person."""
        if self.limited is Limited.TEAM:
            facts = {"held": self.held, "ceiling": self.most, "gpus": self.gpus}
            return reason("at_ceiling", team=self.name, **facts)
        facts = {"held": self.held, "most": self.most, "gpus": self.gpus}
        return reason("at_qos_limit", qos=self.name, **facts)


class Limits:
    """Ceilings of teams and limits of classes of service, against what is held."""

    def __init__(self, holdings: Holdings, waiting: PendingJobs) -> None:
        self._holdings, self._waiting = holdings, waiting

    def gate(self, view: View, lane: Lane, gpus: int) -> AtLimit | None:
        """What keeps a job from starting even if there is room."""
        quota = view.quotas.get(lane.team)
        held = self._holdings.of_team(lane.team)
        if quota is not None and quota.ceiling and held + gpus > quota.ceiling:
            return AtLimit(Limited.TEAM, lane.team, held, quota.ceiling, gpus)
        qos = view.policy.queue.qos.get(lane.qos)
        used = self._holdings.of_qos(lane.qos)
        if qos is not None and qos.most_gpus and used + gpus > qos.most_gpus:
            return AtLimit(Limited.QOS, lane.qos, used, qos.most_gpus, gpus)
        return None

    def gated(self, view: View, number: int, lane: Lane, demand: Demand, saved: Saved) -> bool:
        """Whether a limit keeps a job from starting, or is kept free for one that starves."""
        if self.gate(view, lane, demand.least_gpus) is not None:
            return True
        if not saved:
            return False
        savers = (saved.get((Limited.TEAM, lane.team)), saved.get((Limited.QOS, lane.qos)))
        return any(saver not in (None, number) for saver in savers)

    def saved_for(self, view: View) -> Saved:
        """By limit: the job that starves because of it.

        What ends under the limit is saved for that job, or smaller ones would always be in time.
        """
        saved: Saved = {}
        ceilings = any(quota.ceiling for quota in view.quotas.values())
        if not ceilings and not any(qos.most_gpus for qos in view.policy.queue.qos.values()):
            return saved
        lanes = self._waiting.lanes.values()
        first = sorted((lane.entries[0], lane) for lane in lanes)
        for (_, number), lane in first:
            if not starves(view, view.jobs[number]):
                continue
            demand = self._waiting.where[number][1]
            gate = self.gate(view, lane, demand.least_gpus)
            if gate is None or not _has_nodes(view, demand):
                continue
            if _can_pass(view, gate):
                saved.setdefault((gate.limited, gate.name), number)
        return saved

    def allowance(self, view: View, job: ClusterJob) -> int:
        """GPUs that a job may still take, beside what it and others of its team and class hold."""
        team, qos = job.spec.team, job.spec.qos
        quota, rule = view.quotas.get(team), view.policy.queue.qos.get(qos)
        left = view.fleet.total_gpus
        if quota is not None and quota.ceiling:
            left = min(left, quota.ceiling - self._holdings.of_team(team))
        if rule is not None and rule.most_gpus:
            left = min(left, rule.most_gpus - self._holdings.of_qos(qos))
        if rule is not None and rule.most_gpus_per_job:
            left = min(left, rule.most_gpus_per_job - self._holdings.of_job(job.id))
        return max(0, left)

    def growth_allowance(self, view: View, job: ClusterJob) -> int:
        """GPUs that a running job may take more.

        What a job that starves under the same limit needs, if it can have it at all, is not its.
        """
        team, qos = job.spec.team, job.spec.qos
        left, quota = self.allowance(view, job), view.quotas.get(team)
        rule = view.policy.queue.qos.get(qos)
        for lane in self._waiting.lanes.values():
            of_team = lane.team == team and quota is not None and quota.ceiling
            of_class = lane.qos == qos and rule is not None and rule.most_gpus
            number = lane.entries[0][1]
            if (of_team or of_class) and starves(view, view.jobs[number]):
                gpus = self._waiting.where[number][1].least_gpus
                gate = self.gate(view, lane, gpus)
                if gate is None or _can_pass(view, gate):
                    left -= gpus
        return max(0, left)

    def most_replicas(self, view: View, job: ClusterJob, demand: Demand) -> int:
        """Replicas that a job may start with: an elastic one takes what its limits leave."""
        wanted = demand.request.replicas
        if demand.least_gpus == demand.gpus:
            return wanted
        left = self.allowance(view, job)
        low, high = min(job.spec.gang.floor, wanted), wanted
        while low < high:
            middle = (low + high + 1) // 2
            fits = gpus_of(view.fleet, job, middle) <= left
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def _has_nodes(view: View, demand: Demand) -> bool:
    """Whether a demand would have nodes if nothing ran: for others nothing need be saved."""
    free_index = free_index_of(view.fleet)
    sound = free_index.sound(demand.group.suiting(free_index, len(view.fleet.classes)))
    return sound.bit_count() >= demand.group.least_slots


def _can_pass(view: View, gate: AtLimit) -> bool:
    """Whether those who hold what a limit allows will leave: nobody waits for the others."""
    gpus = gate.gpus
    for number in view.active:
        spec = view.jobs[number].spec
        under = (spec.team if gate.limited is Limited.TEAM else spec.qos) == gate.name
        if under and not spec.time_limit_ns and not spec.expected.steps:
            gpus += view.fleet.job_gpus.get(number, 0)
    return gpus <= gate.most
