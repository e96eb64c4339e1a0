"""A change of a job that lives, carried out: priced, refused where it cannot run, then ordered."""

from __future__ import annotations

import msgspec
from msgspec import structs

from phalanx import config
from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob, Expected, GangShape, JobSpec, SpecChange
from phalanx.cluster.placement.catalogued import CPU
from phalanx.cluster.plan_record import PlanInterval
from phalanx.cluster.protocol.events import Replan
from phalanx.cluster.units import SECOND_NS
from phalanx.config import ConfigError, Stages, job_from_table, to_toml
from phalanx.config.toml_text import parse_toml
from phalanx.control.server.http.endpoints import ApiError, Call
from phalanx.control.server.http.live_change import own_steps, price_change, running_job
from phalanx.control.server.http.planned_job import planned, site_of
from phalanx.control.server.http.submission import slot_of
from phalanx.control.wire import api_types as t
from phalanx.control.wire.payload import TrainingWork, decode_payload, encode_payload
from phalanx.plan.search.stage_change import STAGE_KEYS, StagesAnswer
from phalanx.plan.search.what_if import JobChange, JobOutcome, PricedChange, WhatIf

# What a run may change and still be the same run; all else would make it another one.
CHANGEABLE = (
    "parallel.",
    "memory.",
    "precision.",
    "train.micro_batch",
    "train.compile",
    "train.cpu_threads",
    "checkpoint.every",
    "checkpoint.interval",
    "checkpoint.memory_every",
    "checkpoint.mode",
    *STAGE_KEYS,
)


async def priced_change(call: Call, change: JobChange) -> PricedChange:
    """What a change would make of the job in the path; ApiError where it could not run so."""
    job, core = call.job(), call.leading.core
    steps = await call.server.read(own_steps, call.server.metrics, job)
    try:
        running = running_job(core, job, steps)
    except ConfigError as error:
        raise ApiError(409, "not_planned", str(error)) from None
    found = await call.helped(price_change, running, change, call.server.options.state)
    if isinstance(found, str):
        raise ApiError(409, "bad_change", found)
    return found


async def carry_out(call: Call, change: JobChange) -> t.Done:
    """Has a job changed at its next step boundary; refused before anything stops."""
    _refuse_another_run(change)
    job, before = call.job(), call.job().spec
    priced = await priced_change(call, change)
    if priced.job.train.device != CPU:  # a core has no memory of its own
        _refuse_too_large(priced.answer.then)
    if change.only_stages:
        return await call.order(Replan(job=job.id, change=_restaged(job, priced, call.token.name)))
    spec = changed_spec(before, priced, _node_gpus(call.leading.core, job))
    if change.spares >= 0:
        spec = structs.replace(spec, spares=change.spares)
    core, state = call.leading.core, call.server.options.state
    site = site_of(core, spec, priced.job, state, placement=job.placement)
    spec = await call.server.read(planned, spec, priced.job, site)
    if job.spec is not before:
        raise ApiError(409, "changed_meanwhile", f"job {job.id} was changed meanwhile: ask again")
    order = _change(spec, priced.answer, call.token.name)
    if priced.answer.stages is not None:
        order = _of_stages(order, before, priced.answer.stages)
    return await call.order(Replan(job=job.id, change=order))


def wanted_replicas(job: ClusterJob, asked: t.Replicas) -> int:
    """The replicas of a job that are asked for, as such or as GPUs."""
    if bool(asked.replicas) == bool(asked.gpus):
        raise ApiError(
            409, "contradiction", "give another number: one of replicas and gpus, above 0"
        )
    each = job.spec.gang.replica_ranks
    if asked.gpus % each:
        text = f"a replica of job {job.id} has {each} GPUs: {asked.gpus} are not whole replicas"
        raise ApiError(409, "not_divisible", text)
    return asked.replicas or asked.gpus // each


def needs_replan(job: ClusterJob, replicas: int) -> bool:
    """Whether so many replicas are another mapping, which the gang cannot resize itself to."""
    shape = job.spec.gang
    if not job.spec.reports_steps or not shape.slot_gpus:
        return False
    return not shape.floor <= replicas <= shape.ceiling


def changed_spec(spec: JobSpec, priced: PricedChange, node_gpus: int) -> JobSpec:
    """A submission with the gang and the work of a changed job."""
    work = decode_payload(spec.payload)
    assert isinstance(work, TrainingWork)
    gang = _gang(spec.gang, priced.job, priced.ranks, node_gpus)
    payload = structs.replace(work, toml=to_toml(priced.job), world_size=priced.ranks)
    return structs.replace(spec, gang=gang, payload=encode_payload(payload))


