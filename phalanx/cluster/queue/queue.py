"""Which job runs next.

The core calls ``schedule`` when something changed; the functions named ``on_…`` tell the queue what
happened to a job meanwhile. Everything the queue remembers is in ``QueueState``, which is part of a
snapshot; what can be computed from it and the view is not.

A pass has two parts. First jobs start in order of priority, until one has no room: it is promised a
start and nodes (``reserve``), after asking others to leave where it may. Then jobs behind it start
where they cannot be in its way.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from msgspec import structs

from phalanx.cluster.fleet.fleet import NodeState
from phalanx.cluster.forecast.horizon import Horizon, leave_ns
from phalanx.cluster.forecast.why import Answers
from phalanx.cluster.jobs.feasibility import admit
from phalanx.cluster.jobs.job import Job, Placement
from phalanx.cluster.placement.free_index import Nodes, room_of, set_of_nodes
from phalanx.cluster.placement.request import held_by
from phalanx.cluster.queue import fairshare, windows
from phalanx.cluster.queue.claims import askable_times, collected, collector, starves
from phalanx.cluster.queue.cycle import Pass
from phalanx.cluster.queue.decisions import (
    Decision,
    Pending,
    Preempt,
    QueueState,
    Reserved,
    Resize,
    Start,
)
from phalanx.cluster.queue.pending import Demand, Front, Lane, Ranks, Waiting, base_parts, gpus_of
from phalanx.cluster.reasons import Reason, reason, sentences
from phalanx.cluster.state import Reservation, View

__all__ = [
    "Decision",
    "Pending",
    "Preempt",
    "Queue",
    "QueueState",
    "Resize",
    "Start",
    "admit",
    "take",
]


sentences(
    {
        "window_short": 'reservation "{name}" lost nodes, and {less} of its {gpus} GPUs cannot be '
        "had elsewhere: bring nodes back, or move it",
    }
)


class Queue:
    """The order of jobs, and who starts, stops or shrinks."""

    def __init__(self, state: QueueState) -> None:
        self.state = state
        self.waiting = Waiting()
        self.qos_gpus: dict[str, int] = {}  # that jobs of each class of service hold
        self._job_gpus: dict[int, tuple[str, str, int]] | None = None  # None: not built yet
        self._horizon: Horizon | None = None
        self._sets: dict[int, Nodes] = {}  # nodes of ``state.reserved``
        self.unfinished = False  # the last pass stopped before it had come to all jobs
        self._window_sets: dict[str, tuple[tuple[int, ...], Nodes]] = {}

    def on_pending(self, view: View, job: Job) -> None:
        """A job became eligible, or came back after a preemption or failure."""
        self.sync(view)
        self.waiting.add(view, job)

    def on_stopped(self, view: View, job: Job, gpu_ns: int) -> None:
        """A job gave its nodes back, having used this many GPU-nanoseconds since its start."""
        if self._horizon is not None:
            self._horizon.forget(job.id)
        self.sync(view)

    def on_withdrawn(self, view: View, job: Job) -> None:
        """A pending job was cancelled or held."""
        self.sync(view)
        self._forget(job.id)

    def schedule(self, view: View) -> list[Decision]:
        """What to start, stop or resize now. Takes the nodes of what it starts."""
        self.sync(view)
        return Pass(self, view).run()

    def next_wake_ns(self, view: View) -> int | None:
        """When to look again although nothing happened (a window opens, a promise falls due)."""
        now, policy = view.now_ns, view.policy.queue
        times = [windows.next_edge_ns(view), *self._leaving_times(view)]
        if self.waiting.lanes:
            oldest = (lane.entries[0] for lane in self.waiting.lanes.values())
            times += [at + policy.starving_ns - view.jobs[job].waited_ns for at, job in oldest]
            for promise in self.state.reserved.values():
                times += [promise.start_ns, promise.start_ns + policy.grace_ns]
        if self.state.tried_ns:
            times.append(self._askable_ns(view))
        return min((at for at in times if at is not None and at > now), default=None)

    def _leaving_times(self, view: View) -> Iterator[int]:
        """When each job on the nodes of a window that opens soon must begin to leave."""
        for window in windows.running(view):
            if windows.emptied_from_ns(view, window) <= view.now_ns < window.start_ns:
                members = self.window_members(view, window.name)
                there = dict.fromkeys(job for node in members for job in view.fleet.held[node])
                for number in there:
                    job = view.jobs[number]
                    if job.spec.team not in window.teams:
                        yield window.start_ns - leave_ns(view, job)

    def _askable_ns(self, view: View) -> int | None:
        """When somebody can first be asked to leave who could not when a job last tried."""
        tried = min(self.state.tried_ns.values())
        soonest = tried + view.policy.queue.replan_ns
        after = tried if soonest > view.now_ns else view.now_ns
        ripe = min((at for at in askable_times(view) if at > after), default=None)
        return None if ripe is None else max(ripe, soonest)

    def explain(self, view: View, job: int) -> Pending:
        """What a pending job waits for, and until when. Asking changes nothing that is logged."""
        return self.answers(view).of(job)

    def answers(self, view: View) -> Answers:
        """What pending jobs wait for, to ask about many; good until the next event."""
        twin, state = copy(self), self.state
        twin.state = structs.replace(
            state, usage=dict(state.usage), held=dict(state.held), windows=dict(state.windows)
        )
        twin.qos_gpus = dict(self.qos_gpus)
        twin._job_gpus = None if self._job_gpus is None else dict(self._job_gpus)
        twin._catch_up(view)
        return Answers(twin, view)

    def priority(self, view: View, job: Job, since_ns: int) -> int:
        """The priority of a job if it had waited since then."""
        self.sync(view)
        spec = job.spec
        base = sum(base_parts(view.policy.queue, job).values())
        ranks = Ranks(view, self.state.usage, self.state.held)
        return ranks.of(Lane(spec.team, spec.qos, base), since_ns, 0)

    def first_priority(self, view: View) -> int | None:
        """The priority of the job that is first in line; None: nobody waits."""
        self.sync(view)
        front = Front(self.waiting, Ranks(view, self.state.usage, self.state.held))
        for lane in self.waiting.lanes.values():
            front.add(lane, lane.entries)
        return front.first_priority()

    def closed_to(self, view: View, job: Job | None) -> Nodes:
        """Nodes promised to others than a job (None: to anybody): not for it to grow on.

        Nor are those that are being collected for somebody who has waited far too long.
        """
        self.sync(view)
        late = collector(self, view, self.saved_for(view))
        kept = collected(self, view, late) if late else 0
        closed = kept | self.window_nodes(view, job.spec.team if job else "", None)[0]
        for other in self.state.reserved:
            if job is None or other != job.id:
                closed |= self.promised(other)
        return closed

    def kept_from(self, view: View, job: Job) -> Nodes:
        """Nodes that a running job may not take to replace others: promised, or in a window.

        A promise that is not firm yields to a job that would come before the promised one.
        """
        self.sync(view)
        end_ns = self.gone_ns(view, job.id)
        closed = self.window_nodes(view, job.spec.team, end_ns)[0]
        ranks = Ranks(view, self.state.usage, self.state.held)
        mine = self.priority(view, job, job.queued_ns)
        for other, promise in self.state.reserved.items():
            in_time = end_ns is not None and end_ns <= promise.start_ns
            if in_time or other not in self.waiting.where:
                continue
            lane, demand, queued_ns = self.waiting.where[other]
            if promise.firm or mine < ranks.of(lane, queued_ns, demand.gpus):
                closed |= self.promised(other)
        return closed

    def gone_ns(self, view: View, job: int) -> int | None:
        """When a running job will be gone; None: it should be by now, and nobody knows."""
        end_ns = self.horizon(view).end_ns(view, job)
        return end_ns if end_ns > view.now_ns else None

    def promised_ns(self, nodes: tuple[int, ...]) -> int | None:
        """When the first of those starts who were promised some of these nodes."""
        mine = set_of_nodes(nodes)
        starts = [
            one.start_ns
            for number, one in self.state.reserved.items()
            if mine & self.promised(number)
        ]
        return min(starts, default=None)

    # What the pass and ``why`` share.

    def sync(self, view: View) -> None:
        """Takes over what changed outside: who holds what, who is pending, windows."""
        self._catch_up(view)
        view.fleet.changed_jobs.clear()

    def _catch_up(self, view: View) -> None:
        state, policy = self.state, view.policy.queue
        fairshare.accrue(
            state.usage, state.held, state.usage_at_ns, view.now_ns, policy.half_life_ns
        )
        state.usage_at_ns = max(state.usage_at_ns, view.now_ns)
        self.waiting.refresh(view)
        if self._job_gpus is None:
            self._build(view)
        else:
            for number in view.fleet.changed_jobs:
                self._count(view, number)

    def _build(self, view: View) -> None:
        """Everything that is not in the state, from the view."""
        self._job_gpus = {}
        self.state.held = {}
        for number in dict.fromkeys([*view.fleet.job_gpus, *view.active]):
            self._count(view, number)
        for number in view.pending:
            if number not in self.waiting.where:
                self.waiting.add(view, view.jobs[number])

    def _count(self, view: View, number: int) -> None:
        """Counts the GPUs that a job holds for its team and class of service."""
        assert self._job_gpus is not None
        known = view.jobs.get(number)
        if known is None:
            return
        gpus = view.fleet.job_gpus.get(number, 0)
        if known.placement is not None:
            gpus += sum(view.fleet.nodes[node].gpus for node in known.placement.spares)
        team, qos, before = self._job_gpus.get(number, (known.spec.team, known.spec.qos, 0))
        self._book(number, team, qos, gpus, before)

    def _book(self, number: int, team: str, qos: str, gpus: int, before: int) -> None:
        assert self._job_gpus is not None
        fresh = team not in self.state.held
        for book, name in ((self.state.held, team), (self.qos_gpus, qos)):
            book[name] = book.get(name, 0) + gpus - before
            if not book[name]:
                del book[name]
        if fresh:  # snapshots of equal states are equal to the byte, whatever came first
            self.state.held = dict(sorted(self.state.held.items()))
        if gpus:
            self._job_gpus[number] = (team, qos, gpus)
        else:
            self._job_gpus.pop(number, None)

    def horizon(self, view: View) -> Horizon:
        """Ends of all that runs."""
        if self._horizon is None or not self._horizon.refresh(view):
            self._horizon = Horizon(view)
        return self._horizon

    def promised(self, job: int) -> Nodes:
        """The nodes promised to a job."""
        if job not in self._sets:
            self._sets[job] = set_of_nodes(self.state.reserved[job].nodes)
        return self._sets[job]

    def promise(self, promise: Reserved) -> None:
        """Remembers a promised start."""
        self.state.reserved[promise.job] = promise
        self._sets.pop(promise.job, None)

    def break_promise(self, job: int) -> None:
        """Forgets a promised start."""
        self.state.reserved.pop(job, None)
        self._sets.pop(job, None)

    def _forget(self, job: int) -> None:
        self.waiting.remove(job)
        self.break_promise(job)
        self.state.tried_ns.pop(job, None)

    def started(self, view: View, job: Job, placement: Placement) -> None:
        """Takes the nodes of a job that starts."""
        self.horizon(view).started(view, job)
        self._forget(job.id)
        take(view, job, placement)
        self.sync(view)
        assert self._job_gpus is not None
        spares = sum(view.fleet.nodes[node].gpus for node in placement.spares)
        if spares:  # the core writes the placement down later
            known = (job.spec.team, job.spec.qos, 0)
            team, qos, gpus = self._job_gpus.get(job.id, known)
            self._book(job.id, team, qos, gpus + spares, gpus)

    def window_nodes(self, view: View, team: str, end_ns: int | None) -> tuple[Nodes, str]:
        """Nodes that windows close to a job of a team that ends then, and a window's name."""
        closed, named = 0, ""
        for name, nodes in self.shut_windows(view, team, end_ns):
            closed, named = closed | nodes, named or name
        return closed, named

    def open_windows(self, view: View, team: str) -> Nodes:
        """Nodes of windows that are open now and shut out a team ("": everybody)."""
        nodes = 0
        for window in windows.running(view) if view.reservations else ():
            if window.start_ns <= view.now_ns and team not in window.teams:
                nodes |= set_of_nodes(self.window_members(view, window.name))
        return nodes

    def shut_now(self, view: View, job: Job) -> Nodes:
        """Nodes of windows that a running job would have to leave at once."""
        if not view.reservations:
            return 0
        nodes, end_ns = 0, self.gone_ns(view, job.id)
        soon_ns = view.now_ns + leave_ns(view, job)
        for window in windows.running(view):
            if window.start_ns <= soon_ns and windows.shuts_out(window, job.spec.team, end_ns):
                nodes |= set_of_nodes(self.window_members(view, window.name))
        return nodes

    def shut_windows(
        self, view: View, team: str, end_ns: int | None
    ) -> Iterator[tuple[str, Nodes]]:
        """Windows that shut out a job of a team that ends then (None: nobody knows), with nodes."""
        for reservation in windows.running(view) if view.reservations else ():
            if not windows.shuts_out(reservation, team, end_ns):
                continue
            nodes = self.window_members(view, reservation.name)
            kept = self._window_sets.get(reservation.name)
            if kept is None or kept[0] != nodes:
                kept = self._window_sets[reservation.name] = (nodes, set_of_nodes(nodes))
            yield reservation.name, kept[1]

    def window_members(self, view: View, name: str) -> tuple[int, ...]:
        """Nodes of a reservation; those of one that names only GPUs are chosen once."""
        reservation = view.reservations[name]
        if reservation.nodes:
            return reservation.nodes
        if name not in self.state.windows:
            self.state.windows[name] = self.free_window(view, reservation)
        return self.state.windows[name]

    def mend_windows(self, view: View) -> list[Reason]:
        """Finds nodes for those that windows lost; what to tell of windows that lack some.

        What one has too many of, since nodes came back, is free for the others first.
        """
        told, kept = [], self.state.windows
        by_gpus = [one for one in windows.running(view) if not one.nodes and kept.get(one.name)]
        for reservation in by_gpus:
            name = reservation.name
            kept[name] = windows.trimmed(view, reservation, kept[name])
        for reservation in by_gpus:
            name = reservation.name
            members, lacking = windows.mended(
                view, reservation, self.state.windows[name], self._taken_beside(view, reservation)
            )
            self.state.windows[name] = members
            if not lacking:
                self.state.short.pop(name, None)
            elif name not in self.state.short:
                self.state.short[name] = None
                told.append(reason("window_short", name=name, gpus=reservation.gpus, less=lacking))
        return told

    def _taken_beside(self, view: View, reservation: Reservation) -> tuple[int, ...]:
        """Nodes that other reservations keep for some of the same time."""
        taken = {
            node: None
            for other in windows.beside(view, reservation)
            for node in other.nodes or self.state.windows.get(other.name, ())
        }
        return tuple(taken)

    def free_window(self, view: View, reservation: Reservation) -> tuple[int, ...]:
        """Nodes for a reservation that names only GPUs, of those that no other one keeps then."""
        return windows.choose_nodes(view, reservation, self._taken_beside(view, reservation))

    def gate(self, view: View, lane: Lane, gpus: int) -> Reason | None:
        """What keeps a job from starting even if there is room."""
        quota = view.quotas.get(lane.team)
        held = self.state.held.get(lane.team, 0)
        if quota is not None and quota.ceiling and held + gpus > quota.ceiling:
            most = quota.ceiling
            return reason("at_ceiling", team=lane.team, held=held, ceiling=most, gpus=gpus)
        qos = view.policy.queue.qos.get(lane.qos)
        used = self.qos_gpus.get(lane.qos, 0)
        if qos is not None and qos.most_gpus and used + gpus > qos.most_gpus:
            most = qos.most_gpus
            return reason("at_qos_limit", qos=lane.qos, held=used, most=most, gpus=gpus)
        return None

    def saved_for(self, view: View) -> dict[tuple[str, str], int]:
        """By limit ("team" or "qos", and its name): the job that starves because of it.

        What ends under the limit is saved for that job, or smaller ones would always be in time.
        """
        found: dict[tuple[str, str], int] = {}
        lanes = self.waiting.lanes.values()
        first = sorted((lane.entries[0], lane) for lane in lanes)
        for (_, number), lane in first:
            if not starves(view, view.jobs[number]):
                continue
            demand = self.waiting.where[number][1]
            why = self.gate(view, lane, demand.least_gpus)
            if why is None or not self._has_nodes(view, demand):
                continue
            if self._can_pass(view, lane, why, demand.least_gpus):
                limit = "team" if why.code == "at_ceiling" else "qos"
                found.setdefault((limit, getattr(lane, limit)), number)
        return found

    def _has_nodes(self, view: View, demand: Demand) -> bool:
        """Whether a demand would have nodes if nothing ran: for others nothing need be saved."""
        room = room_of(view.fleet)
        sound = room.sound(demand.suiting(room, len(view.fleet.classes)))
        return sound.bit_count() >= demand.least_slots

    def _can_pass(self, view: View, lane: Lane, why: Reason, gpus: int) -> bool:
        """Whether those who hold what a limit allows will leave: nobody waits for the others."""
        most = why.facts["ceiling"] if why.code == "at_ceiling" else why.facts["most"]
        for number in view.active:
            spec = view.jobs[number].spec
            under = spec.team == lane.team if why.code == "at_ceiling" else spec.qos == lane.qos
            if under and not spec.time_limit_ns and not spec.expected.steps:
                gpus += view.fleet.job_gpus.get(number, 0)
        return gpus <= int(most)

    def holders(self, limit: str, name: str) -> list[tuple[int, int]]:
        """Jobs that hold GPUs under a limit ("team" or "qos", and its name), and how many."""
        known, place = self._job_gpus or {}, 0 if limit == "team" else 1
        return [(job, held[2]) for job, held in known.items() if held[place] == name]

    def allowance(self, view: View, team: str, qos: str) -> int:
        """GPUs that a team may still take for jobs of a class of service."""
        quota, rule = view.quotas.get(team), view.policy.queue.qos.get(qos)
        left = view.fleet.total_gpus
        if quota is not None and quota.ceiling:
            left = min(left, quota.ceiling - self.state.held.get(team, 0))
        if rule is not None and rule.most_gpus:
            left = min(left, rule.most_gpus - self.qos_gpus.get(qos, 0))
        return max(0, left)

    def growth_allowance(self, view: View, team: str, qos: str) -> int:
        """GPUs that running jobs of a team and class may take more.

        What a job that starves under the same limit needs, if it can have it at all, is not theirs.
        """
        left, quota = self.allowance(view, team, qos), view.quotas.get(team)
        rule = view.policy.queue.qos.get(qos)
        for lane in self.waiting.lanes.values():
            of_team = lane.team == team and quota is not None and quota.ceiling
            of_class = lane.qos == qos and rule is not None and rule.most_gpus
            number = lane.entries[0][1]
            if (of_team or of_class) and starves(view, view.jobs[number]):
                gpus = self.waiting.where[number][1].least_gpus
                why = self.gate(view, lane, gpus)
                if why is None or self._can_pass(view, lane, why, gpus):
                    left -= gpus
        return max(0, left)

    def most_replicas(self, view: View, job: Job, demand: Demand) -> int:
        """Replicas that a job may start with: an elastic one takes what its limits leave."""
        wanted = demand.request.replicas
        if demand.least_gpus == demand.gpus:
            return wanted
        left = self.allowance(view, job.spec.team, job.spec.qos)
        low, high = min(job.spec.gang.floor, wanted), wanted
        while low < high:
            middle = (low + high + 1) // 2
            fits = gpus_of(view, job, middle) <= left
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def take(view: View, job: Job, placement: Placement) -> None:
    """Gives a job the nodes of its placement."""
    fleet, shape = view.fleet, job.spec.gang
    masks = placement.gpus or tuple((1 << shape.slot_gpus) - 1 for _ in placement.nodes)
    for node, mask in zip(placement.nodes, masks, strict=True):
        fleet.take(job.id, node, held_by(fleet, shape, node, mask))
    for node in placement.spares:
        why = reason("spare_of_job", job=job.id)
        fleet.set_state(node, NodeState.SPARE, view.now_ns, why, spare_for=job.id)
