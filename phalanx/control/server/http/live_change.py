"""A job as it runs, for the question what a change would make of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import Job
from phalanx.cluster.placement.catalogued import CPU
from phalanx.config import ConfigError, job_from_table, resolve
from phalanx.config.toml_text import parse_toml
from phalanx.control.server.http.planned_job import constants_for, site_of
from phalanx.control.wire.payload import PayloadError, Train, decode_payload
from phalanx.observe.store import query
from phalanx.observe.store.metric_store import MetricStore
from phalanx.observe.store.recorder import JOB_TABLES, owner_of
from phalanx.plan.search.what_if import JobChange, OwnSteps, Running, WhatIf, what_if

STEPS_LOOKED_AT = 200
LEAST_STEPS = 8  # to know their spread


def own_steps(store: MetricStore, job: Job) -> OwnSteps:
    """What the newest steps of a job took. Reads the store: not in the server's loop."""
    found = query.series(
        store, owner_of(job.id), JOB_TABLES, ["step_seconds"], (0, 1 << 62), STEPS_LOOKED_AT
    ).series
    values = [each for each in found["step_seconds"].value if each] if found else []
    newest = np.log(np.array(values[-STEPS_LOOKED_AT:], dtype=np.float64))
    if len(newest) < LEAST_STEPS:
        return OwnSteps(seconds=job.step_ns / 1e9, done=job.step)
    # Quartiles: the step with a validation in it is no measure of the others.
    low, middle, high = np.quantile(newest, (0.25, 0.5, 0.75))
    return OwnSteps(
        seconds=math.exp(middle), spread=max(1e-3, float(high - low) / 1.349), done=job.step
    )


def running_job(core: Core, job: Job, steps: OwnSteps) -> Running:
    """What is priced; ConfigError where the planner cannot see inside."""
    try:
        work = decode_payload(job.spec.payload)
    except PayloadError:
        work = None
    if not isinstance(work, Train):
        rule = "is a program of its own: the planner cannot see inside"
        raise ConfigError("job", job.id, rule, "ask about a job that was submitted as a job file")
    described = resolve(job_from_table(parse_toml(work.toml)), work.world_size)
    site = site_of(core, job.spec, described)
    if site.devices is None:
        raise ConfigError("job", job.id, site.problem, "describe its nodes' GPUs")
    every = job.spec.expected.checkpoint_steps
    return Running(
        toml=work.toml,
        ranks=work.world_size,
        devices=site.devices,
        node_gpus=max(1, job.spec.gang.slot_gpus),
        spares=job.spec.spares,
        interval_seconds=every * (job.step_ns or job.spec.expected.step_ns) / 1e9,
        steps=steps,
    )


def price_change(running: Running, change: JobChange, state: Path) -> WhatIf | str:
    """The answer, with the constants of the site; in words where the job could not run so."""
    try:
        constants = constants_for(state, cpu=running.devices.gpu.key == CPU)
        return what_if(running, change, constants)
    except ConfigError as error:
        return str(error)
