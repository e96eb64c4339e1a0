"""Why a job waits, in one sentence, and when it will probably start."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import structs

from phalanx.cluster.claims import on_loan, promise_start, stays_until_ns
from phalanx.cluster.decisions import Pending
from phalanx.cluster.horizon import bound_ns
from phalanx.cluster.job import Job
from phalanx.cluster.placement import Refusal, place
from phalanx.cluster.reasons import Reason, reason, sentences
from phalanx.cluster.room import room_of
from phalanx.cluster.state import View
from phalanx.cluster.waiting import Ranks, base_parts

if TYPE_CHECKING:
    from phalanx.cluster.queue import Queue

sentences(
    {
        "at_ceiling": "its team {team} holds {held} GPUs and may hold {ceiling}; this job needs"
        " {gpus}",
        "at_qos_limit": "jobs of class of service {qos} hold {held} GPUs and may hold {most}; this"
        " job needs {gpus}",
        "promised": "{problem}; {nodes} are kept for it, and it starts in {span} at the latest",
        "promised_about": "{problem}; {nodes} are kept for it, and it starts in about {span} (some"
        " that runs there has no time limit)",
        "others_leave": "{jobs} jobs are asked to leave for it, and it starts in about {span}",
        "waits_for_room": "{problem}; jobs ahead of it: {ahead}",
        "saved_for": "what {what} may hold is saved for job {job}, which has waited {span}",
        "guests_stay": "{problem}; jobs that run on what team {team} lent: {guests}, and the first"
        " can be asked to leave in {span}",
        "waits_for_window": "its nodes are wanted for {name} before it would be sure to have ended"
        " (its time limit: {limit})",
        "kept_for_others": "there is room, but it is promised to job {job} in {span}, before this"
        " job would be sure to have ended (its time limit: {limit})",
        "next_look": "it has room and starts at the next look at the queue",
        "beyond_depth": "there is room, but {ahead} jobs are ahead of it and the queue looks at"
        " {depth} at a time",
    }
)


def explain(queue: Queue, view: View, number: int) -> Pending:
    """What a pending job waits for, when it may start, and the parts of its priority."""
    job = view.jobs[number]
    known = queue.waiting.where.get(number)
    if known is None:
        return Pending(job.why, None, {})
    lane, demand, queued_ns = known
    ranks = Ranks(view, queue.state.usage, queue.state.held)
    age, fair, quota = ranks.parts(lane, queued_ns, demand.gpus)
    parts = base_parts(view.policy.queue, job)
    parts |= {"age": age, "fair_share": fair, "quota": quota}
    promise = queue.state.reserved.get(number)
    if promise is not None and queue.promised(number) & ~room_of(view.fleet).healthy:
        promise = None  # one of its nodes is gone: the next look finds another start
    why = queue.gate(view, lane, demand.least_gpus) or _saved(queue, view, number)
    if why is not None:
        return Pending(why, None, parts)
    ahead, gpus_ahead, work_ahead = _ahead(queue, ranks, number)
    why, now = _obstacle(queue, view, job, ahead)
    if why.code == "waits_for_room" and ranks.entitled(lane.team, demand.gpus):
        why = _with_guests(queue, view, lane.team, why)
    if promise is not None and promise.start_ns > view.now_ns and not now:
        span = span_of(promise.start_ns - view.now_ns)
        if promise.asked:
            why = reason("others_leave", jobs=len(promise.asked), span=span)
        elif why.code == "waits_for_room":
            problem = why.facts["problem"]
            code = "promised" if promise.sure else "promised_about"
            why = reason(code, problem=problem, nodes=len(promise.nodes), span=span)
        return Pending(why, promise.start_ns, parts)
    if now:
        return Pending(why, view.now_ns, parts)
    start_ns = estimate_ns(queue, view, job, gpus_ahead + demand.gpus, work_ahead)
    return Pending(why, start_ns, parts)


def _obstacle(queue: Queue, view: View, job: Job, ahead: int) -> tuple[Reason, bool]:
    """(why a job does not start, whether it will at the next look)."""
    _, demand, _ = queue.waiting.where[job.id]
    request = structs.replace(demand.request, job=job.id)
    found = place(view.fleet, request)
    if isinstance(found, Refusal):
        problem = str(found.reason)
        return reason("waits_for_room", problem=problem, ahead=ahead), False
    bound = bound_ns(view, job)
    end_ns = None if bound is None else view.now_ns + bound
    limit = span_of(job.spec.time_limit_ns) if job.spec.time_limit_ns else "none"
    closed, name = queue.window_nodes(view, job.spec.team, end_ns)
    if isinstance(place(view.fleet, structs.replace(request, closed=closed)), Refusal):
        return reason("waits_for_window", name=name, limit=limit), False
    for other, promise in queue.state.reserved.items():
        if other != job.id and (end_ns is None or end_ns > promise.start_ns):
            closed |= queue.promised(other)
            if isinstance(place(view.fleet, structs.replace(request, closed=closed)), Refusal):
                span = span_of(max(0, promise.start_ns - view.now_ns))
                return reason("kept_for_others", job=other, span=span, limit=limit), False
    depth = view.policy.queue.backfill_depth
    if ahead > depth:
        return reason("beyond_depth", ahead=ahead, depth=depth), False
    return reason("next_look"), True


def _saved(queue: Queue, view: View, number: int) -> Reason | None:
    """Whether what a limit allows is saved for another job, which starves under it."""
    lane, _, _ = queue.waiting.where[number]
    saved = queue.saved_for(view)
    for limit, name in (("team", lane.team), ("qos", lane.qos)):
        other = saved.get((limit, name))
        if other is not None and other != number:
            what = f"team {name}" if limit == "team" else f"class of service {name}"
            job = view.jobs[other]
            span = span_of(job.waited_ns + view.now_ns - job.queued_ns)
            return reason("saved_for", what=what, job=other, span=span)
    return None


def _with_guests(queue: Queue, view: View, team: str, why: Reason) -> Reason:
    """The reason of a job that has a right to its GPUs: who may keep them for a while."""
    policy, guests = view.policy.queue, on_loan(queue, view, team)
    staying = [stays_until_ns(policy, view.jobs[number]) for number in guests]
    if not staying or min(staying) <= view.now_ns:
        return why  # some can be asked now
    span = span_of(min(staying) - view.now_ns)
    facts = {"problem": why.facts["problem"], "team": team, "guests": len(guests), "span": span}
    return reason(why.code, **{**why.facts, "problem": str(reason("guests_stay", **facts))})


def _ahead(queue: Queue, ranks: Ranks, number: int) -> tuple[int, int, int]:
    """(jobs, GPUs, GPU-nanoseconds) before a job in the order of the queue."""
    lane, demand, queued_ns = queue.waiting.where[number]
    mine = (-ranks.of(lane, queued_ns, demand.gpus), queued_ns, number)
    jobs = gpus = work = 0
    for other in queue.waiting.demands.values():
        for theirs, entries in other.lanes.items():
            # Within a lane the order is that of arrival: count until the first behind this job.
            low, high = 0, len(entries)
            while low < high:
                middle = (low + high) // 2
                queued, job = entries[middle]
                before = (-ranks.of(theirs, queued, other.gpus), queued, job) < mine
                low, high = (middle + 1, high) if before else (low, middle)
            jobs += low
            gpus += low * other.gpus
            work += low * other.gpus * other.length_ns
    return jobs, gpus, work


def estimate_ns(queue: Queue, view: View, job: Job, gpus: int, work: int) -> int | None:
    """When a job will probably start: there is room for it, and for all before it.

    An estimate: jobs that end early bring it forward, new ones of higher priority push it back.
    """
    _, demand, _ = queue.waiting.where[job.id]
    request = structs.replace(demand.request, job=job.id)
    alone = promise_start(queue, view, job, request, (), firm=False)
    if alone is None:
        return None
    now, free = view.now_ns, view.fleet.idle_gpus[0]
    if free >= gpus:
        return alone.start_ns
    horizon = queue.horizon(view)
    ends = sorted(
        (horizon.end_ns(view, number), held) for number, held in view.fleet.job_gpus.items()
    )
    for end_ns, held in ends:
        free += held
        if free >= gpus:
            return max(alone.start_ns, end_ns)
    # More is ahead than runs: all of that work, over all GPUs.
    work += sum(max(0, end_ns - now) * held for end_ns, held in ends)
    return max(alone.start_ns, now + work // max(1, free))


def span_of(span_ns: int) -> str:
    """A time for a person: its two largest units."""
    seconds = -(-span_ns // 10**9)
    units = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")]
    for (large, name), (small, below) in pairwise(units):
        if seconds >= large:
            rest = seconds % large // small
            return f"{seconds // large} {name}" + (f" {rest} {below}" if rest else "")
    return f"{seconds} s"
