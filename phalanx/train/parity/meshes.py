"""Every mesh of up to so many ranks, by the axes that may be set together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from msgspec import Struct, structs

from phalanx.config import ConfigError, Job, Parallel, check, resolve

AXES = ("pipeline", "data", "context", "tensor")
SHORT = {"pipeline": "pp", "context": "cp", "tensor": "tp", "expert": "ep"}
ZERO_NAMES = {0: "ddp", 1: "zero1-", 2: "zero2-", 3: "fsdp"}


class Candidate(Struct, frozen=True, kw_only=True):
    """A mesh, and why the job's rules refuse it, if they do."""

    name: str
    job: Job  # resolved for it
    ranks: int
    refused: str = ""


def candidates(job: Job, most_ranks: int) -> list[Candidate]:
    """Every mesh of two to ``most_ranks`` ranks for a job that is small enough for all of them."""
    sizes = [size for size in range(2, most_ranks + 1) if most_ranks % size == 0]
    return [
        _candidate(job, ranks, parallel)
        for ranks in sizes
        for axes in _factorings(ranks)
        for parallel in _variants(job, ranks, axes)
    ]


def on_one_process(job: Job) -> Job:
    """The job that all meshes are compared with."""
    train = structs.replace(job.train, micro_batch=max(1, job.train.global_batch // 2))
    return resolve(structs.replace(job, parallel=Parallel(zero=0), train=train), 1)


def _candidate(job: Job, ranks: int, parallel: dict[str, Any]) -> Candidate:
    axes = Parallel(**parallel, reduce_dtype=job.parallel.reduce_dtype)
    # Two micro-batches a replica prove accumulation; a pipeline needs two a stage to fill.
    micro_batch = max(1, job.train.global_batch // axes.data // (2 * axes.pipeline))
    train = structs.replace(job.train, micro_batch=micro_batch)
    wanted = structs.replace(job, parallel=axes, train=train)
    refused = ""
    try:
        check(wanted, ranks)
    except ConfigError as error:
        refused = error.problems[0].rule
    resolved = resolve(wanted, ranks)
    return Candidate(name=_name(axes, ranks), job=resolved, ranks=ranks, refused=refused)


def _factorings(ranks: int) -> Iterator[dict[str, int]]:
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for sizes in product(divisors, repeat=len(AXES)):
        pipeline, data, context, tensor = sizes
        if pipeline * data * context * tensor == ranks:
            yield dict(zip(AXES, sizes, strict=True))


def _variants(job: Job, ranks: int, axes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The settings beside the sizes of the axes; those of one axis where it stands alone."""
    data, alone = axes["data"], ranks == 2
    zeros = (0, 1, 2, 3) if alone and data > 1 else (0, 3) if data > 1 else (3,)
    schedules = ("1f1b", "zero-bubble", "interleaved") if alone and axes["pipeline"] > 1 else ("",)
    methods = ("ring", "ulysses") if axes["context"] > 1 else ("",)
    spread = data * axes["context"] * axes["tensor"]
    experts = (1, 2) if job.model.moe is not None and spread % 2 == 0 else (1,)
    copies = (1, 2) if data >= 4 and data % 2 == 0 else (1,)
    for zero, schedule, method, expert, replicate in product(
        zeros, schedules, methods, experts, copies
    ):
        if zero == 0 and (expert > 1 or replicate > 1):
            continue  # both are ways of sharding
        yield {
            **axes,
            "zero": zero,
            "expert": expert,
            "replicate": replicate,
            **({"schedule": schedule} if schedule else {}),
            **({"context_method": method} if method else {}),
        }


def _name(axes: Parallel, ranks: int) -> str:
    """As people write it: pp2xfsdp2."""
    parts = [f"{SHORT[axis]}{size}" for axis in SHORT if (size := getattr(axes, axis)) > 1]
    if axes.data > 1:
        copies = f"hsdp{axes.replicate}x{axes.data // axes.replicate}"
        plain = f"{ZERO_NAMES[axes.zero]}{axes.data}"
        parts.insert(axes.pipeline > 1, copies if axes.replicate > 1 else plain)
    name = "x".join(parts)
    if axes.context > 1:
        name += f"-{axes.context_method}"
    return f"{name}-{axes.schedule}" if axes.pipeline == ranks else name
