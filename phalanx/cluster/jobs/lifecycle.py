"""Jobs from submission to their end: admission, arrays, budgets, limits, cancel, requeue."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.fleet.fleet import NodeState
from phalanx.cluster.forecast.horizon import leave_ns
from phalanx.cluster.gang.draining import drain, hurry
from phalanx.cluster.gang.formation import form
from phalanx.cluster.gang.orders import stop_on
from phalanx.cluster.gang.phases import gang_of, timeouts_of
from phalanx.cluster.jobs import dependencies
from phalanx.cluster.jobs import write_leases as storage
from phalanx.cluster.jobs.admission import refusal
from phalanx.cluster.jobs.job import Dependency, Job, JobSpec, JobState, Placement
from phalanx.cluster.protocol.commands import Accept, Level, Refuse
from phalanx.cluster.protocol.events import (
    Cancel,
    Hold,
    Requeue,
    Submit,
    SubmitWorkflow,
)
from phalanx.cluster.queue.decisions import Start
from phalanx.cluster.reasons import Reason, reason, sentences
from phalanx.cluster.recovery import left_memory
from phalanx.cluster.recovery.losses import tell_left, unsaved, why_gone

sentences(
    {
        "accepted": "accepted",
        "queued": "in the queue",
        "no_such_job": "there is no job {job}",
        "job_ended": "job {job} has already ended ({state})",
        "not_pending": "job {job} is {state}; only a pending or draining job can be held",
        "not_running": "job {job} is {state}; only a running job can be sent back to the queue",
        "leaving": "job {job} is about to end ({why}): only what waits or runs can be sent back to"
        " the queue or held",
        "cancelled": "cancelled by a person",
        "requeued": "sent back to the queue by a person",
        "drained": "stopped by a person, and held until it is resumed",
        "finished": "did all its steps",
        "time_limit": "ran into its time limit of {seconds} s at step {step}",
    }
)

# Others wait for its nodes: whoever leaves for these has its grace, and no more.
FOR_OTHERS = ("preempted_for", "reclaimed", "turn", "window_opens")


def submit(ctx: Context, fact: Submit) -> None:
    """Accepts a job or an array of them, or says why not."""
    why = refusal(ctx, fact.spec)
    if why is not None:
        ctx.emit((), Refuse(reason=why, request=fact.request))
        return
    first = create(ctx, fact.spec)
    ctx.emit((), Accept(reason=reason("accepted"), request=fact.request, job=first))


def submit_workflow(ctx: Context, fact: SubmitWorkflow) -> None:
    """Accepts jobs that depend on each other by name: all of them, or none."""
    order = dependencies.workflow_order(fact.steps)
    bad = order if isinstance(order, Reason) else None
    bad = bad or _too_large(fact, ctx.policy.queue.most_array)
    for step in fact.steps if bad is None else ():
        bad = bad or refusal(ctx, step.spec)
    if isinstance(order, Reason) or bad is not None:
        assert bad is not None
        ctx.emit((), Refuse(reason=bad, request=fact.request))
        return
    numbers: dict[str, int] = {}
    for index in order:
        step = fact.steps[index]
        after = tuple(Dependency(kind, numbers[name]) for kind, name in step.after)
        spec = structs.replace(step.spec, after=(*step.spec.after, *after))
        numbers[step.name] = create(ctx, spec)
    for step in fact.steps:
        told = Accept(reason=reason("accepted"), request=fact.request, job=numbers[step.name])
        ctx.emit((), told)


def _too_large(fact: SubmitWorkflow, most: int) -> Reason | None:
    """Why a workflow makes more jobs than one submission may."""
    count = sum(step.spec.array.count for step in fact.steps if step.spec.array)
    if count <= most:
        return None
    rule = f"the arrays of a workflow have at most {most} jobs together (policy: queue.most_array)"
    return reason("bad_field", key="array.count", value=str(count), rule=rule)


def create(ctx: Context, spec: JobSpec) -> int:
    """Makes the job, or all jobs of an array; returns the (first) number."""
    first = ctx.next_job
    count = spec.array.count if spec.array else 1
    width = spec.array_width
    waiting_for, never = dependencies.awaited(ctx, spec)
    for index in range(count):
        job = Job(
            id=ctx.next_job,
            spec=spec,
            submitted_ns=ctx.now_ns,
            eligible=False,
            array_parent=first if spec.array else 0,
            array_index=index,
            budget_gpu_seconds=spec.budget_gpu_seconds,
            forced=spec.forced,
            waiting_for=dict(waiting_for),
        )
        ctx.next_job += 1
        ctx.view.jobs[job.id] = job
        dependencies.remember(ctx, job)
        if never is not None:
            job.never, job.why = True, never
        elif index >= width:
            ctx.view.array_waiting.setdefault(first, {})[job.id] = None
            job.why = reason("array_width", width=width)
        elif waiting_for:
            job.why = dependencies.waiting(ctx, job)
        else:
            let_in(ctx, job)
    if never is not None:
        ctx.notify(never, job=first, level="warning")
    return first


def let_in(ctx: Context, job: Job) -> None:
    """Puts a job into the queue, unless its array is at its width or a person holds it."""
    if job.held:
        job.eligible, job.why = False, job.operator_hold or reason("held")
        return
    job.state = "pending"
    job.eligible = True
    job.queued_ns = ctx.now_ns
    job.why = reason("queued")
    ctx.view.pending[job.id] = None
    ctx.queue.on_pending(ctx.view, job)
    ctx.look_at_queue()


def start(ctx: Context, decision: Start) -> None:
    """The queue gave a job its nodes."""
    job, placement = ctx.view.jobs[decision.job], decision.placement
    del ctx.view.pending[job.id]
    ctx.view.active[job.id] = None
    job.placement = placement
    job.started_ns = ctx.now_ns
    job.waited_ns += ctx.now_ns - job.queued_ns
    job.gang = left_memory.taken_up(ctx, job)
    job.gang.rollback, job.gang.skip_step = job.rollback, job.skip_step
    left_memory.displace(ctx, job, placement.nodes + placement.spares)
    ctx.ledger.start(job, held_gpus(ctx, job), spare_gpus(ctx, placement), "start")
    if job.spec.time_limit_ns:
        left = max(0, job.spec.time_limit_ns - job.ran_ns)
        ctx.wake(ctx.now_ns + left, "time_limit", job.id, job.started_ns)
    form(ctx, job, decision.reason)


def held_gpus(ctx: Context, job: Job) -> int:
    """GPUs that a job's slots hold."""
    return ctx.fleet.job_gpus.get(job.id, 0)


