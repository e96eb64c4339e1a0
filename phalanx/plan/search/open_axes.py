"""The mapping of a job that leaves it to the planner (``parallel.choose``)."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from phalanx.config import Job, check, resolve
from phalanx.hardware import Cluster
from phalanx.plan.cost.constants import Constants
from phalanx.plan.question.emit import mapping_of, workload_of
from phalanx.plan.search.search import search
from phalanx.plan.search.space import RUNNABLE, Pins
from phalanx.plan.workload import Mapping

AXES = ("tensor", "pipeline", "context", "expert")


def with_open_axes_chosen(
    job: Job, on: Cluster, *, constants: Constants | None = None, keep_data: bool = False
) -> tuple[Job, tuple[str, ...]]:
    """A resolved job with what it leaves open chosen, and the settings that this changed.

    Open is what stands at its smallest: axes and a micro-batch of 1, no recompute; and how many
    replicas that leaves, unless ``keep_data``. ConfigError where no mapping would run.
    """
    given = mapping_of(job)
    pins: dict[str, Any] = {
        name: getattr(given, name) for name in (*AXES, "micro_batch") if getattr(given, name) > 1
    }
    pins |= {"zero": given.zero, "offload": given.offload, "replicate": 1}
    if given.recompute != "none":
        pins["recompute"] = given.recompute
    if given.pipeline > 1:
        pins |= {"schedule": given.schedule, "virtual_stages": given.virtual_stages}
    if keep_data:
        pins["data"] = given.data
    found = search(
        workload_of(job),
        on,
        gpus=given.gpus,
        pins=Pins(**pins),
        precision=given.precision,
        constants=constants,
    )
    chosen = _job(job, found.best.mapping)
    check(chosen, given.gpus)
    return chosen, setting_changes(job, chosen)


def all_open(job: Job, ranks: int) -> Job:
    """The job with nothing decided that the search may decide."""
    axes = structs.replace(
        job.parallel, tensor=1, pipeline=1, context=1, expert=1, data=0, replicate=1
    )
    free = structs.replace(
        job,
        parallel=axes,
        train=structs.replace(job.train, micro_batch=1),
        memory=structs.replace(job.memory, recompute="none"),
    )
    return resolve(free, ranks)


def _job(job: Job, mapping: Mapping) -> Job:
    assert mapping.schedule in RUNNABLE
    schedule: Any = mapping.schedule if mapping.pipeline > 1 else job.parallel.schedule
    parallel = structs.replace(
        job.parallel,
        choose=False,
        data=mapping.data,
        replicate=1,
        tensor=mapping.tensor,
        pipeline=mapping.pipeline,
        context=mapping.context,
        expert=mapping.expert,
        schedule=schedule,
        virtual_stages=mapping.virtual_stages if mapping.pipeline > 1 else 0,
    )
    return resolve(
        structs.replace(
            job,
            parallel=parallel,
            train=structs.replace(job.train, micro_batch=mapping.micro_batch),
            memory=structs.replace(job.memory, recompute=mapping.recompute),
        ),
        mapping.gpus,
    )


def setting_changes(before: Job, after: Job) -> tuple[str, ...]:
    """What differs, as a job file would say it; what follows from it is left out."""
    shown = {"parallel": (*AXES, "data", "schedule"), "train": ("micro_batch",)}
    shown["memory"] = ("recompute",)
    return tuple(
        f"{section}.{name} = {getattr(getattr(after, section), name)}"
        for section, names in shown.items()
        for name in names
        if getattr(getattr(before, section), name) != getattr(getattr(after, section), name)
    )
