"""Endpoints of sweeps, all of which is known from their jobs; and what a job would take."""

from __future__ import annotations

from collections import Counter

from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.control.server.http.endpoints import EVERYBODY, WRITERS, ApiError, Call, Endpoints
from phalanx.control.server.http.job_rights import rightful
from phalanx.control.server.http.planned_job import cost_estimate
from phalanx.control.wire import api_types as t

MOST_LOOKED_FOR = 500  # values that one answer waits for

ENDPOINTS = Endpoints()


class SweepQuery(t.In, frozen=True):
    after: t.Number = 0  # jobs with higher numbers
    limit: t.Limit = 1000


@ENDPOINTS.add("GET /v1/sweeps", EVERYBODY)
async def list_sweeps(call: Call) -> t.SweepList:
    """List sweeps, the newest last."""
    sweeps: dict[str, list[ClusterJob]] = {}
    for job in _trials(call):
        assert job.spec.trial is not None
        sweeps.setdefault(job.spec.trial.sweep, []).append(job)
    await _find_values(call, [job for jobs in sweeps.values() for job in jobs])
    return t.SweepList(sweeps=[_line(call, name, jobs) for name, jobs in sweeps.items()])


@ENDPOINTS.add("GET /v1/sweeps/{name}", EVERYBODY, params=t.NamePath, query=SweepQuery)
async def show_sweep(call: Call) -> t.SweepOut:
    """Show a sweep's trials, an entry for each job of theirs.

    In the order of their jobs.
    """
    name, query = call.path.name, call.query
    jobs = [job for job in _trials(call) if job.spec.trial and job.spec.trial.sweep == name]
    if not jobs:
        raise ApiError(404, t.RefusalCode.NO_SUCH_SWEEP, f"no job of a sweep {name} is known here")
    rest = [job for job in jobs if job.id > query.after]
    shown = rest[: query.limit]
    await _find_values(call, shown)
    first = jobs[0].spec.trial
    assert first is not None
    return t.SweepOut(
        sweep=name,
        metric=first.metric,
        better=first.better,
        trials=[_trial(call, job) for job in shown],
        next_after=shown[-1].id if len(rest) > len(shown) else 0,
    )


@ENDPOINTS.add("POST /v1/estimates", WRITERS, body=t.Submission)
async def estimate_job(call: Call) -> t.JobEstimate:
    """Estimate the time and cost of a job; nothing is submitted."""
    spec, _ = await rightful(call, call.body.spec, call.body.work)
    price = call.leading.core.view.policy.price
    return t.JobEstimate(
        plan=spec.plan,
        estimate=cost_estimate(price, [spec]),
        dollars_per_gpu_hour=price.micro_dollars_per_gpu_hour / 1e6,
    )


def _trials(call: Call) -> list[ClusterJob]:
    jobs = call.leading.core.view.jobs.values()
    return [job for job in jobs if job.spec.trial is not None and call.sees(job.spec.team)]


async def _find_values(call: Call, jobs: list[ClusterJob]) -> None:
    """Those that are not known yet, some at a time: the next answer has more of them."""
    values, history = call.server.trial_values, call.leading.run_history
    unknown = [job for job in jobs if values.unknown(job)][:MOST_LOOKED_FOR]
    if unknown:
        now_ns = call.leading.controller.clock.now_ns()
        told = [(job, history.summary_of(job.id)) for job in unknown]
        await call.server.read(values.find, told, now_ns)


def _trial(call: Call, job: ClusterJob) -> t.TrialOut:
    trial, view = job.spec.trial, call.leading.core.view
    assert trial is not None
    running_ns = max(0, call.leading.controller.clock.now_ns() - job.started_ns)
    replicas = job.placement.replicas if job.placement else job.wanted_replicas
    shape = job.spec.gang
    return t.TrialOut(
        job=job.id,
        trial=trial.number,
        rung=trial.rung,
        steps=trial.steps,
        settings=trial.settings,
        state=job.state,
        why=str(job.why),
        step=job.step,
        value=call.server.trial_values.of(job),
        value_unknown=call.server.trial_values.unknown(job),
        ran_seconds=(job.ran_ns + (running_ns if job.placement else 0)) / 1e9,
        gpus=shape.gpus(replicas),
        ranks=shape.ranks(replicas),
        dollars_per_gpu_hour=view.policy.price.micro_dollars_per_gpu_hour / 1e6,
    )


def _line(call: Call, name: str, jobs: list[ClusterJob]) -> t.SweepLine:
    first = jobs[0].spec.trial
    assert first is not None
    # Of the furthest rung: values of shorter runs are no match for them.
    last = max(job.spec.trial.rung for job in jobs if job.spec.trial is not None)
    matching = [
        value
        for job in jobs
        if job.spec.trial is not None and job.spec.trial.rung == last
        if (value := call.server.trial_values.of(job)) is not None
    ]
    best = min if first.better == "lower" else max
    states = Counter[str](job.state for job in jobs)
    return t.SweepLine(
        sweep=name,
        user=jobs[0].spec.user,
        team=jobs[0].spec.team,
        metric=first.metric,
        better=first.better,
        trials=len({job.spec.trial.number for job in jobs if job.spec.trial is not None}),
        live=sum(not job.ended for job in jobs),
        failed=states[JobState.FAILED],
        best=best(matching) if matching else None,
        began_ns=jobs[0].submitted_ns,
    )
