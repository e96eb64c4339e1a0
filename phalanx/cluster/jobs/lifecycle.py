"""Jobs from the queue to their end: let in, started, released, ended, and who comes after."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.causes import FormationCause
from phalanx.cluster.context import Context
from phalanx.cluster.gang import failure_rates, left_memory
from phalanx.cluster.gang.formation import form
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs import dependencies, measured
from phalanx.cluster.jobs import write_leases as storage
from phalanx.cluster.jobs.job import ClusterJob, JobSpec, JobState, Placement, SpecChange
from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.commands import Level
from phalanx.cluster.reasons import Reason, reason


def let_in(ctx: Context, job: ClusterJob) -> None:
    """Puts a job into the queue, unless a person holds it or its time to begin has not come."""
    if becomes_eligible(ctx, job):
        ctx.queue.on_pending(ctx.view, job)


def becomes_eligible(ctx: Context, job: ClusterJob) -> bool:
    """Whether a job is for the queue from now on; if so, whoever asks tells the queue of it."""
    if job.held:
        job.eligible, job.why = False, job.operator_hold or reason("held")
        return False
    if ctx.now_ns < job.spec.begin_ns:
        job.eligible, job.why = False, reason("begins", begin_ns=job.spec.begin_ns)
        ctx.wake(job.spec.begin_ns, "begin", job.id)
        return False
    job.state = JobState.PENDING
    job.eligible = True
    job.queued_ns = ctx.now_ns
    job.why = reason("queued")
    ctx.view.pending[job.id] = None
    ctx.look_at_queue()
    return True


def begin(ctx: Context, number: int, _token: int) -> None:
    """The time has come from which a job may start."""
    job = ctx.view.jobs.get(number)
    waits = job is not None and job.state == JobState.PENDING and not job.eligible
    if job is not None and waits and not blocked(ctx, job):
        let_in(ctx, job)


def start(ctx: Context, job: ClusterJob, placement: Placement, why: Reason) -> None:
    """The queue gave a job its nodes."""
    del ctx.view.pending[job.id]
    ctx.view.active[job.id] = None
    job.placement = placement
    job.started_ns = ctx.now_ns
    job.waited_ns += ctx.now_ns - job.queued_ns
    job.gang = left_memory.taken_up(ctx, job)
    job.gang.rollback, job.gang.skip_step = job.rollback, job.skip_step
    left_memory.displace(ctx, job, placement.nodes, placement.spares)
    ctx.ledger.start(job, held_gpus(ctx, job), spare_gpus(ctx, placement), FormationCause.START)
    if job.time_limit_ns:
        left = max(0, job.time_limit_ns - job.ran_ns)
        ctx.wake(ctx.now_ns + left, "time_limit", job.id, job.started_ns)
    ctx.note_step(job)
    form(ctx, job, why)


def release(ctx: Context, job: ClusterJob) -> None:
    """Takes all nodes back from a job."""
    placement = job.placement
    assert placement is not None
    ctx.ledger.stop(job.id)
    failure_rates.ends_running(ctx, gang_of(job))
    for node in placement.nodes:
        ctx.fleet.release(job.id, node)
    for node in placement.spares:
        if ctx.fleet.state(node) is NodeState.SPARE:
            ctx.fleet.set_state(node, NodeState.HEALTHY, ctx.now_ns, reason("job_left"))
    job.ran_ns += ctx.now_ns - job.started_ns
    job.granted_ns = 0
    job.placement = None
    job.rollback, job.skip_step = gang_of(job).rollback, gang_of(job).skip_step
    job.gang = None
    del ctx.view.active[job.id]
    storage.left(ctx, job.id)
    ctx.queue.on_stopped(ctx.view, job)
    ctx.look_at_queue(capacity=True)


def take_over_change(ctx: Context, job: ClusterJob) -> None:
    """A job that holds no nodes becomes what it was asked to become, or was submitted as.

    Nothing that a person asks for where nodes keep its last steps in memory: too few of them may
    be in the next gang.
    """
    change, own = job.change, job.own
    job.change = None
    if change is not None and job.kept is not None and change.spec != own:
        ctx.notify(reason("change_dropped"), job=job.id, level="warning")
        change = None
    elif change is not None and 0 <= change.made_before < job.step:
        told = reason("change_too_late", first=change.made_before + 1, earliest=job.step + 2)
        ctx.notify(told, job=job.id, level="warning")
        return
    if change is None and own is not None:
        change = SpecChange(spec=own, taken_back=True)
    if change is None:
        return
    job.former, job.former_stages = None if change.taken_back else job.spec, job.stages_before
    if change.made_before >= 0:
        job.stages_before = change.stages_before
    if only_restages(change, job.spec):
        _restage(job, change)
        return
    if change.spec != own:
        job.wanted = 0
    job.spec, job.own, job.own_step_ns = change.spec, None, 0
    measured.forget(job)


def only_restages(change: SpecChange, spec: JobSpec) -> bool:
    """Whether the mapping that a job has stays as it is."""
    return change.made_before >= 0 and change.spec.gang == spec.gang


def _restage(job: ClusterJob, change: SpecChange) -> None:
    """Another payload, and nothing else: what was measured holds on, and so does a fallback."""
    if job.own is not None:
        job.former, job.own = job.own, change.own or job.own
    job.spec = change.spec


def end(ctx: Context, job: ClusterJob, state: JobState, why: Reason) -> None:
    """The end of a job that holds nothing any more; lets in those that waited for it."""
    if job.id in ctx.view.pending:
        withdraw(ctx, job)
    job.state, job.why, job.eligible = state, why, False
    left_memory.give_up(ctx, job, why)
    job.ended_ns, job.change, job.former, job.own = ctx.now_ns, None, None, None
    dependencies.withdrawn(ctx, job)
    level: Level = "error" if state == JobState.FAILED else "info"
    ctx.notify(why, job=job.id, level=level)
    for other in dependencies.ended(ctx, job):
        if not blocked(ctx, other):
            let_in(ctx, other)
    next_of_array(ctx, job)
    ctx.note_step(job)
    forget_oldest(ctx, job)


def withdraw(ctx: Context, job: ClusterJob) -> None:
    """Takes a job out of the queue: what it was promised is for others."""
    del ctx.view.pending[job.id]
    ctx.queue.on_withdrawn(ctx.view, job)
    ctx.look_at_queue(capacity=True)


def keep_out(ctx: Context, job: ClusterJob) -> None:
    """Takes a job that is held out of the queue."""
    job.eligible = False
    job.waited_ns += ctx.now_ns - job.queued_ns
    withdraw(ctx, job)
    job.why = job.operator_hold or reason("held")


def blocked(ctx: Context, job: ClusterJob) -> bool:
    """Whether something other than a person keeps a job out of the queue."""
    in_array = job.id in ctx.view.array_waiting.get(job.array_parent, ())
    return job.never or bool(job.waiting_for) or in_array


def next_of_array(ctx: Context, job: ClusterJob) -> None:
    """Lets in the next member of an array in place of one that ended."""
    waiting = ctx.view.array_waiting.get(job.array_parent)
    if waiting is None:
        return
    if job.id in waiting:  # cancelled before it was let in
        del waiting[job.id]
    elif waiting:
        following = ctx.view.jobs[next(iter(waiting))]
        del waiting[following.id]
        if following.never:
            pass  # it was told so
        elif following.waiting_for:
            following.why = dependencies.waiting(ctx, following)
        else:
            let_in(ctx, following)
    if not waiting:
        del ctx.view.array_waiting[job.array_parent]


def forget_oldest(ctx: Context, job: ClusterJob) -> None:
    """Keeps the number of ended jobs in memory within its limit."""
    ctx.ended[job.id] = None
    while len(ctx.ended) > ctx.policy.ended_jobs:
        oldest = next(iter(ctx.ended))
        dependencies.forget_trial(ctx, ctx.view.jobs[oldest])
        del ctx.ended[oldest], ctx.view.jobs[oldest]
        ctx.ledger.retire(oldest)


def held_gpus(ctx: Context, job: ClusterJob) -> int:
    """GPUs that a job's slots hold."""
    return ctx.fleet.job_gpus.get(job.id, 0)


def spare_gpus(ctx: Context, placement: Placement) -> int:
    """GPUs in the nodes that stand by for a placement."""
    return sum(ctx.fleet.nodes[node].gpus for node in placement.spares)


def drop_spare(ctx: Context, job: ClusterJob, node: int) -> None:
    """A job loses a node that stood by for it."""
    placement = job.placement
    assert placement is not None
    spares = tuple(other for other in placement.spares if other != node)
    job.placement = structs.replace(placement, spares=spares)
    gang = job.gang
    if gang is not None and node == gang.backup:
        gang.lost[node] = "left"  # unless it joins the gang and says otherwise
    if gang is not None and node == gang.next_backup:
        gang.next_backup = -1
    account = ctx.ledger.accounts[job.id]
    ctx.ledger.resize(job.id, account.gpus, spare_gpus(ctx, job.placement))
    ctx.look_at_queue(capacity=True)
