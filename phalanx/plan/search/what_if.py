"""What would become of a job that runs: changed, or as the planner would have it, beside now.

The job's own steps calibrate the answer: what it takes over what is predicted of it holds for the
changed job too. The interval is that of its steps where the mapping stays, and the planner's own on
top of it where another mapping is predicted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec import Struct, structs

from phalanx.config import (
    ConfigError,
    Job,
    StageEdit,
    changed_rows,
    check,
    job_from_table,
    refuse_other_sums,
    resolve,
)
from phalanx.config.toml_text import parse_toml
from phalanx.hardware import Cluster
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.failures import (
    AUTOMATIC_RATE,
    FailureSettings,
    goodput,
    rate_named,
)
from phalanx.plan.cost.money import Range
from phalanx.plan.cost.uncertainty import Z80
from phalanx.plan.machine import machine_of
from phalanx.plan.memory.model_counts import flops_per_token
from phalanx.plan.search.contract import Plan, plan_job
from phalanx.plan.search.fewer_nodes import sized
from phalanx.plan.search.open_axes import all_open, setting_changes, with_open_axes_chosen
from phalanx.plan.search.proposal import describe
from phalanx.plan.search.stage_change import (
    STAGE_KEYS,
    ReadSoFar,
    StagesAnswer,
    restaged,
    stages_answer,
)

USUAL_SPREAD = 0.03  # of a step over the next, where too few were measured
PRECISIONS = ("float32", "float16", "bfloat16", "fp8")


class JobChange(Struct, frozen=True, kw_only=True):
    """What is asked: any of these together."""

    settings: tuple[str, ...] = ()  # of the job file, key=value
    gpus: int = 0  # 0: as many as now
    interval_seconds: float = 0.0  # between checkpoints; 0: as now
    spares: int = -1  # nodes; -1: as now
    precision: str = ""
    search: bool = False  # the best mapping there is
    stage: StageEdit | None = None  # what is to hold after a step; 0: as soon as is safe
    undo: bool = False  # the stages are what they were before they were changed last

    @property
    def of_stages(self) -> bool:
        """Whether it is asked what the run reads, and when."""
        keys = {each.partition("=")[0] for each in self.settings}
        return self.stage is not None or self.undo or not keys.isdisjoint(STAGE_KEYS)

    @property
    def only_stages(self) -> bool:
        """Whether that is all that is asked."""
        keys = [each.partition("=")[0] for each in self.settings]
        rest = (self.gpus, self.interval_seconds, self.precision, self.search)
        others = any(rest) or self.spares >= 0 or any(key not in STAGE_KEYS for key in keys)
        return self.of_stages and not others


class OwnSteps(Struct, frozen=True, kw_only=True):
    """What a job's own steps say."""

    seconds: float = 0.0  # of one; 0: none was measured
    spread: float = USUAL_SPREAD  # standard deviation of the logarithm of one
    done: int = 0


class Running(Struct, frozen=True, kw_only=True):
    """A job as it runs: its file, devices and measurements."""

    toml: str
    ranks: int
    devices: Cluster  # with as many GPUs as it has
    node_gpus: int = 1
    spares: int = 0  # nodes
    interval_seconds: float = 0.0  # between its checkpoints; 0: the planner's
    failure_rate: str = AUTOMATIC_RATE  # of its nodes: a name, or a number per 1000 node-days
    steps: OwnSteps = OwnSteps()
    read: ReadSoFar = ReadSoFar()


class JobOutcome(Struct, frozen=True, kw_only=True):
    """One way to go on."""

    mapping: str
    gpus: int
    step_seconds: Range  # with the 80 % interval
    tokens_per_second: float
    mfu: float
    goodput: float
    hours: Range  # until its last step
    dollars: Range
    memory_bytes: float
    memory_limit: float


class WhatIf(Struct, frozen=True, kw_only=True):
    """Now, and as it would be."""

    now: JobOutcome
    then: JobOutcome
    changed: tuple[str, ...]  # settings of the mapping, where they are not as now
    calibration: float  # measured over predicted step; 1 where nothing was measured
    stages: StagesAnswer | None = None  # None: nothing is asked of them


class PricedChange(NamedTuple):
    """An answer, and the job that would run."""

    answer: WhatIf
    job: Job  # resolved
    ranks: int


