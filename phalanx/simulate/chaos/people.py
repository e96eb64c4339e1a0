"""People of a chaos seed: they drain, requeue and scale, and on a busy site order much more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.protocol.events import (
    Cancel,
    DrainNode,
    Hold,
    QuarantineNode,
    RaiseBudget,
    ReadmitNode,
    Requeue,
    Scale,
    SetQuota,
    SetReservation,
)
from phalanx.simulate.chaos.site import MINUTE, NODE_GPUS, SECOND
from phalanx.simulate.draws import DrawStream

if TYPE_CHECKING:
    from phalanx.simulate.chaos.world import ChaosWorld

TEAMS = ("team-0", "team-1", "team-2")


class SimulatedOperators:
    """Orders to whoever leads."""

    def __init__(self, world: ChaosWorld, luck: DrawStream) -> None:
        self.world = world
        self.luck = luck

    def about_nodes_and_gangs(self) -> None:
        """Somebody drains, quarantines, readmits, requeues or scales."""
        leader, luck = self.world.leader, self.luck
        node = luck.below(len(self.world.hosts))
        view = leader.core.view
        jobs = list(view.active)
        match luck.below(5):
            case 0:
                leader.tell(DrainNode(node=node, request="drain"))
                self._readmit_later(node)
            case 1:
                leader.tell(QuarantineNode(node=node, request="quarantine"))
                self._readmit_later(node)
            case 2:
                leader.tell(ReadmitNode(node=node, request="readmit"))
            case 3 if jobs:
                leader.tell(Requeue(job=luck.choice(jobs), request="requeue"))
            case 4 if jobs:
                job = view.jobs[luck.choice(jobs)]
                replicas = job.spec.gang.floor + luck.below(job.spec.gang.ceiling)
                leader.tell(Scale(job=job.id, replicas=replicas, request="scale"))

    def wants_empty(self, node: int) -> None:
        """Somebody wants a node empty by a time, now and then sooner after all."""
        now, luck = self.world.agenda.now_ns, self.luck
        by_ns = now + SECOND * (5 + luck.below(400))
        self.world.leader.tell(DrainNode(node=node, deadline_ns=by_ns, request="drain"))
        if luck.chance(0.3):
            sooner = DrainNode(node=node, deadline_ns=now + (by_ns - now) // 2, request="drain")
            self.world.agenda.after((by_ns - now) // 3, self._drain, sooner)
        self.readmit_at(node, by_ns)

    def _drain(self, order: DrainNode) -> None:
        self.world.leader.tell(order)

    def readmit_at(self, node: int, time_ns: int) -> None:
        """A node that was to be empty by a time is given back some time later."""
        delay = SECOND * (240 + self.luck.below(181))
        self.world.agenda.at(time_ns + delay, self._readmit, node)

    def _readmit_later(self, node: int) -> None:
        delay = SECOND * (60 + self.luck.below(181))
        self.world.agenda.after(delay, self._readmit, node)

    def _readmit(self, node: int) -> None:
        """Gives a node back; whom no controller answers tries again."""
        if self.world.leader.answers:
            self.world.leader.tell(ReadmitNode(node=node, request="readmit"))
        else:
            self.world.agenda.after(10 * SECOND, self._readmit, node)

    def about_the_site(self) -> None:
        """Somebody changes a quota, a reservation or a budget, holds or cancels a job."""
        leader, luck = self.world.leader, self.luck
        view = leader.core.view
        living = [job for job in view.jobs.values() if not job.ended]
        gpus = view.fleet.total_gpus
        match luck.below(8):
            case 0 | 1:
                owned = luck.choice((0, gpus // 4, gpus // 2))
                leader.tell(SetQuota(team=luck.choice(TEAMS), gpus=owned, weight=1 + luck.below(3)))
            case 2:
                first = luck.below(len(self.world.hosts))
                nodes = tuple(dict.fromkeys((first, (first + 1) % len(self.world.hosts))))
                self._reserve("maintenance", nodes=nodes[: 1 + luck.below(2)])
            case 3:
                self._reserve("course", gpus=NODE_GPUS, teams=(luck.choice(TEAMS),))
            case 4:
                name = luck.choice(("maintenance", "course"))
                leader.tell(SetReservation(name=name, start_ns=0, end_ns=0))
            case 5 if living:
                leader.tell(Hold(job=luck.choice(living).id))
            case 6 if living:
                self._budget(luck.choice(living))
            case 7 if living and luck.chance(0.3):
                leader.tell(Cancel(job=luck.choice(living).id))

    def _reserve(
        self, name: str, *, nodes: tuple[int, ...] = (), gpus: int = 0, teams: tuple[str, ...] = ()
    ) -> None:
        start = self.world.agenda.now_ns + SECOND * self.luck.below(180)
        end = start + SECOND * (60 + self.luck.below(180))
        self.world.leader.tell(
            SetReservation(
                name=name, start_ns=start, end_ns=end, nodes=nodes, gpus=gpus, teams=teams
            )
        )

    def _budget(self, job: ClusterJob) -> None:
        more = job.budget_gpu_seconds * (1 + self.luck.below(3))
        forced = self.luck.chance(0.3)
        self.world.leader.tell(RaiseBudget(job=job.id, budget_gpu_seconds=more, forced=forced))

    def tidy_up(self) -> None:
        """After the faults: whoever is held is let in, and who can never start is cancelled."""
        self.world.agenda.after(MINUTE, self.tidy_up)
        for job in list(self.world.leader.core.view.jobs.values()):
            if job.held and not job.ended:
                self.world.leader.tell(Hold(job=job.id, held=False))
            if job.never and not job.ended:
                self.world.cancels(job)
