"""Submissions: one job, an array, or a workflow; accepted as jobs, or refused with a reason."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.jobs import dependencies
from phalanx.cluster.jobs.admission import refusal
from phalanx.cluster.jobs.job import Dependency, Job, JobSpec
from phalanx.cluster.jobs.lifecycle import let_in
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import Submit, SubmitWorkflow
from phalanx.cluster.reasons import Reason, reason


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
    if spec.plan is not None and spec.plan.problem:
        ctx.notify(reason("not_planned", problem=spec.plan.problem), job=first)
    return first
