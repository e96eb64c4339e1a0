"""A job as it runs, for the question what a change would make of it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from phalanx import config
from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.placement.catalogued import CPU
from phalanx.cluster.units import SECOND_NS
from phalanx.config import ConfigError, Stages, job_from_table, resolve, to_toml
from phalanx.config.toml_text import parse_toml
from phalanx.control.server.http.planned_job import constants_for, site_of
from phalanx.control.wire.payload import PayloadError, TrainingWork, decode_payload
from phalanx.observe.store.metric_store import MetricStore
from phalanx.observe.store.recorder import owner_of
from phalanx.plan.search.stage_change import ReadSoFar
from phalanx.plan.search.what_if import JobChange, OwnSteps, PricedChange, Running, priced

STEPS_LOOKED_AT = 200
STOPPED_SECONDS = 10.0  # until a gang that runs has heard of a change and made its last step
LEAST_STEPS = 8  # to know their spread


def own_steps(store: MetricStore, job: ClusterJob) -> OwnSteps:
    """What the newest steps of a job took. Reads the store: not in the server's loop.

    Only of the generation that runs: one before may have had another mapping.
    """
    known, gang = OwnSteps(seconds=job.step_ns / 1e9, done=job.step), job.gang
    tables = store.find(owner_of(job.id), "scalars")
    if gang is None or gang.phase != "running" or not tables:
        return known
    _, last_ns, _ = store.span(tables[-1], 0)
    since_ns = max(gang.since_ns, last_ns - 2 * STEPS_LOOKED_AT * (job.step_ns or SECOND_NS))
    rows = store.read(tables[-1], "step_seconds", 0, since_ns, 1 << 62)
    values = rows.values["mean"][-STEPS_LOOKED_AT:, 0].astype(np.float64)
    newest = np.log(values[values > 0])
    if len(newest) < LEAST_STEPS:
        return known
    # Quartiles: the step with a validation in it is no measure of the others.
    low, middle, high = np.quantile(newest, (0.25, 0.5, 0.75))
    return OwnSteps(
        seconds=math.exp(middle), spread=max(1e-3, float(high - low) / 1.349), done=job.step
    )


def running_job(core: Core, job: ClusterJob, steps: OwnSteps) -> Running:
    """What is priced; ConfigError where the planner cannot see inside."""
    try:
        work = decode_payload(job.spec.payload)
    except PayloadError:
        work = None
    if not isinstance(work, TrainingWork):
        rule = "is a program of its own: the planner cannot see inside"
        raise ConfigError("job", job.id, rule, "ask about a job that was submitted as a job file")
    described, ranks = _as_it_runs(job, work)
    site = site_of(core, job.spec, described, placement=job.placement)
    if site.devices is None:
        raise ConfigError("job", job.id, site.problem, "describe its nodes' GPUs")
    every = job.spec.expected.checkpoint_steps
    return Running(
        toml=to_toml(described),
        ranks=ranks,
        devices=site.devices,
        node_gpus=max(1, job.spec.gang.slot_gpus),
        spares=job.spec.spares,
        interval_seconds=every * (job.step_ns or job.spec.expected.step_ns) / 1e9,
        failure_rate=site.failure_rate or described.checkpoint.failure_rate,
        steps=steps,
        read=_read_so_far(job, steps),
    )


def _read_so_far(job: ClusterJob, steps: OwnSteps) -> ReadSoFar:
    """Where a change of its stages would meet a job: a gang that runs makes steps meanwhile."""
    step_seconds = steps.seconds or job.spec.expected.step_ns / 1e9
    more = max(2, math.ceil(STOPPED_SECONDS / step_seconds)) if job.placement is not None else 0
    return ReadSoFar(
        made=job.step + more,
        skipped=left_out(job),
        before=msgspec.json.decode(job.stages_before, type=Stages) if job.stages_before else None,
    )


def left_out(job: ClusterJob) -> tuple[tuple[int, int], ...]:
    """Samples that are never read, sorted and apart; older ranges stand at the beginning."""
    merged = [(0, job.skipped_before)] if job.skipped_before else []
    for first, past in sorted(job.skipped):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(past, merged[-1][1]))
        else:
            merged.append((first, past))
    return tuple(merged)


def _as_it_runs(job: ClusterJob, work: TrainingWork) -> tuple[config.Job, int]:
    """What a job runs, on how many ranks: an elastic one may have other replicas than it says."""
    described = resolve(job_from_table(parse_toml(work.toml)), work.world_size)
    replicas = job.placement.replicas if job.placement is not None else job.wanted_replicas
    if replicas == job.spec.gang.replicas:
        return described, work.world_size
    settings = [f"parallel.data={replicas}"]
    if described.parallel.zero == 0:
        settings.append("parallel.replicate=1")  # follows from the replicas
    ranks = job.spec.gang.ranks(replicas)
    return resolve(job_from_table(parse_toml(work.toml), settings), ranks), ranks


def price_change(running: Running, change: JobChange, state: Path) -> PricedChange | str:
    """The answer, with the constants of the site; in words where the job could not run so."""
    try:
        constants = constants_for(state, cpu=running.devices.gpu.key == CPU)
        return priced(running, change, constants)
    except ConfigError as error:
        return str(error)