def spare_gpus(ctx: Context, placement: Placement) -> int:
    """GPUs in the nodes that stand by for a placement."""
    return sum(ctx.fleet.nodes[node].gpus for node in placement.spares)


def drop_spare(ctx: Context, job: Job, node: int) -> None:
    """A job loses a node that stood by for it."""
    placement = job.placement
    assert placement is not None
    spares = tuple(other for other in placement.spares if other != node)
    job.placement = structs.replace(placement, spares=spares)
    account = ctx.ledger.accounts[job.id]
    ctx.ledger.resize(job.id, account.gpus, spare_gpus(ctx, job.placement))
    ctx.look_at_queue(capacity=True)


def release(ctx: Context, job: Job) -> None:
    """Takes all nodes back from a job."""
    placement = job.placement
    assert placement is not None
    ctx.ledger.stop(job.id)
    for node in placement.nodes:
        ctx.fleet.release(job.id, node)
    for node in placement.spares:
        if ctx.fleet.state(node) is NodeState.SPARE:
            ctx.fleet.set_state(node, NodeState.HEALTHY, ctx.now_ns, reason("job_left"))
    job.ran_ns += ctx.now_ns - job.started_ns
    job.placement = None
    job.rollback, job.skip_step = gang_of(job).rollback, gang_of(job).skip_step
    job.gang = None
    del ctx.view.active[job.id]
    storage.left(ctx, job.id)
    ctx.queue.on_stopped(ctx.view, job)
    ctx.look_at_queue(capacity=True)


def leave(
    ctx: Context, job: Job, state: JobState, why: Reason, *, keep_memory: bool = False
) -> None:
    """A job gives its nodes back at once and becomes ``state``; pending: it is queued again.

    ``keep_memory``: it did not want to, and may get the same nodes again soon.
    """
    assert job.placement is not None
    nodes = dict.fromkeys(job.placement.nodes + job.placement.spares + gang_of(job).leftover)
    stays = left_memory.keep(ctx, job) if keep_memory and state == "pending" else None
    if stays is not None:
        holders = tuple(node for node in nodes if node in stays.nodes and node not in stays.lost)
        nodes = dict.fromkeys(node for node in nodes if node not in holders)
        stop_on(ctx, job, holders, keep_snapshots=True)
        left_memory.stay(ctx, job, stays)
    elif state in ("pending", "failed"):
        tell_left(ctx, job, why_gone(ctx, job, why), again=state == "pending")
    stop_on(ctx, job, tuple(nodes), keep_snapshots=False)
    release(ctx, job)
    if state == "pending":
        if why.code == "time_limit":
            # The next allocation has the whole limit again, and is waited for like the first.
            job.ran_ns = job.waited_ns = 0
        job.state = "pending"
        let_in(ctx, job)
        job.why = job.why if job.held else why
    else:
        end(ctx, job, state, why)


