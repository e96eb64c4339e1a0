"""A job that runs as one of its fallbacks returns to its own mapping when that pays."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.gang.node_rates import rated
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs.departure import depart_safely
from phalanx.cluster.jobs.job import ClusterJob, JobState, Placement, SpecChange
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.jobs.lifecycle import spare_gpus
from phalanx.cluster.jobs.measured import shared_step_ns
from phalanx.cluster.jobs.replan import beyond_limits, place_as
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.choose import PlacementRefusal
from phalanx.cluster.recovery.fallbacks import return_ns
from phalanx.cluster.recovery.prices import (
    failures_ppm,
    horizon_ns,
    to_come_gpu_ns,
    until_through_ns,
)
from phalanx.cluster.recovery.reshape import prepare
from phalanx.cluster.units import SECOND_NS


def return_to_own(ctx: Context, job: ClusterJob) -> None:
    """Has a job save its state and start as it was submitted, if there is a place and it pays."""
    own, placement = job.own, job.placement
    assert own is not None and placement is not None
    if job.change is not None or gang_of(job).ending is not None:
        return
    gain = _gain_gpu_ns(ctx, job)
    changed = structs.replace(job, spec=own, own=None)
    if gain <= 0 or beyond_limits(ctx, job, changed) is not None:
        return
    placed = place_as(ctx, job, changed)
    if isinstance(placed, PlacementRefusal):
        return
    gain -= _failures_gpu_ns(ctx, job, placed)
    if gain <= 0:
        return
    _hold(ctx, job, placed)
    why = LeaveCause.OWN_MAPPING.because(
        before=job.spec.mapping, after=own.mapping, gain=gain // SECOND_NS
    )
    ctx.notify(why, job=job.id)
    job.change = SpecChange(spec=own, before=job.spec.mapping, taken_back=True)
    depart_safely(ctx, job, JobState.PENDING, why)


def _gain_gpu_ns(ctx: Context, job: ClusterJob) -> int:
    """What faster steps are worth until the horizon, less the pause."""
    own, now = job.own, job.spec
    assert own is not None
    replicas = job.wanted or own.gang.replicas
    before, after = now.expected.step_ns, shared_step_ns(own, replicas)
    if job.step_ns and job.own_step_ns:
        before, after = job.step_ns, job.own_step_ns
    gpus = own.gang.gpus(replicas)
    return gpus * (horizon_ns(ctx, job) * (before - after) // before - return_ns(job))


def _failures_gpu_ns(ctx: Context, job: ClusterJob, placed: Placement) -> int:
    """What failures cost more on the nodes of its own mapping: during the pause, and after it."""
    own = job.own
    assert own is not None
    on, gpus, pause_ns = rated(ctx, placed.nodes), own.gang.gpus(placed.replicas), return_ns(job)
    again_ns = until_through_ns(pause_ns, failures_ppm(on, gpus, pause_ns)) - pause_ns
    return gpus * again_ns + to_come_gpu_ns(ctx, job, on, gpus, horizon_ns(ctx, job))


def _hold(ctx: Context, job: ClusterJob, placed: Placement) -> None:
    """Keeps the free nodes of its future place for a job that is still saving its state."""
    placement = job.placement
    assert placement is not None
    mine = dict.fromkeys(placement.nodes + placement.spares)
    free = [
        node
        for node in placed.nodes + placed.spares
        if node not in mine
        and ctx.fleet.state(node) is NodeState.HEALTHY
        and not ctx.fleet.held[node]
    ]
    prepare(ctx, job, free)
    job.placement = structs.replace(placement, spares=(*placement.spares, *free))
    account = ctx.ledger.accounts[job.id]
    ctx.ledger.resize(job.id, account.gpus, spare_gpus(ctx, job.placement))
