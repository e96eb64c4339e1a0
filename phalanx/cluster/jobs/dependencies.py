"""Jobs that belong together: who waits for whom, the width of arrays, trials of sweeps."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cluster.context import Context
from phalanx.cluster.jobs.job import ClusterJob, JobSpec, JobState
from phalanx.cluster.protocol.events import Step
from phalanx.cluster.reasons import Code, Reason, reason

MOST_AWAITED = 200_000  # pairs of a job and one that it waits for, of one submission
MOST_AWAITED_OF_USER = 500_000  # of all jobs of a user
SHOWN_STEPS = 20  # of a circle


class Awaits(Code):
    """What a job with dependencies waits for."""

    OTHERS = "dependency"
    STUCK = "dependency_stuck"  # one that can never start


def trial_of(spec: JobSpec) -> tuple[str, str, int, int] | None:
    """Whose sweep, which one, which trial and rung a job is; None: of no sweep."""
    trial = spec.trial
    return (spec.team, trial.sweep, trial.number, trial.rung) if trial is not None else None


def same_trial(ctx: Context, spec: JobSpec) -> int:
    """The job that is this trial already, and that need not be made again; 0: there is none.

    Whoever drives a sweep may be killed after a submission, or be there twice: each trial is one.
    """
    key = trial_of(spec)
    job = ctx.view.jobs.get(ctx.trials.get(key, 0)) if key is not None else None
    again = job is None or job.state in (JobState.FAILED, JobState.CANCELLED)
    return 0 if job is None or again else job.id


def remember_trial(ctx: Context, job: ClusterJob) -> None:
    """Keeps in mind which trial a job is; the newest job counts."""
    key = trial_of(job.spec)
    if key is not None:
        ctx.trials[key] = job.id


def forget_trial(ctx: Context, job: ClusterJob) -> None:
    """A job is forgotten."""
    key = trial_of(job.spec)
    if key is not None and ctx.trials.get(key) == job.id:
        del ctx.trials[key]


def awaited(ctx: Context, spec: JobSpec) -> tuple[dict[int, None], Reason | None]:
    """Jobs that a submission must wait for, and why it can never be satisfied, if so."""
    jobs: dict[int, None] = {}
    never = None
    for dependency in dict.fromkeys(spec.after):  # one of an array is thousands to look at
        if dependency.kind == "singleton":
            jobs.update(dict.fromkeys(ctx.namesakes.get((spec.name, spec.user), {})))
            continue
        for job in members(ctx, dependency.job):
            if not job.ended:
                jobs[job.id] = None
            if dependency.kind == "afterok" and (
                job.never or job.state in (JobState.FAILED, JobState.CANCELLED)
            ):
                never = _never(job)
        if dependency.kind == "afternotok" and _all_succeeded(ctx, dependency.job):
            never = reason("dependency_never_fails", job=dependency.job)
    return jobs, never


def _all_succeeded(ctx: Context, number: int) -> bool:
    """Whether a job, or all jobs of the array that it is the first of, did what they should."""
    return all(job.state == JobState.DONE for job in reversed(members(ctx, number)))


def _never(job: ClusterJob) -> Reason:
    """Why a job that needs the success of another one can never start."""
    state = job.state if job.ended else "can itself never start"
    return reason("dependency_never", job=job.id, state=state)


def give_up(ctx: Context, job: ClusterJob, why: Reason) -> None:
    """A job can never start; those that need its success cannot either, and are told."""
    lost = [(job, why)]
    job.never = True
    for lost_job, told in lost:  # a chain may be long: no recursion
        lost_job.why = told
        ctx.notify(told, job=lost_job.id, level="warning")
        for number in ctx.dependants.get(lost_job.id, {}):
            other = ctx.view.jobs[number]
            if other.ended or other.never:
                continue
            if _wants_success(ctx, other, lost_job):
                other.never = True  # at once: many may lead to it
                lost.append((other, _never(lost_job)))
            else:
                other.why = Awaits.STUCK.because(job=lost_job.id)


def members(ctx: Context, number: int) -> list[ClusterJob]:
    """A job, or all jobs of the array that it is the first of."""
    job = ctx.view.jobs.get(number)
    if job is None:
        return []  # it ended long ago, and is forgotten
    if job.array_parent != number or job.spec.array is None:
        return [job]
    jobs = (ctx.view.jobs.get(number + index) for index in range(job.spec.array.count))
    return [member for member in jobs if member is not None]


def refused(ctx: Context, spec: JobSpec) -> Reason | None:
    """Why the dependencies of a submission make no sense."""
    for dependency in spec.after:
        if dependency.kind != "singleton" and dependency.job not in ctx.view.jobs:
            return reason("unknown_dependency", job=dependency.job)
    jobs, others = spec.array.count if spec.array else 1, len(awaited(ctx, spec)[0])
    of_user = ctx.awaited_of.get(spec.user, 0)
    if jobs * others > MOST_AWAITED:
        return reason("awaits_too_many", jobs=jobs, others=others, most=MOST_AWAITED)
    if of_user and of_user + jobs * others > MOST_AWAITED_OF_USER:
        return reason("user_awaits_too_many", pairs=of_user, most=MOST_AWAITED_OF_USER)
    return None


def remember(ctx: Context, job: ClusterJob) -> None:
    """Files a job that has not ended under what it waits for and under its name."""
    for number in job.waiting_for:
        ctx.dependants.setdefault(number, {})[job.id] = None
    _count(ctx, job, len(job.waiting_for))
    ctx.namesakes.setdefault((job.spec.name, job.spec.user), {})[job.id] = None


def _count(ctx: Context, job: ClusterJob, pairs: int) -> None:
    """So many more others are waited for by a job of its user."""
    user = job.spec.user
    pairs += ctx.awaited_of.pop(user, 0)
    if pairs:
        ctx.awaited_of[user] = pairs


def withdrawn(ctx: Context, job: ClusterJob) -> None:
    """A job waits for nobody any more: those it waited for need not know of it."""
    _count(ctx, job, -len(job.waiting_for))
    ctx.after_kinds.pop(job.id, None)
    for number in job.waiting_for:
        others = ctx.dependants[number]
        del others[job.id]
        if not others:
            del ctx.dependants[number]
    job.waiting_for = {}


def ended(ctx: Context, job: ClusterJob) -> list[ClusterJob]:
    """A job has ended. Returns those that wait for nothing any more because of it."""
    key = (job.spec.name, job.spec.user)
    ctx.namesakes[key].pop(job.id, None)
    if not ctx.namesakes[key]:
        del ctx.namesakes[key]
    freed = []
    for number in ctx.dependants.pop(job.id, {}):
        other = ctx.view.jobs[number]
        if job.id in other.waiting_for:
            del other.waiting_for[job.id]
            _count(ctx, other, -1)
        if not (other.ended or other.never):
            if job.state != JobState.DONE and _wants_success(ctx, other, job):
                give_up(ctx, other, _never(job))
            elif (never := _awaits_failure(ctx, other, job)) is not None:
                give_up(ctx, other, never)
            elif not other.waiting_for:
                freed.append(other)
            else:
                other.why = _still_waiting(ctx, other)
        if not other.waiting_for:
            ctx.after_kinds.pop(number, None)
    return freed


def waiting(ctx: Context, job: ClusterJob) -> Reason:
    """What a job with dependencies waits for; one that can never start itself is named first."""
    for number in job.waiting_for:
        if ctx.view.jobs[number].never:
            return Awaits.STUCK.because(job=number)
    return Awaits.OTHERS.because(count=len(job.waiting_for), job=next(iter(job.waiting_for)))


def _still_waiting(ctx: Context, job: ClusterJob) -> Reason:
    """The same when one of thousands has ended: the others are not gone through again."""
    if Awaits.of(job.why) is Awaits.STUCK and job.why.facts["job"] in job.waiting_for:
        return job.why
    first = next(iter(job.waiting_for))
    if ctx.view.jobs[first].never:
        return Awaits.STUCK.because(job=first)
    return Awaits.OTHERS.because(count=len(job.waiting_for), job=first)


def workflow_order(steps: Sequence[Step]) -> list[int] | Reason:
    """An order in which named jobs can be submitted, or what is wrong with their names."""
    if not steps:
        return reason("no_steps")
    index: dict[str, int] = {}
    for number, step in enumerate(steps):
        if step.name in index:
            return reason("named_twice", job=step.name)
        index[step.name] = number
    for step in steps:
        for _, name in step.after:
            if name not in index:
                return reason("unknown_step", job=step.name, missing=name)
    followers: dict[int, list[int]] = {}
    missing = [len(step.after) for step in steps]  # that it waits for, and that are not done
    for number, step in enumerate(steps):
        for _, name in step.after:
            followers.setdefault(index[name], []).append(number)
    done: dict[int, None] = {}
    ready = [number for number, count in enumerate(missing) if not count]
    while ready:
        done.update(dict.fromkeys(ready))
        freed: list[int] = []
        for number in ready:
            for other in followers.get(number, ()):
                missing[other] -= 1
                if not missing[other]:
                    freed.append(other)
        ready = sorted(freed)
    if len(done) < len(steps):
        return reason("cycle", cycle=" -> ".join(_cycle(steps, index, done)))
    return list(done)


def _awaits_failure(ctx: Context, other: ClusterJob, job: ClusterJob) -> Reason | None:
    """Why a job can never start that one which succeeded should have failed for; None: it can."""
    if job.state != JobState.DONE:
        return None
    for number in dict.fromkeys((job.id, job.array_parent or job.id)):
        if "afternotok" in _kinds(ctx, other).get(number, ()) and _all_succeeded(ctx, number):
            return reason("dependency_never_fails", job=number)
    return None


def _wants_success(ctx: Context, other: ClusterJob, job: ClusterJob) -> bool:
    kinds = _kinds(ctx, other)
    return any("afterok" in kinds.get(n, ()) for n in (job.id, job.array_parent or job.id))


def _kinds(ctx: Context, job: ClusterJob) -> dict[int, list[str]]:
    """How a job waits for others, by their numbers: asked at the end of each of thousands."""
    kinds = ctx.after_kinds.get(job.id)
    if kinds is None:
        kinds = ctx.after_kinds[job.id] = {}
        for dependency in job.spec.after:
            kinds.setdefault(dependency.job, []).append(dependency.kind)
    return kinds


def _cycle(steps: Sequence[Step], index: dict[str, int], done: dict[int, None]) -> list[str]:
    """The names around one circle: every job that is left waits for another one that is left."""
    name = next(step.name for number, step in enumerate(steps) if number not in done)
    met: dict[str, None] = {}
    while name not in met:
        met[name] = None
        step = steps[index[name]]
        name = next(other for _, other in step.after if index[other] not in done)
    path = list(met)
    circle = [*path[path.index(name) :], name]
    return circle if len(circle) <= SHOWN_STEPS else [*circle[:SHOWN_STEPS], "...", name]
