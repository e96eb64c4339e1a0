"""What a way out costs: its pause, slower steps until a horizon, and the failures to come.

Pure, and in integers. How often a gang fails is the mean rate of the nodes that it would have, each
by its kind, age and past as such were seen to fail, times its GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.fleet import time_away
from phalanx.cluster.gang.formation import choose_source
from phalanx.cluster.gang.losses import in_memory
from phalanx.cluster.gang.node_rates import RatedNodes, by_node, rated
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.gang.seen_failures import NODE_GPUS
from phalanx.cluster.jobs.job import LONGEST_NS, ClusterJob, Expected
from phalanx.cluster.jobs.measured import shared_step_ns
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.free_index import free_index_of
from phalanx.cluster.placement.replacements import NodePrices
from phalanx.cluster.placement.request import request_of, tensor_slots
from phalanx.cluster.policy import DAY_NS
from phalanx.cluster.protocol.messages import Source
from phalanx.cluster.units import MILLION

MOST_FAILURES_PPM = 16 * MILLION  # during one pause: such a gang would never run again
ALIKE_PARTS = 100  # nodes whose prices differ by less than this part of a failure are alike


def horizon_ns(ctx: Context, job: ClusterJob) -> int:
    """How long a loss of speed lasts: until a node is repaired, or the job is done."""
    return min(ctx.policy.recovery.repair_ns, left_ns(job))


def slower_ns(
    ctx: Context,
    job: ClusterJob,
    slowdown_ppm: int,
    most_ns: int = LONGEST_NS,
    *,
    usual_ns: int = 0,
) -> int:
    """What steps that take so much longer lose, until a node is repaired or the job is done.

    A slower job is done later: what it has left lasts longer by as much. ``most_ns``: until its
    pace is the usual one again. ``usual_ns``: a step at that pace; 0: as measured.
    """
    pace_ppm = MILLION + slowdown_ppm
    left = left_ns(job, usual_ns) * pace_ppm // MILLION
    slow_ns = min(ctx.policy.recovery.repair_ns, most_ns, left)
    return slow_ns * slowdown_ppm // pace_ppm


def left_ns(job: ClusterJob, each_ns: int = 0) -> int:
    """How long a job still runs; where nobody said how many steps it has, as long as any does."""
    steps = job.spec.expected.steps
    return max(0, (steps - job.step) * (each_ns or step_ns(job))) if steps else LONGEST_NS


def step_ns(job: ClusterJob) -> int:
    """A step's time: measured, else expected."""
    return job.step_ns or job.spec.expected.step_ns


def slower_gpu_ns(job: ClusterJob, replicas: int, span_ns: int) -> int:
    """What other numbers of replicas lose within a time, of the GPUs that the gang has now.

    They share a batch that stays: where its micro-batches do not divide, one replica less may cost
    as much as many.
    """
    assert job.placement is not None
    now = shared_step_ns(job.spec, job.placement.replicas)
    then = shared_step_ns(job.spec, replicas)
    gpus = job.spec.gang.gpus(job.placement.replicas)
    return gpus * span_ns * (then - now) // then