def priced(running: Running, change: JobChange, constants: Constants | None = None) -> PricedChange:
    """Price a change, and make the job that it leads to; ConfigError where that could not run."""
    job = resolve(job_from_table(parse_toml(running.toml)), running.ranks)
    rate = FailureSettings(rate=rate_named(running.failure_rate))
    before = plan_job(job, running.devices, constants=constants, settings=rate)
    own = running.steps
    ratio = own.seconds / before.step_seconds.mid if own.seconds else 1.0
    now = _outcome(before, running, job.train.steps, ratio, change=JobChange(), measured=True)
    other, ranks = _changed(running, job, change)
    on = sized(running.devices, ranks)
    if change.search:
        other, _ = with_open_axes_chosen(all_open(other, ranks), on, constants=constants)
    refuse_other_sums(other, job.train, "the job")
    after = plan_job(other, on, constants=constants, settings=rate)
    same = after.mapping == before.mapping and after.workload == before.workload
    then = _outcome(after, running, other.train.steps, ratio, change=change, measured=same)
    changed = _told(setting_changes(job, other), change)
    if change.interval_seconds:  # the job file counts in steps
        every = max(1, round(change.interval_seconds / then.step_seconds.mid))
        checkpoint = structs.replace(other.checkpoint, every=every)
        other = structs.replace(other, checkpoint=checkpoint)
    stages = stages_answer(job, other, running.read) if change.of_stages else None
    if stages is not None:
        changed = (*changed, *changed_rows(stages.now, stages.then))
    answer = WhatIf(now=now, then=then, changed=changed, calibration=ratio, stages=stages)
    return PricedChange(answer, other, ranks)


def _told(mapping: tuple[str, ...], change: JobChange) -> tuple[str, ...]:
    """What differs from now: of the mapping, and what else was asked for."""
    keys = {each.partition(" = ")[0] for each in mapping}
    asked = [tuple(each.partition("=")[::2]) for each in change.settings]
    apart = (*keys, "parallel.data", *STAGE_KEYS)
    told = [f"{key} = {value}" for key, value in asked if key not in apart]
    if change.precision:
        told.append(f"precision = {change.precision}")
    if change.interval_seconds:
        told.append(f"a checkpoint every {change.interval_seconds:g} s")
    if change.spares >= 0:
        told.append(f"spares = {change.spares}")
    return (*mapping, *told)


def _changed(running: Running, job: Job, change: JobChange) -> tuple[Job, int]:
    settings = list(change.settings)
    if change.precision:
        if change.precision not in PRECISIONS:
            fix = "one of " + ", ".join(PRECISIONS)
            raise ConfigError("precision", change.precision, "no such format", fix)
        fp8 = change.precision == "fp8"
        settings.append(f"precision.fp8={'true' if fp8 else 'false'}")
        settings.append(f"precision.compute={'bfloat16' if fp8 else change.precision}")
    wanted = change.gpus or running.ranks
    if not any(each.startswith("parallel.data=") for each in settings):
        settings.append("parallel.data=0")  # whatever the other axes leave
    if job.parallel.zero == 0:
        settings.append("parallel.replicate=1")  # follows from the replicas
    other = job_from_table(parse_toml(running.toml), settings)
    other = restaged(other, change.stage, change.undo, running.read)
    check(other, wanted)
    return resolve(other, wanted), wanted


def _outcome(
    plan: Plan, running: Running, steps: int, ratio: float, *, change: JobChange, measured: bool
) -> JobOutcome:
    """``measured``: its mapping is the one that runs, whose steps are known."""
    own, middle = running.steps, plan.step_seconds.mid * ratio
    spread = own.spread
    if not measured or not own.seconds:
        planned = math.log(plan.step_seconds.high / plan.step_seconds.mid) / Z80
        spread = math.hypot(planned, own.spread)
    step = Range(middle * math.exp(-Z80 * spread), middle, middle * math.exp(Z80 * spread))
    recovery = plan.detection_seconds + plan.recovery_seconds + plan.flush_seconds
    interval = change.interval_seconds or running.interval_seconds or plan.checkpoint_seconds
    kept = goodput(plan.mtbf_seconds, interval, plan.stall_seconds, recovery)
    left = max(0, steps - own.done)
    hours = step.times(left / max(kept, 1e-9) / 3600)
    spares = running.spares if change.spares < 0 else change.spares
    paid = plan.gpus + spares * running.node_gpus
    per_token = flops_per_token(plan.workload.model, plan.workload.sequence)
    peak = machine_of(running.devices, plan.gpus).peak(plan.mapping.precision)
    rate = plan.workload.tokens / middle
    return JobOutcome(
        mapping=describe(plan.mapping),
        gpus=plan.gpus,
        step_seconds=step,
        tokens_per_second=rate,
        mfu=per_token.model_flops * rate / (plan.gpus * peak),
        goodput=kept,
        hours=hours,
        dollars=hours.times(paid * running.devices.price_per_gpu_hour),
        memory_bytes=plan.memory_bytes,
        memory_limit=plan.memory_limit,
    )
