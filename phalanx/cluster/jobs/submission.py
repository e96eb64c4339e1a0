"""Submissions: one job, an array, or a workflow; accepted as jobs, or refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.gang import fence
from phalanx.cluster.job_relations import Array, Dependency, SweepTrial
from phalanx.cluster.jobs import dependencies
from phalanx.cluster.jobs.feasibility import admit, latest_start_ns, out_of_time
from phalanx.cluster.jobs.job import (
    LONGEST_NS,
    MOST_PRIORITY,
    ClusterJob,
    Expected,
    GangShape,
    JobSpec,
)
from phalanx.cluster.jobs.lifecycle import becomes_eligible
from phalanx.cluster.placement.constraints import parse, unknown
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import Submit, SubmitWorkflow
from phalanx.cluster.protocol.timeouts import derive
from phalanx.cluster.reasons import Reason, in_gpu_hours, reason
from phalanx.cluster.units import SECOND_NS
from phalanx.config import ConfigError
from phalanx.config.rules.text import name_problems

MOST_WORD = 128  # characters of a name of somebody or something
MOST_AFTER = 1_000
MOST_TRAFFIC = 64
MOST_INDEX = 10**9
MOST_SETTINGS = 64  # of a trial, each with its key and value
SIZES = (
    *("time_limit_ns", "time_min_ns", "retries", "budget_gpu_seconds", "spares"),
    *("begin_ns", "deadline_ns"),
)


def submit(ctx: Context, fact: Submit) -> None:
    """Accepts a job or an array of them, or says why not."""
    why = refusal(ctx, fact.spec)
    if why is not None:
        ctx.emit((), Refuse(reason=why, request=fact.request))
        return
    same = dependencies.same_trial(ctx, fact.spec)
    if same:
        why = reason("same_trial", job=same)
        ctx.emit((), Accept(reason=why, request=fact.request, job=same))
        return
    first = create(ctx, fact.spec)
    ctx.emit((), Accept(reason=reason("accepted"), request=fact.request, job=first))


def submit_workflow(ctx: Context, fact: SubmitWorkflow) -> None:
    """Accepts jobs that depend on each other by name: all of them, or none."""
    order = dependencies.workflow_order(fact.steps)
    bad = order if isinstance(order, Reason) else None
    bad = bad or _too_large(fact, ctx.policy.queue.most_array)
    before: dict[str, int] = {}  # jobs of the steps so far, by user
    for step in fact.steps if bad is None else ():
        bad = bad or refusal(ctx, step.spec, before)
        user = step.spec.user
        before[user] = before.get(user, 0) + _count(step.spec)
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
    spec = structs.replace(spec, after=tuple(dict.fromkeys(spec.after)))
    count, width = _count(spec), spec.array_width
    waiting_for, never = dependencies.awaited(ctx, spec)
    follows, queued = fence.predecessor(ctx, spec), list[ClusterJob]()
    for index in range(count):
        job = ClusterJob(
            id=ctx.next_job,
            spec=spec,
            submitted_ns=ctx.now_ns,
            eligible=False,
            array_parent=first if spec.array else 0,
            array_index=index,
            budget_gpu_seconds=spec.budget_gpu_seconds,
            forced=spec.forced,
            held=spec.held,
            waiting_for=dict(waiting_for),
            follows=follows,
        )
        ctx.next_job += 1
        ctx.view.jobs[job.id] = job
        dependencies.remember(ctx, job)
        dependencies.remember_trial(ctx, job)
        if spec.deadline_ns:
            ctx.wake(latest_start_ns(spec), "deadline", job.id)
        if never is not None:
            job.never, job.why = True, never
        elif index >= width:
            ctx.view.array_waiting.setdefault(first, {})[job.id] = None
            job.why = reason("array_width", width=width)
        elif waiting_for:
            job.why = dependencies.waiting(ctx, job)
        elif becomes_eligible(ctx, job):
            queued.append(job)
    if queued:
        ctx.queue.on_pending(ctx.view, *queued)
    if never is not None:
        ctx.notify(never, job=first, level="warning")
    if spec.plan is not None and spec.plan.problem:
        ctx.notify(reason("not_planned", problem=spec.plan.problem), job=first)
    return first


def refusal(ctx: Context, spec: JobSpec, before: Mapping[str, int] = {}) -> Reason | None:
    """Why a submission is refused; None: it is accepted.

    ``before``: jobs by user that are accepted together with it.
    """
    return (
        senseless(ctx, spec)
        or _too_many_jobs(ctx, spec, before)
        or dependencies.refused(ctx, spec)
        or _over_budget(spec)
        or out_of_time(spec, ctx.now_ns)
        or admit(ctx.view, spec)
    )


def senseless(ctx: Context, spec: JobSpec) -> Reason | None:
    """What is wrong with a submission whatever else there is on the site; None: nothing."""
    for key, value, rule in _bad_fields(spec, ctx.policy.queue.most_array):
        return reason("bad_field", key=key, value=str(value), rule=rule)
    try:
        constraint = parse(spec.constraint)
        derive(ctx.policy.timeouts, spec.expected)
    except ConfigError as error:
        return reason("bad_constraint", problem=str(error))
    if not constraint:
        return None
    known = sorted({feature for kind in ctx.fleet.classes for feature in kind.features})
    missing = unknown(constraint, known)
    if missing:
        return reason("unknown_feature", features=", ".join(missing))
    return None


def _bad_fields(spec: JobSpec, most_array: int) -> Iterator[tuple[str, object, str]]:
    yield from _bad_words(spec)
    yield from _bad_gang(spec.gang)
    yield from _bad_times(spec)
    yield from _bad_steps(spec.expected)
    yield from _bad_fallbacks(spec)
    if abs(spec.priority) > MOST_PRIORITY:
        yield "priority", spec.priority, f"must be within +-{MOST_PRIORITY}"
    for name in SIZES:
        if getattr(spec, name) < 0:
            yield name, getattr(spec, name), "must not be negative"
    if spec.array is not None:
        yield from _bad_array(spec.array, most_array)
    if spec.trial is not None:
        yield from _bad_trial(spec.trial)
        if spec.array is not None:
            yield "array", spec.array.count, "a trial of a sweep is one job"


def _bad_words(spec: JobSpec) -> Iterator[tuple[str, object, str]]:
    for wrong in name_problems("name", spec.name):
        yield wrong.key, wrong.value, f"{wrong.rule} ({wrong.fix})"
    for name in ("user", "team", "project", "partition", "qos"):
        word = getattr(spec, name)
        if len(word) > MOST_WORD or not word.isprintable():
            rule = f"must be printable, and have at most {MOST_WORD} characters"
            yield name, ascii(word[:MOST_WORD]), rule
    for name, most in (("after", MOST_AFTER), ("gang.traffic", MOST_TRAFFIC)):
        count = len(spec.after if name == "after" else spec.gang.traffic)
        if count > most:
            yield name, count, f"must have at most {most} entries"


def _bad_gang(shape: GangShape) -> Iterator[tuple[str, object, str]]:
    for name in ("replicas", "tensor", "context", "pipeline"):
        if getattr(shape, name) < 1:
            yield f"gang.{name}", getattr(shape, name), "must be at least 1"
    for name in ("least_replicas", "most_replicas", "slot_gpus", "slot_cpus", "slot_memory_bytes"):
        if getattr(shape, name) < 0:
            yield f"gang.{name}", getattr(shape, name), "must not be negative"
    if shape.least_replicas > shape.replicas:
        yield "gang.least_replicas", shape.least_replicas, "must not be above gang.replicas"
    if 0 < shape.most_replicas < shape.replicas:
        yield "gang.most_replicas", shape.most_replicas, "must not be below gang.replicas"


def _bad_times(spec: JobSpec) -> Iterator[tuple[str, object, str]]:
    for name, value in structs.asdict(spec.expected).items():
        if value < 0:
            yield f"expected.{name}", value, "must not be negative"
    for name, value in structs.asdict(spec.timeouts).items():
        if value < 0:
            yield f"timeouts.{name}", value, "must not be negative (0: as the policy says)"
    for prefix, part in (("expected.", spec.expected), ("timeouts.", spec.timeouts)):
        for name, value in structs.asdict(part).items():
            if value > LONGEST_NS and name.endswith("_ns"):
                yield prefix + name, value, f"must not be above {LONGEST_NS} (ten years)"
    if spec.time_limit_ns > LONGEST_NS:
        yield "time_limit_ns", spec.time_limit_ns, f"must not be above {LONGEST_NS} (ten years)"
    if spec.time_min_ns > max(0, spec.time_limit_ns):
        rule = "is the shortest time limit that a job accepts: set time_limit_ns above it"
        yield "time_min_ns", spec.time_min_ns, rule


def _bad_steps(expected: Expected) -> Iterator[tuple[str, object, str]]:
    if expected.step_ns < 1:
        yield "expected.step_ns", expected.step_ns, "must be at least 1"
    for name in ("exposed_ns", "bubble_ns"):
        if getattr(expected, name) > expected.step_ns:
            rule = f"is part of a step, which takes {expected.step_ns} ns"
            yield f"expected.{name}", getattr(expected, name), rule
    if expected.exposed_ns + expected.bubble_ns > expected.step_ns:
        both = expected.exposed_ns + expected.bubble_ns
        rule = f"together with the bubble {both} ns, more than a step of {expected.step_ns} ns"
        yield "expected.exposed_ns", expected.exposed_ns, rule


def _bad_array(array: Array, most_array: int) -> Iterator[tuple[str, object, str]]:
    if not 1 <= array.count <= most_array:
        rule = f"must be 1 to {most_array} (policy: queue.most_array)"
        yield "array.count", array.count, rule
    if array.width < 0:
        yield "array.width", array.width, "must not be negative (0: no cap)"
    if array.step < 1:
        yield "array.step", array.step, "must be at least 1"
    if array.first < 0 or array.index(array.count - 1) > MOST_INDEX:
        yield "array.first", array.first, f"indices are 0 to {MOST_INDEX}"


def _bad_trial(trial: SweepTrial) -> Iterator[tuple[str, object, str]]:
    words = (trial.sweep, trial.metric, *trial.settings, *trial.settings.values())
    if any(len(word) > MOST_WORD or not word.isprintable() for word in words):
        rule = f"its words must be printable, and have at most {MOST_WORD} characters"
        yield "trial", ascii(trial.sweep[:MOST_WORD]), rule
    if len(trial.settings) > MOST_SETTINGS:
        yield "trial.settings", len(trial.settings), f"must have at most {MOST_SETTINGS} entries"
    for name in ("number", "rung", "steps"):
        if not 0 <= getattr(trial, name) <= MOST_INDEX:
            yield f"trial.{name}", getattr(trial, name), f"must be 0 to {MOST_INDEX}"


def _bad_fallbacks(spec: JobSpec) -> Iterator[tuple[str, object, str]]:
    shape = spec.gang
    for each in spec.fallbacks:
        if each.gang.slot_gpus != shape.slot_gpus:
            yield "fallbacks.gang.slot_gpus", each.gang.slot_gpus, f"must be {shape.slot_gpus}"
        if each.slots >= shape.slots(shape.replicas):
            yield "fallbacks", each.slots, "must need fewer nodes than the job itself"
        alone = structs.replace(spec.on_fewer_nodes(each), fallbacks=(), array=None)
        for key, value, rule in _bad_fields(alone, 0):
            yield f"fallbacks.{key}", value, rule


def _count(spec: JobSpec) -> int:
    """Jobs that a submission makes."""
    return spec.array.count if spec.array else 1


def _too_many_jobs(ctx: Context, spec: JobSpec, before: Mapping[str, int]) -> Reason | None:
    """Why somebody has to wait until jobs have ended before submitting more."""
    count = _count(spec)
    most, most_own = ctx.policy.queue.most_jobs, ctx.policy.users.most_jobs
    kept = len(ctx.view.jobs) - len(ctx.ended) + sum(before.values())
    if kept + count > most:
        who, setting = "the cluster", "queue.most_jobs"
    elif kept + count <= most_own:
        return None
    else:
        who = f"user {spec.user}" if spec.user else "nobody in particular"
        most, setting = most_own, "users.most_jobs"
        own = (len(jobs) for (_, user), jobs in ctx.namesakes.items() if user == spec.user)
        kept = sum(own) + before.get(spec.user, 0)
    if kept + count <= most:
        return None
    return reason("too_many_jobs", who=who, kept=kept, count=count, most=most, setting=setting)


def _over_budget(spec: JobSpec) -> Reason | None:
    """Why a submission would go above its own budget; None: it would not."""
    expected = spec.expected
    if not spec.budget_gpu_seconds or spec.forced or not expected.steps:
        return None
    gpus = spec.gang.gpus(spec.gang.replicas)
    needed = expected.steps * expected.step_ns * gpus // SECOND_NS
    if needed <= spec.budget_gpu_seconds:
        return None
    return reason(
        "over_budget",
        steps=expected.steps,
        needed=in_gpu_hours(needed),
        budget=in_gpu_hours(spec.budget_gpu_seconds),
    )