def shrunk_gpu_ns(ctx: Context, job: ClusterJob, replicas: int, back_ns: int) -> int:
    """What fewer replicas lose until the others are back, of the GPUs that the gang has now."""
    assert job.placement is not None
    now = shared_step_ns(job.spec, job.placement.replicas)
    longer_ns = max(0, shared_step_ns(job.spec, replicas) - now)
    gpus = job.spec.gang.gpus(job.placement.replicas)
    return gpus * slower_ns(ctx, job, MILLION * longer_ns // now, back_ns)


def as_it_is(ctx: Context, job: ClusterJob) -> RatedNodes:
    """The nodes that a gang has."""
    assert job.placement is not None
    return rated(ctx, job.placement.nodes)


def failures_ppm(on: RatedNodes, gpus: int, span_ns: int) -> int:
    """Failures that so many GPUs of some nodes expect within a time, in millionths."""
    return on.rate * gpus * span_ns // (NODE_GPUS * DAY_NS)


def until_through_ns(span_ns: int, often_ppm: int) -> int:
    """How long an attempt takes on average that begins anew with every failure.

    Of failures at random, x of which are expected within its length, that is (e**x - 1) / x times
    its length; here as a series.
    """
    often_ppm = min(often_ppm, MOST_FAILURES_PPM)
    total = term = span_ns
    number = 2
    while term:
        term = term * often_ppm // (MILLION * number)
        total += term
        number += 1
    return total


def missing_ns(ctx: Context, job: ClusterJob, gone: tuple[int, ...], count: int) -> int | None:
    """Until so many nodes are likely to be there for a gang that lost some; None: nobody can say.

    Some come back that are away, or what runs on others ends, whichever is sooner. A tensor group
    across nodes needs its own ones back: others are in other NVLink domains.
    """
    if tensor_slots(job.spec.gang) > 1:
        return time_away.expected_ns(ctx, gone, count)
    request = request_of(job, 0, ctx.policy)
    suiting = free_index_of(ctx.fleet).suiting(
        request.shape, request.constraint, request.partition, request.barred
    )
    kinds = ctx.fleet.columns.node_class
    away = [
        node
        for node in time_away.away(ctx)
        if kinds[node] in suiting and all(number == job.id for number in ctx.fleet.held[node])
    ]
    back_ns = time_away.expected_ns(ctx, away, count)
    free_ns = ctx.queue.free_ns(ctx.view, job, count)
    ends = [] if free_ns is None else [max(0, free_ns - ctx.now_ns)]
    return min(ends + ([] if back_ns is None else [back_ns]), default=None)


def pause_ns(
    ctx: Context,
    job: ClusterJob,
    on: RatedNodes,
    gpus: int,
    *,
    started_ns: int,
    lost: tuple[int, ...] = (),
) -> int:
    """From now to the step that was reached before the failure, if the next one comes as usual.

    ``on``: what it would have. ``started_ns``: until the last worker that must be started is
    up; 0: all live. ``lost``: nodes that the gang goes on without.
    """
    expected, gang = job.expected, gang_of(job)
    gone = tuple(node for node in lost if ctx.fleet.state(node) is NodeState.DEAD)
    step, source = choose_source(ctx, job, job.committed if in_memory(gang, gone) else -1)
    start_ns = started_ns + expected.form_ns + restore_ns(expected, source)
    return through_ns(ctx, job, on, gpus, start_ns, (job.step - step) * step_ns(job))


def restore_ns(expected: Expected, source: Source) -> int:
    """How long a gang is expected to load its state from a source."""
    return {
        "none": 0,
        "peer": expected.restore_peer_ns,
        "disk": expected.restore_disk_ns,
        "remote": expected.restore_remote_ns,
    }[source]


def through_ns(
    ctx: Context, job: ClusterJob, on: RatedNodes, gpus: int, start_ns: int, again_ns: int
) -> int:
    """A restart on some nodes and the steps made again, with the chance that it is interrupted.

    Steps that are safe in memory as soon as they are made are not made a third time.
    """
    if not _copied(ctx, job, len(job.placement.nodes) if job.placement else 0):
        start_ns, again_ns = start_ns + again_ns, 0
    return until_through_ns(start_ns, failures_ppm(on, gpus, start_ns)) + again_ns


def grown_pause_ns(ctx: Context, job: ClusterJob, on: RatedNodes, *, cold: bool = False) -> int:
    """How long a gang that runs stands still to take more nodes in; all others' workers live."""
    expected = job.expected
    started_ns = expected.join_ns(cold=True) if cold else expected.rejoin_ns
    start_ns = started_ns + expected.form_ns + expected.restore_peer_ns
    gpus = on.count * job.spec.gang.slot_gpus
    return through_ns(ctx, job, on, gpus, start_ns, 0)


def to_come_gpu_ns(ctx: Context, job: ClusterJob, on: RatedNodes, gpus: int, span_ns: int) -> int:
    """What failures within a time cost a gang on some nodes more than as it is.

    Each costs a pause: a short one where another node has every slot's newest snapshot.
    """
    assert job.placement is not None
    gpus_now = job.spec.gang.gpus(job.placement.replicas)
    now = _to_come(ctx, job, as_it_is(ctx, job), gpus_now, span_ns)
    return _to_come(ctx, job, on, gpus, span_ns) - now


def _to_come(ctx: Context, job: ClusterJob, on: RatedNodes, gpus: int, span_ns: int) -> int:
    each_ns = failure_ns(job, copied=_copied(ctx, job, on.count))
    return gpus * each_ns * failures_ppm(on, gpus, span_ns) // MILLION


def failure_ns(job: ClusterJob, *, copied: bool) -> int:
    """How long a gang stands still, and makes steps again, for one failure to come.

    ``copied``: another node has every slot's newest snapshot.
    """
    expected = job.expected
    each_ns = expected.join_ns(cold=False) + expected.form_ns
    if copied:
        return each_ns + expected.restore_peer_ns + expected.snapshot_steps * step_ns(job) // 2
    if expected.checkpoint_steps:
        made_ns = expected.checkpoint_steps * step_ns(job) // 2
        return each_ns + expected.restore_remote_ns + made_ns
    return each_ns + job.step * step_ns(job)


def node_prices(ctx: Context, job: ClusterJob) -> NodePrices:
    """What each node of the fleet would cost a gang that takes it for a lost one."""
    assert job.placement is not None
    shape, span_ns, expected = job.spec.gang, horizon_ns(ctx, job), job.expected
    each_ns = failure_ns(job, copied=_copied(ctx, job, len(job.placement.nodes)))
    alone_ns = failure_ns(job, copied=False)

    def priced(each_ns: int) -> Callable[[int], int]:
        seen = NODE_GPUS * DAY_NS * MILLION
        return lambda rate: min(LONGEST_NS, rate * shape.slot_gpus * span_ns * each_ns // seen)

    return NodePrices(
        cold_ns=expected.join_ns(cold=True) - expected.rejoin_ns,
        failures_ns=by_node(ctx, priced(each_ns)),
        both_copies_ns=by_node(ctx, priced(max(each_ns, alone_ns))),
        steps=span_ns // step_ns(job),
        alike_ns=max(1, each_ns // ALIKE_PARTS),
    )


def until_failure_ns(on: RatedNodes, gpus: int, most_ns: int) -> int:
    """When the next failure of so many GPUs of some nodes is expected, or some time before."""
    return min(most_ns, most_ns * MILLION // max(1, failures_ppm(on, gpus, most_ns)))


def _copied(ctx: Context, job: ClusterJob, slots: int) -> bool:
    """Whether a gang of so many slots has its newest steps in the memory of two nodes."""
    snapshots = job.spec.expected.snapshot_steps > 0 and ctx.policy.recovery.peer_memory
    return snapshots and slots > 1


def recur_ppm(ctx: Context, node: int, cause: str) -> int:
    """Chance that a node fails at once again: every time that it did halves the hope."""
    hope = MILLION - Cause.of(cause).recur_ppm
    return MILLION - (hope >> max(0, times_failed(ctx, node) - 1))


def times_failed(ctx: Context, node: int) -> int:
    """How often a node failed lately, this time included."""
    since = ctx.now_ns - ctx.policy.health.strike_window_ns
    return sum(at > since for at, _ in ctx.health.incidents.get(node, ()))
