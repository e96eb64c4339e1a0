"""A mapping as a job that the trainer runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from phalanx.config import (
    PRESETS,
    Checkpoint,
    ConfigError,
    Data,
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
        ),
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
    )


def mapping_of(job: Job) -> Mapping:
    """The mapping that a resolved job describes."""
    axes, memory = job.parallel, job.memory
    away = (memory.offload, "activations" if memory.offload_activations else "none")
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
    if "nvme" in mapping.offload:
        rule = "the trainer offloads to host memory only, not to NVMe"
        fix = f"plan with --offload {mapping.offload.replace('-nvme', '')}, or on more GPUs"
        raise ConfigError("offload", mapping.offload, rule, fix)
    where: Any = state
    return Memory(recompute=mapping.recompute, offload=where, offload_activations=bool(kept))


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
        changed = [field for field in section.__struct_fields__ if _differs(section, usual, field)]
        values = [f"{field} = {written(getattr(section, field))}" for field in changed]
        lines.append("\n".join([f"[{name}]", *values, ""]))
    return "\n".join(lines)


def _differs(section: Section, usual: Section, field: str) -> bool:
    return bool(getattr(section, field) != getattr(usual, field))


def _model_toml(model: Model) -> str:
    preset = PRESETS.get(model.preset)
    if preset is not None and resolve_model(preset) == model:
        return f"[model]\npreset = {written(model.preset)}\n"
    return to_toml(model, "model")
