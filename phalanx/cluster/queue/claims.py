"""What a job without room gets: a promised start, or the leave of others.

A promise is kept unless a better one is found or its nodes fail: then a job behind it can never
push it back, however often the queue is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import structs

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.jobs.horizon import earliest, leave_ns, length_ns
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.free_index import Nodes, free_index_of, set_of_nodes
from phalanx.cluster.placement.request import PlacementRequest
from phalanx.cluster.policy import QueuePolicy
from phalanx.cluster.queue import windows
from phalanx.cluster.queue.decisions import Preempt, Reserved
from phalanx.cluster.queue.index import QueueIndex
from phalanx.cluster.queue.limits import Saved
from phalanx.cluster.queue.pending import (
    PendingJobs,
    Priorities,
    base_parts,
    given_priority,
    starves,
)
from phalanx.cluster.queue.preemption import Eviction, PreemptionOffer, choose
from phalanx.cluster.reasons import Reason, reason, span_of
from phalanx.cluster.state import View

MOST_DOUBLED = 40  # times: more would be longer than anything lasts


def promise_start(
    index: QueueIndex,
    view: View,
    job: ClusterJob,
    request: PlacementRequest,
    others: Iterable[int],
    firm: bool,
) -> Reserved | None:
    """The earliest start of a job if nothing else is started; None: nobody can say.

    What is promised to ``others`` is theirs until they have ended, and windows that shut the job
    out are waited for. An old promise is kept unless the new one is earlier and pushes nobody back.
    """
    now, fleet = view.now_ns, view.fleet
    nodes, free_ns = index.ends.horizon(view).free_at(view, request)
    kept_ns = np.zeros(len(fleet), np.int64)  # by node: until when it is kept for others
    for window in windows.running(view):
        if windows.shuts_out(window, job.spec.team, None):
            _keep(kept_ns, index.windows.members(view, window.name), window.end_ns)
    free_ns = np.maximum(free_ns, kept_ns[nodes])
    promises = index.promises
    old = promises.by_job.get(job.id)
    for number in others:
        if number != job.id:
            known = promises.by_job[number]
            _keep(kept_ns, known.nodes, known.start_ns + _length_ns(index, view, number))
    times = np.maximum(free_ns, kept_ns[nodes])
    soon_ns = now + view.policy.queue.grace_ns
    slot = earliest(fleet, request, nodes, times, now, soon_ns)
    new = None
    if slot is not None:
        chosen = tuple(slot[1].tolist())
        holders = dict.fromkeys(holder for node in chosen for holder in fleet.held[node])
        sure = all(number in view.jobs and _limited(view.jobs[number]) for number in holders)
        new = Reserved(
            job=job.id, start_ns=slot[0], nodes=chosen, made_ns=now, sure=sure, firm=firm
        )
    if old is not None and not (old.asked or old.waits) and old.start_ns > now:
        mine = np.zeros(len(fleet), np.bool_)
        mine[np.asarray(old.nodes, np.int64)] = True
        ready = int((mine[nodes] & (free_ns <= old.start_ns)).sum()) == len(old.nodes)
        better = new is not None and new.start_ns < old.start_ns and _pushes(index, view, new) == 0
        if ready and not better and not _pushes(index, view, old):
            return structs.replace(old, made_ns=now, firm=firm or old.firm)
    return new


def _limited(job: ClusterJob) -> bool:
    return job.spec.time_limit_ns > 0


def _keep(kept_ns: Column, members: tuple[int, ...], until_ns: int) -> None:
    """Some nodes are kept until then, or for longer already."""
    index = np.asarray(members, np.int64)
    kept_ns[index] = np.maximum(kept_ns[index], until_ns)


def _length_ns(index: QueueIndex, view: View, number: int) -> int:
    """How long a job that was promised a start will hold its nodes."""
    waiting = index.waiting.where.get(number)
    return length_ns(view, view.jobs[number]) if waiting is None else waiting[1].length_ns


def _pushes(index: QueueIndex, view: View, promise: Reserved) -> int:
    """Promises to others that this one could not be kept beside."""
    promises = index.promises
    mine_ns = promise.start_ns + _length_ns(index, view, promise.job)
    mine = set_of_nodes(promise.nodes)
    count = 0
    for number, other in promises.by_job.items():
        if number == promise.job or not mine & promises.nodes(number):
            continue
        end_ns = other.start_ns + _length_ns(index, view, number)
        count += other.start_ns < mine_ns and promise.start_ns < end_ns
    return count


def evict(
    index: QueueIndex,
    view: View,
    job: ClusterJob,
    request: PlacementRequest,
    ranks: Priorities,
    gpus: int,
    leaving: dict[int, None],
) -> Eviction | None:
    """Who leaves or shrinks for a job that has the right to ask for it; not who leaves anyway."""
    rule = view.policy.queue.qos.get(job.spec.qos)
    loans: dict[int, None] = {}
    if ranks.entitled(job.spec.team, gpus):
        loans = on_loan(index.state.held, view, job.spec.team)
    elif view.quotas and starves(view, job):
        loans = on_loan(index.state.held, view, "")  # borrowers take turns
    preempts = rule is not None and rule.preempts
    if not loans and not preempts:
        return None
    policy, now = view.policy.queue, view.now_ns
    mine = _rank(view, job)
    stoppable: list[ClusterJob] = []
    shrinkable: list[tuple[ClusterJob, int]] = []
    asked = leaving | dict.fromkeys(
        who for one in index.promises.by_job.values() for who in one.asked
    )
    for number in view.active if preempts else loans:
        other = view.jobs[number]
        ripe = now >= other.started_ns + policy.least_run_ns
        if other.state == JobState.DRAINING or number in asked or not ripe:
            continue
        lower = preempts and other.spec.preemptible and _rank(view, other) < mine
        if number in loans or lower:
            if now >= stays_until_ns(policy, other):
                stoppable.append(other)
            if other.spec.gang.least_replicas:
                shrinkable.append((other, other.spec.gang.floor))
    freed = sum(view.fleet.job_gpus.get(other.id, 0) for other in stoppable)
    if not shrinkable and view.fleet.idle_gpus[NodeState.HEALTHY] + freed < gpus:
        return None
    return choose(view, request, shrinkable, stoppable)


def why_leave(
    index: QueueIndex,
    view: View,
    job: ClusterJob,
    offer: PreemptionOffer,
    ranks: Priorities,
    gpus: int,
) -> Reason:
    """What a job is told that leaves or shrinks for another one."""
    if offer.replicas:
        return reason("shrunk_for", job=job.id, replicas=offer.replicas)
    team = view.jobs[offer.job].spec.team
    held, owned = index.holdings.of_team(team), quota_gpus(view, team)
    loan: dict[str, int | str] = {"job": job.id, "team": team, "held": held, "owned": owned}
    if held <= owned or not view.quotas:
        return LeaveCause.PREEMPTED.because(job=job.id)
    if ranks.entitled(job.spec.team, gpus) and team != job.spec.team:
        return LeaveCause.RECLAIMED.because(lender=job.spec.team, **loan)
    if starves(view, job):
        waited_ns = job.waited_ns + view.now_ns - job.queued_ns
        return LeaveCause.TURN.because(span=span_of(waited_ns), **loan)
    return LeaveCause.PREEMPTED.because(job=job.id)


def leave_for_windows(index: QueueIndex, view: View, leaving: dict[int, None]) -> Iterator[Preempt]:
    """Jobs that would still be there when a window opens leave before it does; notes who does."""
    grace = view.policy.queue.grace_ns
    for window in windows.running(view):
        if view.now_ns < windows.emptied_from_ns(view, window):
            continue
        seen: dict[int, None] = {}
        for node in index.windows.members(view, window.name):
            seen.update(dict.fromkeys(view.fleet.held[node]))
        for number in seen:
            job = view.jobs.get(number)
            if job is None or job.state == JobState.DRAINING or number in leaving:
                continue
            end_ns = index.ends.gone_ns(view, number)
            if not windows.shuts_out(window, job.spec.team, end_ns):
                continue
            if view.now_ns >= window.start_ns - leave_ns(view, job):
                # Who is told late has its grace all the same.
                left = max(window.start_ns - view.now_ns, grace)
                why = LeaveCause.WINDOW.because(name=window.name)
                leaving[number] = None
                yield Preempt(number, 0, left, why, window.name)


def collector(index: QueueIndex, view: View, saved: Saved) -> int:
    """The job that gets every node that becomes free; 0: none does.

    Whoever has waited twice as long as starving takes: a promise goes by time limits, and what
    ends before its own may be far too generous.
    """
    limit = view.now_ns - 2 * view.policy.queue.starving_ns
    late = [lane.entries[0] for lane in index.waiting.lanes.values()]
    for _, number in sorted(entry for entry in late if entry[0] <= limit):
        lane, demand, _ = index.waiting.where[number]
        promise = index.promises.by_job.get(number)
        # Only who would start at last if nothing else did: others would wait for nothing.
        feasible = promise is not None and promise.sure and not promise.asked
        if feasible and not index.limits.gated(view, number, lane, demand, saved):
            return number
    return 0


def collected(waiting: PendingJobs, view: View, number: int) -> Nodes:
    """Nodes that a job could use at once, were they enough."""
    free_index, demand = free_index_of(view.fleet), waiting.where[number][1]
    suiting = demand.group.suiting(free_index, len(view.fleet.classes))
    return free_index.with_free(suiting, demand.request.shape.slot_gpus)


def stays_until_ns(policy: QueuePolicy, job: ClusterJob) -> int:
    """Until when nobody may send a running job away.

    Each time it was sent away the time doubles, so that it happens a bounded number of times;
    a job that starved before it started has all of it at once.
    """
    earned = policy.least_run_ns << min(job.preemptions, MOST_DOUBLED)
    if job.waited_ns >= policy.starving_ns:
        earned = policy.most_stay_ns
    return job.started_ns + max(policy.least_run_ns, min(earned, policy.most_stay_ns))


def first_askable_ns(view: View, after_ns: int, soon_ns: int) -> int | None:
    """When a running job can first be asked to leave, or to give up replicas, later than a time.

    All times up to ``soon_ns`` are alike: any of them is returned.
    """
    policy, jobs, first = view.policy.queue, view.jobs, None
    starving_ns, least_run_ns = policy.starving_ns, policy.least_run_ns
    for number in view.active:  # thousands of them, at every look: no calls for most
        job = jobs[number]
        at_ns = job.started_ns + least_run_ns
        if job.preemptions or job.waited_ns >= starving_ns:
            stays_ns = stays_until_ns(policy, job)
            if not job.spec.gang.least_replicas or at_ns <= after_ns < stays_ns:
                at_ns = stays_ns
        if at_ns > after_ns and (first is None or at_ns < first):
            first = at_ns
            if first <= soon_ns:
                break
    return first


def on_loan(held_by_team: dict[str, int], view: View, lender: str) -> dict[int, None]:
    """Jobs on what their teams do not own, the last that started; not of the lender itself."""
    over = {
        team: quota_gpus(view, team)
        for team, gpus_held in held_by_team.items()
        if team != lender and gpus_held > quota_gpus(view, team)
    }
    if not over:
        return {}
    mine: dict[str, list[ClusterJob]] = {team: [] for team in over}
    for number in view.active:
        job = view.jobs[number]
        if job.spec.team in mine:
            mine[job.spec.team].append(job)
    loans: dict[int, None] = {}
    for team, jobs in mine.items():
        gpus_held = 0
        for job in sorted(jobs, key=lambda one: (one.started_ns, one.id)):
            gpus_held += view.fleet.job_gpus.get(job.id, 0)
            if gpus_held > over[team]:
                loans[job.id] = None
    return loans


def quota_gpus(view: View, team: str) -> int:
    """GPUs that a team owns."""
    quota = view.quotas.get(team)
    return quota.gpus if quota else 0


def _rank(view: View, job: ClusterJob) -> int:
    """What people gave a job; neither its size nor its patience lets it stop another."""
    return given_priority(base_parts(view.policy.queue, job))
