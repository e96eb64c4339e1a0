"""Who holds how many GPUs: counted by job, team and class of service, and used up over time."""

from __future__ import annotations

from enum import StrEnum

from phalanx.cluster.jobs.job import ClusterJob, Placement
from phalanx.cluster.queue import fairshare
from phalanx.cluster.queue.decisions import QueueState
from phalanx.cluster.state import View


class Limited(StrEnum):
    """Whose GPUs a limit counts; the value names the field of a job's specification."""

    TEAM = "team"  # the ceiling of a team's quota
    QOS = "qos"  # the most that jobs of a class of service may hold


class Holdings:
    """GPUs that are held, kept up to date with the fleet; teams' part of it is in the state."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._qos: dict[str, int] = {}
        # By job: team, class of service, GPUs. None: not built yet.
        self._jobs: dict[int, tuple[str, str, int]] | None = None

    def copy_for(self, state: QueueState) -> Holdings:
        """The same over a copy of the state."""
        twin = Holdings(state)
        twin._qos = dict(self._qos)
        twin._jobs = None if self._jobs is None else dict(self._jobs)
        return twin

    @property
    def built(self) -> bool:
        """Whether anything was counted yet."""
        return self._jobs is not None

    def of_team(self, team: str) -> int:
        """GPUs that jobs of a team hold."""
        return self._state.held.get(team, 0)

    def of_qos(self, qos: str) -> int:
        """GPUs that jobs of a class of service hold."""
        return self._qos.get(qos, 0)

    def of_job(self, number: int) -> int:
        """GPUs that a job holds."""
        known = (self._jobs or {}).get(number)
        return known[2] if known else 0

    def of_jobs_under(self, limited: Limited, name: str) -> list[tuple[int, int]]:
        """Jobs that hold GPUs of a team or class of service, and how many."""
        known, field = self._jobs or {}, 0 if limited is Limited.TEAM else 1
        return [(job, held[2]) for job, held in known.items() if held[field] == name]

    def accrue(self, view: View) -> None:
        """Adds what was held since the last time to what teams used."""
        state = self._state
        if view.now_ns <= state.usage_at_ns:
            return
        half_life_ns = view.policy.queue.half_life_ns
        fairshare.accrue(state.usage, state.held, state.usage_at_ns, view.now_ns, half_life_ns)
        state.usage_at_ns = view.now_ns

    def build(self, view: View) -> None:
        """Counts everything from the view."""
        self._jobs = {}
        self._state.held = {}
        for number in dict.fromkeys([*view.fleet.job_gpus, *view.active]):
            self._count(view, number)

    def follow(self, view: View) -> None:
        """Counts the jobs anew whose nodes changed."""
        for number in view.fleet.changed_jobs:
            self._count(view, number)

    def add_spares(self, view: View, job: ClusterJob, placement: Placement) -> None:
        """Counts the spares of a job that starts: the core writes its placement down later."""
        assert self._jobs is not None
        spares = sum(view.fleet.nodes[node].gpus for node in placement.spares)
        if spares:
            known = (job.spec.team, job.spec.qos, 0)
            team, qos, gpus = self._jobs.get(job.id, known)
            self._book(job.id, team, qos, gpus + spares, gpus)

    def _count(self, view: View, number: int) -> None:
        """Counts the GPUs that a job holds for its team and class of service."""
        assert self._jobs is not None
        job = view.jobs.get(number)
        if job is None:
            return
        gpus = view.fleet.job_gpus.get(number, 0)
        if job.placement is not None:
            gpus += sum(view.fleet.nodes[node].gpus for node in job.placement.spares)
        team, qos, before = self._jobs.get(number, (job.spec.team, job.spec.qos, 0))
        self._book(number, team, qos, gpus, before)

    def _book(self, number: int, team: str, qos: str, gpus: int, before: int) -> None:
        assert self._jobs is not None
        fresh = team not in self._state.held
        for book, name in ((self._state.held, team), (self._qos, qos)):
            book[name] = book.get(name, 0) + gpus - before
            if not book[name]:
                del book[name]
        if fresh:  # snapshots of equal states are equal to the byte, whatever came first
            held_gpus = self._state.held  # sorted in place: the pass under way counts by this dict
            ordered = sorted(held_gpus.items())
            held_gpus.clear()
            held_gpus.update(ordered)
        if gpus:
            self._jobs[number] = (team, qos, gpus)
        else:
            self._jobs.pop(number, None)