def _gang(old: GangShape, job: config.Job, ranks: int, node_gpus: int) -> GangShape:
    """The shape of a changed gang: as much of a node a slot as there was, where that comes out."""
    axes, usual = job.parallel, slot_of(old.ranks(old.replicas), node_gpus)
    kept = old.slot_gpus != usual and ranks % max(1, old.slot_gpus) == 0
    slot = old.slot_gpus if kept else slot_of(ranks, node_gpus)
    return structs.replace(
        old,
        replicas=axes.data,
        least_replicas=min(old.least_replicas, axes.data),
        most_replicas=max(old.most_replicas, axes.data) if old.most_replicas else 0,
        tensor=axes.tensor,
        context=axes.context,
        pipeline=axes.pipeline,
        slot_gpus=slot,
    )


def _node_gpus(core: Core, job: ClusterJob) -> int:
    fleet, placement = core.view.fleet, job.placement
    if placement is not None:
        return fleet.nodes[placement.nodes[0]].gpus
    return max((known.gpus for known in fleet.classes), default=1)


def _change(spec: JobSpec, answer: WhatIf, by: str) -> SpecChange:
    """The order's content, with the step that the job's own steps let expect."""
    step = answer.then.step_seconds
    low, mid, high = (max(1, int(each * SECOND_NS)) for each in (step.low, step.mid, step.high))
    return SpecChange(
        spec=structs.replace(spec, expected=_calibrated(spec.expected, mid)),
        by=by,
        settings=answer.changed,
        before=answer.now.mapping,
        step_ns=PlanInterval(low, mid, high),
    )


def _restaged(job: ClusterJob, priced: PricedChange, by: str) -> SpecChange:
    """The order of a job that reads something else and keeps its mapping, also as a fallback."""
    answer, stages = priced.answer, Stages.of(priced.job)
    own = _spec_with(job.own, stages) if job.own is not None else None
    change = SpecChange(
        spec=_spec_with(job.spec, stages),
        own=own,
        by=by,
        settings=answer.changed,
        before=answer.now.mapping,
    )
    assert answer.stages is not None
    return _of_stages(change, job.spec, answer.stages)


def _of_stages(change: SpecChange, before: JobSpec, answer: StagesAnswer) -> SpecChange:
    """The order with the first step that it alters, and what takes it back."""
    work = decode_payload(before.payload)
    assert isinstance(work, TrainingWork)
    stages = msgspec.json.encode(Stages.of(job_from_table(parse_toml(work.toml))))
    return structs.replace(change, made_before=answer.made_before, stages_before=stages.decode())


def _spec_with(spec: JobSpec, stages: Stages) -> JobSpec:
    """A submission whose work, and that of its fallbacks, has these stages."""
    fallbacks = tuple(
        structs.replace(each, payload=each.payload and _payload_with(each.payload, stages))
        for each in spec.fallbacks
    )
    return structs.replace(spec, payload=_payload_with(spec.payload, stages), fallbacks=fallbacks)


def _payload_with(payload: str, stages: Stages) -> str:
    work = decode_payload(payload)
    assert isinstance(work, TrainingWork)
    job = stages.put_into(job_from_table(parse_toml(work.toml)))
    return encode_payload(structs.replace(work, toml=to_toml(job)))


def _calibrated(expected: Expected, step_ns: int) -> Expected:
    """What is expected, with a step as the job's own steps let expect it, and its parts alike."""
    exposed = expected.exposed_ns * step_ns // expected.step_ns
    bubble = expected.bubble_ns * step_ns // expected.step_ns
    return structs.replace(expected, step_ns=step_ns, exposed_ns=exposed, bubble_ns=bubble)


def _refuse_another_run(change: JobChange) -> None:
    for setting in change.settings:
        key = setting.partition("=")[0]
        if not key.startswith(CHANGEABLE):
            known = ", ".join(each + "*" if each.endswith(".") else each for each in CHANGEABLE)
            text = f"{key} would make it another run: a job that runs may change {known}"
            raise ApiError(409, "another_run", text)


def _refuse_too_large(then: JobOutcome) -> None:
    if then.memory_bytes > then.memory_limit:
        needed, there = then.memory_bytes / 2**30, then.memory_limit / 2**30
        text = (
            f"nothing was changed: {then.mapping} needs {needed:.1f} GiB of {there:.1f} GiB a GPU"
        )
        raise ApiError(409, "too_large", text)
