"""Another mapping for a job that lives: it saves its state, and goes on from there as changed.

The change is checked, and a place for it looked for, before anything stops. The gang finishes its
step and writes it; then the job takes over the change and starts at once, in the same event, so
that nobody else gets its nodes in between.
"""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.jobs import budget
from phalanx.cluster.jobs.departure import depart_safely
from phalanx.cluster.jobs.feasibility import admit
from phalanx.cluster.jobs.job import ClusterJob, Gang, JobSpec, JobState, Placement, SpecChange
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.jobs.lifecycle import (
    held_gpus,
    only_restages,
    spare_gpus,
    start,
    take_over_change,
)
from phalanx.cluster.jobs.requests import known, refused_as_ending
from phalanx.cluster.jobs.submission import senseless
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.choose import PlacementRefusal, place, request_of
from phalanx.cluster.placement.free_index import set_of_nodes
from phalanx.cluster.placement.request import PlacementRequest, gpus_of
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import Replan
from phalanx.cluster.reasons import Reason, reason

WHAT_RUNS = ("gang", "payload", "spares")
CHANGEABLE = (*WHAT_RUNS, "expected", "plan", "fallbacks")
CHANGES = (LeaveCause.REPLANNED, LeaveCause.RESTAGED, LeaveCause.OWN_MAPPING)


def on_replan(ctx: Context, fact: Replan) -> None:
    """A person wants another mapping for a job."""
    job = known(ctx, fact.job, fact.request)
    if job is None or refused_as_ending(ctx, job, fact.request):
        return
    bad = _refusal(ctx, job, fact.change)
    if bad is not None:
        ctx.emit((), Refuse(reason=bad, request=fact.request, job=job.id))
        return
    job.change, why, placement = fact.change, _why(fact.change), job.placement
    if placement is None:
        _change_waiting(ctx, job)
    else:
        depart_safely(ctx, job, JobState.PENDING, why)
        if job.gang is None:  # there was nothing to save
            _start_at_once(ctx, job, placement, why)
    ctx.emit((), Accept(reason=why, request=fact.request, job=job.id))


def start_again(ctx: Context, job: ClusterJob, gang: Gang, left: Placement) -> None:
    """A job has left its nodes with its state safe; where that was to change, it starts at once.

    Whoever was to be gone by a time, for others, waits for its turn like them.
    """
    if LeaveCause.of(gang.ending_why) in CHANGES and not gang.leave_by_ns:
        _start_at_once(ctx, job, left, gang.ending_why)


def _why(change: SpecChange) -> Reason:
    settings, by = ", ".join(change.settings), change.by or "somebody"
    if change.made_before >= 0:
        step = change.made_before
        return LeaveCause.RESTAGED.because(settings=settings, step=step, by=by)
    return LeaveCause.REPLANNED.because(
        settings=settings,
        before=change.before,
        after=change.spec.plan.mapping if change.spec.plan is not None else "",
        by=by,
    )


def _refusal(ctx: Context, job: ClusterJob, change: SpecChange) -> Reason | None:
    """Why a change is not carried out; None: it is."""
    spec, old = change.spec, job.spec
    if job.change is not None:
        settings = ", ".join(job.change.settings)
        return reason("changed_again", job=job.id, settings=settings)
    if job.kept is not None:
        return reason("change_unsafe", job=job.id)
    if all(getattr(spec, name) == getattr(old, name) for name in WHAT_RUNS):
        return reason("no_change", job=job.id)
    made = job.step + (job.placement is not None)  # its next step has begun
    if 0 <= change.made_before < made:
        first, earliest = change.made_before + 1, made + 1
        return reason("stages_read", job=job.id, first=first, step=job.step, earliest=earliest)
    for name in JobSpec.__struct_fields__:
        if name not in CHANGEABLE and getattr(spec, name) != getattr(old, name):
            rule = f"was {getattr(old, name)}, and stays so while the job lives"
            return reason("bad_field", key=name, value=str(getattr(spec, name)), rule=rule)
    checked = change.own or spec  # a fallback was made of its job's own mapping
    bad = senseless(ctx, checked) or admit(ctx.view, checked)
    if bad is not None or job.placement is None:
        return bad
    wanted = job.wanted if only_restages(change, old) else 0
    changed = structs.replace(job, spec=spec, wanted=wanted)
    return beyond_limits(ctx, job, changed) or _no_place(ctx, job, changed)


def beyond_limits(ctx: Context, job: ClusterJob, changed: ClusterJob) -> Reason | None:
    """Which limits leave too little for a job that would become larger."""
    assert job.placement is not None
    ctx.queue.sync(ctx.view)
    team, qos = job.spec.team, job.spec.qos
    left = ctx.queue.limits.growth_allowance(ctx.view, job)
    more = gpus_of(ctx.fleet, changed) - held_gpus(ctx, job) - spare_gpus(ctx, job.placement)
    if more <= left:
        return None
    return reason("change_at_limit", more=more, left=left, team=team, qos=qos)


def _no_place(ctx: Context, job: ClusterJob, changed: ClusterJob) -> Reason | None:
    """Why a gang would have no place if it left its nodes; None: it would."""
    found = place_as(ctx, job, changed)
    if isinstance(found, PlacementRefusal):
        return reason("change_no_place", why=str(found.reason))
    return None


def place_as(ctx: Context, job: ClusterJob, changed: ClusterJob) -> Placement | PlacementRefusal:
    """Where a changed gang would stand if it left its nodes and came back."""
    placement, fleet = job.placement, ctx.fleet
    assert placement is not None
    held = [(node, fleet.release(job.id, node)) for node in placement.nodes]
    placed = place(fleet, _request(ctx, changed, placement))
    for node, part in held:
        fleet.take(job.id, node, part)
    return placed


def _request(ctx: Context, job: ClusterJob, left: Placement) -> PlacementRequest:
    """What a job asks for that leaves its nodes and comes back.

    Others may have been promised these for the time when it ends, which it does not now.
    """
    mine = set_of_nodes(left.nodes + left.spares)
    spares = tuple(node for node in left.spares if ctx.fleet.state(node) is NodeState.SPARE)
    return structs.replace(
        request_of(job, 0, ctx.policy),
        closed=ctx.queue.closed_to(ctx.view, job) & ~mine,
        own=set_of_nodes(spares),
    )


def _change_waiting(ctx: Context, job: ClusterJob) -> None:
    """A job that waits asks for something else from now on, and no promise fits."""
    queued = job.id in ctx.view.pending
    if queued:
        ctx.queue.on_withdrawn(ctx.view, job)
    take_over_change(ctx, job)
    if queued:
        ctx.queue.on_pending(ctx.view, job)
        ctx.look_at_queue()


def _start_at_once(ctx: Context, job: ClusterJob, left: Placement, why: Reason) -> None:
    if job.id not in ctx.view.pending:
        return  # somebody holds it
    team, qos, gpus = job.spec.team, job.spec.qos, gpus_of(ctx.fleet, job)
    allowed = ctx.queue.limits.allowance(ctx.view, job)
    placed = place(ctx.fleet, _request(ctx, job, left))
    if isinstance(placed, PlacementRefusal) or gpus > allowed:
        limits = reason("change_at_limit", more=gpus, left=allowed, team=team, qos=qos)
        because = placed.reason if isinstance(placed, PlacementRefusal) else limits
        ctx.notify(reason("change_waits", why=str(because)), job=job.id, level="warning")
        return
    ctx.queue.start_at_once(ctx.view, job, placed)
    start(ctx, job, placed, why)
    budget.watch(ctx, job)
