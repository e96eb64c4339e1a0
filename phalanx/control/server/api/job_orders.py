"""Orders about jobs that are known. A reason that comes along is a note of the job's run."""

from __future__ import annotations

import time
from functools import partial

from phalanx.cluster.protocol.events import Cancel, EventBody, Hold, RaiseBudget, Requeue, Scale
from phalanx.control.server.api.plan import ReplanIn, asked_change
from phalanx.control.server.http.endpoints import WRITERS, Call, Endpoints
from phalanx.control.server.http.job_rights import budget_seconds, may_change_budget
from phalanx.control.server.http.replanned_job import carry_out, needs_replan, wanted_replicas
from phalanx.control.wire import api_types as t
from phalanx.observe.tracker.runs import MOST_NOTES, Note
from phalanx.plan.search.what_if import JobChange

ENDPOINTS = Endpoints()
_job = partial(ENDPOINTS.add, roles=WRITERS, params=t.JobPath, audited=True)
_order = partial(_job, body=t.OrderWhy, optional_body=True)


async def _done(call: Call, order: EventBody, verb: str) -> t.Done:
    """Has something ordered, and its reason noted with the run."""
    job = call.job()
    return _noted(call, job.id, verb, await call.order(order))


def _noted(call: Call, number: int, verb: str, done: t.Done) -> t.Done:
    job = call.leading.core.view.jobs.get(number)
    if call.body.why and job is not None:
        run = call.leading.run_history.run_of(job)
        text = f"{verb}: {call.body.why}"
        note = Note(time=time.time(), text=text, by=call.token.name)
        run.notes = [*run.notes[1 - MOST_NOTES :], note]
        call.leading.run_history.change(number, run)
    return done


@_order("POST /v1/jobs/{job}/cancel")
async def cancel_job(call: Call) -> t.Done:
    """End a job.

    A program that runs gets SIGTERM and a grace; cancelled again it ends at once, like others.
    """
    return await _done(call, Cancel(job=call.job().id), "cancelled")


@_order("POST /v1/jobs/{job}/requeue")
async def requeue_job(call: Call) -> t.Done:
    """Stop a job with a checkpoint and queue it again."""
    return await _done(call, Requeue(job=call.job().id), "requeued")


@_order("POST /v1/jobs/{job}/drain")
async def drain_job(call: Call) -> t.Done:
    """Stop a job with a checkpoint and hold it.

    It waits until it is released.
    """
    order = Requeue(job=call.job().id, hold=True, operator=call.operator)
    return await _done(call, order, "drained")


@_order("POST /v1/jobs/{job}/hold")
async def hold_job(call: Call) -> t.Done:
    """Keep a pending job out of the queue."""
    order = Hold(job=call.job().id, held=True, operator=call.operator)
    return await _done(call, order, "held")


@_order("POST /v1/jobs/{job}/release")
async def release_job(call: Call) -> t.Done:
    """Let a held job into the queue."""
    order = Hold(job=call.job().id, held=False, operator=call.operator)
    return await _done(call, order, "released")


@_order("POST /v1/arrays/{job}/cancel")
async def cancel_array(call: Call) -> t.Done:
    """End all jobs of an array, which any of them names."""
    return await _done(call, Cancel(job=call.job().id, array=True), "array cancelled")


@_order("POST /v1/arrays/{job}/hold")
async def hold_array(call: Call) -> t.Done:
    """Keep the pending jobs of an array out of the queue."""
    order = Hold(job=call.job().id, held=True, operator=call.operator, array=True)
    return await _done(call, order, "array held")


@_order("POST /v1/arrays/{job}/release")
async def release_array(call: Call) -> t.Done:
    """Let the held jobs of an array into the queue."""
    order = Hold(job=call.job().id, held=False, operator=call.operator, array=True)
    return await _done(call, order, "array released")


@_job("POST /v1/jobs/{job}/scale", body=t.Replicas)
async def scale_job(call: Call) -> t.Done:
    """Give a job another number of replicas.

    An elastic one changes while it runs; another one saves its state and goes on with them.
    """
    job = call.job()
    replicas = wanted_replicas(job, call.body)
    if not needs_replan(job, replicas):
        return await _done(call, Scale(job=job.id, replicas=replicas), f"scaled to {replicas}")
    change = JobChange(gpus=job.spec.gang.ranks(replicas))
    return _noted(call, job.id, f"scaled to {replicas}", await carry_out(call, change))


@_job("POST /v1/jobs/{job}/replan", body=ReplanIn)
async def replan(call: Call) -> t.Done:
    """Change the mapping of a job at a step boundary; refuse one that cannot run."""
    done = await carry_out(call, asked_change(call.body))
    return _noted(call, call.job().id, "replanned", done)


@_job("POST /v1/jobs/{job}/budget", body=t.Budget)
async def budget_job(call: Call) -> t.Done:
    """Give a job another budget."""
    job, seconds = call.job(), budget_seconds(call, call.body)
    may_change_budget(call, job, seconds, forced=call.body.forced)
    order = RaiseBudget(job=job.id, budget_gpu_seconds=seconds, forced=call.body.forced)
    return await call.order(order)