def end(ctx: Context, job: Job, state: JobState, why: Reason) -> None:
    """The end of a job that holds nothing any more; lets in those that waited for it."""
    if job.id in ctx.view.pending:
        withdraw(ctx, job)
    job.state, job.why, job.eligible = state, why, False
    left_memory.give_up(ctx, job, why)
    job.ended_ns = ctx.now_ns
    dependencies.withdrawn(ctx, job)
    level: Level = "error" if state == "failed" else "info"
    ctx.notify(why, job=job.id, level=level)
    for other in dependencies.ended(ctx, job):
        if not blocked(ctx, other):
            let_in(ctx, other)
    next_of_array(ctx, job)
    forget_oldest(ctx, job)


def withdraw(ctx: Context, job: Job) -> None:
    """Takes a job out of the queue: what it was promised is for others."""
    del ctx.view.pending[job.id]
    ctx.queue.on_withdrawn(ctx.view, job)
    ctx.look_at_queue(capacity=True)


def forget_oldest(ctx: Context, job: Job) -> None:
    """Keeps the number of ended jobs in memory within its limit."""
    ctx.ended[job.id] = None
    while len(ctx.ended) > ctx.policy.ended_jobs:
        oldest = next(iter(ctx.ended))
        del ctx.ended[oldest], ctx.view.jobs[oldest]
        ctx.ledger.retire(oldest)


def next_of_array(ctx: Context, job: Job) -> None:
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


def cancel(ctx: Context, fact: Cancel) -> None:
    """Ends a job at once."""
    job = known(ctx, fact.job, fact.request)
    if job is None:
        return
    if job.placement is not None:
        leave(ctx, job, "cancelled", reason("cancelled"))
    else:
        end(ctx, job, "cancelled", reason("cancelled"))
    ctx.emit((), Accept(reason=reason("cancelled"), request=fact.request, job=job.id))


def requeue(ctx: Context, fact: Requeue) -> None:
    """Stops a job with a snapshot and puts it back into the queue, or keeps it out of it."""
    job = known(ctx, fact.job, fact.request)
    if job is None:
        return
    if _refused_as_ending(ctx, job, fact.request):
        return
    if fact.hold and job.state in ("pending", "draining"):
        hold(ctx, Hold(job=job.id, request=fact.request, operator=fact.operator))
        return
    if job.placement is None or job.state == "draining":
        why = reason("not_running", job=job.id, state=job.state)
        ctx.emit((), Refuse(reason=why, request=fact.request, job=job.id))
        return
    job.held = fact.hold
    job.operator_hold = reason("held") if fact.hold and fact.operator else None
    told = reason("drained" if fact.hold else "requeued")
    depart_safely(ctx, job, "pending", told)
    ctx.emit((), Accept(reason=told, request=fact.request, job=job.id))


def _refused_as_ending(ctx: Context, job: Job, request: str) -> bool:
    """Whether a job ends for good as soon as its state is safe: too late to keep it."""
    gang = job.gang
    if gang is None or gang.ending is None or gang.ending == "pending":
        return False
    why = reason("leaving", job=job.id, why=str(gang.ending_why))
    ctx.emit((), Refuse(reason=why, request=request, job=job.id))
    return True


def depart_safely(ctx: Context, job: Job, ending: JobState, why: Reason, *, by_ns: int = 0) -> None:
    """Makes a job leave its nodes; steps that are in memory alone are written first.

    A gang that forms just now does so, if it can, and is drained then: see ``on_ready``.
    ``by_ns``: when it must be gone; 0: it takes the time that it needs.
    """
    gang = gang_of(job)
    if gang.ending is not None:
        ending, why = gang.ending, gang.ending_why
    sooner = by_ns and (not gang.leave_by_ns or by_ns < gang.leave_by_ns)
    if sooner:
        gang.leave_by_ns = by_ns
    if gang.phase == "running":
        drain(ctx, job, drain_limit_ns(ctx, job, why), ending, why)
    elif gang.phase == "draining":
        if sooner and by_ns < gang.deadline_ns:
            hurry(ctx, job, max(1, by_ns - ctx.now_ns))
    elif unsaved(job):
        gang.ending, gang.ending_why = ending, why
        if sooner:
            ctx.wake(by_ns, "leave_by", job.id, job.started_ns)
    else:
        leave(ctx, job, ending, why)


