"""A mapping as a job that the trainer runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import structs

from phalanx.config import (
    PRESETS,
    Adapter,
    Checkpoint,
    ConfigError,
    Data,
    Ema,
    Job,
    Memory,
    Model,
    Optimizer,
    Parallel,
    Precision,
    Section,
    Train,
    check,
    resolve_model,
    stage_jobs,
    to_toml,
)
from phalanx.config.errors import written
from phalanx.plan.workload import Mapping, Workload

# What the planner can price and the trainer does not run, with the nearest that it does.
NEAREST_SCHEDULE = {"zb-h1": "zero-bubble", "dualpipe": "zero-bubble"}
NEAREST_PRECISION = {"mxfp8": "fp8", "nvfp4": "fp8"}


def job_of(
    name: str, workload: Workload, mapping: Mapping, tokens: int, checkpoint_steps: int
) -> Job:
    """The job of a plan, checked as ``phalanx train`` will check it."""
    job = Job(
        name=name,
        model=workload.model,
        data=Data(sequence=workload.sequence),
        parallel=_parallel(mapping),
        precision=_precision(mapping),
        memory=_memory(mapping),
        optimizer=Optimizer(state=workload.state),
        train=Train(
            steps=max(1, -(-tokens // workload.tokens)),
            global_batch=workload.global_batch,
            micro_batch=mapping.micro_batch,
            device="cuda",
            ema=Ema() if workload.averaged else None,
        ),
        adapter=workload.adapter or Adapter(),
        checkpoint=Checkpoint(every=checkpoint_steps),
    )
    check(job, mapping.gpus)
    return job


def workload_of(job: Job) -> Workload:
    """What a resolved job computes in a step."""
    return Workload(
        model=job.model,
        sequence=job.data.sequence,
        global_batch=job.train.global_batch,
        state=job.optimizer.state,
        averaged=job.train.ema is not None,
        trains="all" if job.adapter.kind == "none" else "adapters",
        adapter=None if job.adapter.kind == "none" else job.adapter,
    )


def stage_workloads(job: Job) -> list[tuple[Workload, Mapping]]:
    """A step of each stretch of a resolved job: samples may grow longer, layers stay where they
    were put for the first ones.
    """
    return [
        (structs.replace(workload_of(one), divided_by=job.data.sequence), mapping_of(one))
        for one in (stage.job for stage in stage_jobs(job))
    ]


NVME_FOLDER = "$LOCAL_NVME"  # the plan does not know where nodes have their drives


def mapping_of(job: Job) -> Mapping:
    """The mapping that a resolved job describes."""
    axes, memory = job.parallel, job.memory
    state = f"{memory.offload}-nvme" if memory.offload_folder else memory.offload
    away = (state, "activations" if memory.offload_activations else "none")
    return Mapping(
        tensor=axes.tensor,
        pipeline=axes.pipeline,
        data=axes.data,
        context=axes.context,
        expert=axes.expert,
        zero=axes.zero,
        replicate=1 if axes.zero == 0 else axes.replicate,
        micro_batch=job.train.micro_batch,
        recompute=memory.recompute,
        schedule=axes.schedule,
        virtual_stages=axes.virtual_stages,
        precision="fp8" if job.precision.fp8 else job.precision.compute,
        offload="+".join(part for part in away if part != "none") or "none",
    )


def _parallel(mapping: Mapping) -> Parallel:
    if mapping.schedule in NEAREST_SCHEDULE:
        fix = f"plan with --schedule {NEAREST_SCHEDULE[mapping.schedule]}"
        raise ConfigError("schedule", mapping.schedule, "the trainer has no such schedule", fix)
    schedule: Any = mapping.schedule
    return Parallel(
        data=mapping.data,
        replicate=mapping.data if mapping.zero == 0 else mapping.replicate,
        tensor=mapping.tensor,
        pipeline=mapping.pipeline,
        context=mapping.context,
        expert=mapping.expert,
        zero=mapping.zero,  # type: ignore[arg-type]
        schedule=schedule if mapping.pipeline > 1 else "1f1b",
        virtual_stages=mapping.virtual_stages if mapping.pipeline > 1 else 1,
    )


def _memory(mapping: Mapping) -> Memory:
    state, _, kept = mapping.offload.partition("+")
    if state.startswith("activations"):
        state, kept = "none", state
    if kept.endswith("-nvme") or state == "parameters-nvme":
        rule = "the trainer keeps the optimizer's state on NVMe, and nothing else"
        fix = f"plan with --offload {mapping.offload.replace('-nvme', '')}, or on more GPUs"
        raise ConfigError("offload", mapping.offload, rule, fix)
    where: Any = state.removesuffix("-nvme")
    return Memory(
        recompute=mapping.recompute,
        offload=where,
        offload_folder=NVME_FOLDER if state != where else "",
        offload_activations=bool(kept),
    )


def _precision(mapping: Mapping) -> Precision:
    if mapping.precision in NEAREST_PRECISION:
        fix = f"plan with --precision {NEAREST_PRECISION[mapping.precision]}"
        raise ConfigError("precision", mapping.precision, "the trainer has no such format", fix)
    if mapping.precision == "fp8":
        return Precision(compute="bfloat16", fp8=True)
    compute: Any = mapping.precision
    return Precision(compute=compute)


def job_toml(job: Job, comments: Iterable[str] = ()) -> str:
    """The job as a person would write it: only what differs from the defaults."""
    lines = [f"# {comment}" for comment in comments]
    lines.append(f"name = {written(job.name)}\n")
    default = Job()
    for name in Job.__struct_fields__:
        section, usual = getattr(job, name), getattr(default, name)
        if not isinstance(section, Section) or section == usual:
            continue
        if isinstance(section, Model):
            lines.append(_model_toml(section))
            continue
        lines += _tables(name, section, usual)
    return "\n".join(lines)


def _tables(name: str, section: Section, usual: Section) -> list[str]:
    """What differs from the usual, with the tables in it."""
    values, inner = [], []
    for field in section.__struct_fields__:
        value = getattr(section, field)
        if value == getattr(usual, field):
            continue
        if isinstance(value, Section):
            inner += _tables(f"{name}.{field}", value, type(value)())
        else:
            values.append(f"{field} = {written(value)}")
    return ["\n".join([f"[{name}]", *values, ""]), *inner]


def _model_toml(model: Model) -> str:
    preset = PRESETS.get(model.preset)
    if preset is not None and resolve_model(preset) == model:
        return f"[model]\npreset = {written(model.preset)}\n"
    return to_toml(model, "model")