def drain_limit_ns(ctx: Context, job: Job, why: Reason) -> int:
    """How long a gang may take to save its state and go."""
    by_ns, usual = gang_of(job).leave_by_ns, timeouts_of(ctx, job).drain_ns
    if not by_ns:
        return usual
    left = max(1, by_ns - ctx.now_ns)
    return left if why.code in FOR_OTHERS else min(left, max(usual, ctx.policy.queue.grace_ns))


def must_be_gone(ctx: Context, job: Job) -> None:
    """The time is over that a gang had to form and save its state before it leaves."""
    gang = gang_of(job)
    if gang.ending is not None and gang.phase != "draining" and ctx.now_ns >= gang.leave_by_ns > 0:
        leave(ctx, job, gang.ending, gang.ending_why, keep_memory=True)


def give_way(ctx: Context, job: Job, grace_ns: int, why: Reason) -> None:
    """A job leaves for others within its grace; one that leaves already may have to be quicker."""
    job.preemptions += gang_of(job).ending is None
    depart_safely(ctx, job, "pending", why, by_ns=ctx.now_ns + grace_ns)


def hold(ctx: Context, fact: Hold) -> None:
    """Keeps a job out of the queue, or lets it in again; one that drains stays out afterwards."""
    job = known(ctx, fact.job, fact.request)
    if job is None:
        return
    if job.state not in ("pending", "draining"):
        why = reason("not_pending", job=job.id, state=job.state)
        ctx.emit((), Refuse(reason=why, request=fact.request, job=job.id))
        return
    if fact.held and _refused_as_ending(ctx, job, fact.request):
        return
    if not fact.held and job.operator_hold is not None and not fact.operator:
        why = reason("operator_holds", job=job.id, why=str(job.operator_hold))
        ctx.emit((), Refuse(reason=why, request=fact.request, job=job.id))
        return
    if fact.operator:
        job.operator_hold = reason("held") if fact.held else None
    changed, job.held = job.held != fact.held, fact.held
    if changed and fact.held and job.id in ctx.view.pending:
        keep_out(ctx, job)
    elif changed and not fact.held and job.state == "pending" and not blocked(ctx, job):
        let_in(ctx, job)
    ctx.emit((), Accept(reason=reason("accepted"), request=fact.request, job=job.id))


def keep_out(ctx: Context, job: Job) -> None:
    """Takes a job that is held out of the queue."""
    job.eligible = False
    job.waited_ns += ctx.now_ns - job.queued_ns
    withdraw(ctx, job)
    job.why = job.operator_hold or reason("held")


def blocked(ctx: Context, job: Job) -> bool:
    """Whether something other than a person keeps a job out of the queue."""
    in_array = job.id in ctx.view.array_waiting.get(job.array_parent, ())
    return job.never or bool(job.waiting_for) or in_array


def known(ctx: Context, number: int, request: str) -> Job | None:
    """A job that has not ended; otherwise the request is refused."""
    job = ctx.view.jobs.get(number)
    if job is not None and not job.ended:
        return job
    if job is None:
        why = reason("no_such_job", job=number)
    else:
        why = reason("job_ended", job=number, state=job.state)
    ctx.emit((), Refuse(reason=why, request=request, job=number))
    return None


def time_limit(ctx: Context, job: Job) -> None:
    """A job's time is over: it makes a checkpoint and leaves."""
    limit = job.spec.time_limit_ns
    why = reason("time_limit", seconds=limit // 10**9, step=job.step)
    ending: JobState = "pending" if job.spec.requeue_at_limit else "failed"
    assert job.placement is not None
    spare_ns, end_ns = leave_ns(ctx.view, job), job.started_ns + max(0, limit - job.ran_ns)
    due_ns = ctx.queue.promises.first_start_ns(job.placement.nodes)
    if gang_of(job).ending is None:
        promised = due_ns is not None and due_ns < ctx.now_ns + 2 * spare_ns
        depart_safely(ctx, job, ending, why, by_ns=ctx.now_ns + spare_ns if promised else 0)
        if job.gang is None:
            return  # nothing had to be saved
        ctx.wake(end_ns + spare_ns, "time_limit", job.id, job.started_ns)
    elif gang_of(job).phase != "draining" and due_ns is not None and ctx.now_ns > end_ns:
        # It forms only to save what it has in memory, and others were promised its nodes.
        leave(ctx, job, ending, why)
