"""What ``train.virtual_replicas`` promises the same bits for, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.errors import Change, ConfigProblem, problem
from phalanx.config.rules.accepted import RANKS, nearest_first
from phalanx.config.schema import Job

KEY = "train.virtual_replicas"
MOST = 1 << 16  # leaves of the tree; each has a loss that every rank reads


def virtual_replica_problems(job: Job, world_size: int) -> Iterator[ConfigProblem]:
    """Every reason why a resolved job would not have the same bits on other replicas."""
    count = job.train.virtual_replicas
    if not count:
        return
    powers = [1 << bit for bit in range(MOST.bit_length())]
    if count not in powers:
        near = nearest_first(powers, count)
        yield problem(
            KEY,
            count,
            f"must be a power of two up to {MOST}: sums follow a binary tree over them",
            f"nearest: {near[0]}, or 0: off",
            [{KEY: power} for power in near],
        )
    elif count % job.parallel.data:
        yield from _replicas(job, world_size)
    yield from _batches(job)
    yield from _axes(job)
    yield from _arithmetic(job)


def _replicas(job: Job, world_size: int) -> Iterator[ConfigProblem]:
    axes, count = job.parallel, job.train.virtual_replicas
    rest = axes.pipeline * axes.context * axes.tensor
    sizes = [1 << bit for bit in range(count.bit_length())]
    near = nearest_first(sizes, axes.data)
    fewer: list[Change] = [{RANKS: rest * data, "parallel.data": data} for data in near]
    more: list[Change] = [{KEY: 1 << (axes.data - 1).bit_length()}]
    yield problem(
        KEY,
        count,
        f"must be a multiple of parallel.data ({axes.data}): each replica computes as many",
        f"start {rest * near[0]} ranks with parallel.data = {near[0]}",
        fewer,
        more,
    )


def _batches(job: Job) -> Iterator[ConfigProblem]:
    """A virtual replica without a sample would be computed all the same."""
    train = job.train
    smallest = min([stage.global_batch for stage in train.batch_ramp] + [train.global_batch])
    needed = train.virtual_replicas * train.micro_batch
    if smallest < needed:
        most = max(1, smallest // train.micro_batch)
        fit = 1 << (most.bit_length() - 1)
        yield problem(
            KEY,
            train.virtual_replicas,
            f"each needs a micro-batch of {train.micro_batch} in every step, and the smallest "
            f"global batch has {smallest} samples",
            f"nearest: {fit}",
            [{KEY: fit}],
        )


def _axes(job: Job) -> Iterator[ConfigProblem]:
    for axis in ("tensor", "context", "expert"):
        if (size := getattr(job.parallel, axis)) > 1:
            yield problem(
                KEY,
                job.train.virtual_replicas,
                f"covers data replicas and pipeline stages; parallel.{axis} = {size} adds up parts "
                "of a layer in an order of its own",
                f"set it to 0, or parallel.{axis} = 1",
            )
    if job.parallel.pipeline > 1 and job.model.tied_embedding:
        yield problem(
            KEY,
            job.train.virtual_replicas,
            "stages of a pipeline add up the gradients of a tied embedding each by itself, and one "
            "process adds them together",
            "set it to 0, or parallel.pipeline = 1",
        )
    if job.parallel.pipeline > 1 and job.parallel.schedule == "zero-bubble":
        yield problem(
            KEY,
            job.train.virtual_replicas,
            "needs the weight gradients of a micro-batch together, and zero-bubble puts them off",
            'set it to 0, or parallel.schedule = "1f1b"',
        )


def _arithmetic(job: Job) -> Iterator[ConfigProblem]:
    refused = (
        (
            job.parallel.reduce_dtype != "float32",
            "sums gradients in fp32",
            'parallel.reduce_dtype = "float32"',
        ),
        (
            job.optimizer.kind != "adamw",
            "is proved for AdamW, whose update is elementwise",
            'optimizer.kind = "adamw"',
        ),
        (
            job.optimizer.state != "float32",
            "moments in other formats are rounded by the place that an element has on its rank",
            'optimizer.state = "float32"',
        ),
        (
            job.precision.fp8,
            "fp8 scales by what a rank sees",
            "precision.fp8 = false",
        ),
        (
            job.memory.offload == "parameters",
            "is not proved for weights in host memory",
            'memory.offload = "none"',
        ),
        (
            job.parallel.choose,
            "keeps axes and micro-batch as they are, and the planner would choose them",
            "parallel.choose = false",
        ),
        (
            job.train.verify_every > 0,
            "sums gradients where verification would compare them",
            "train.verify_every = 0",
        ),
    )
    for applies, rule, other in refused:
        if applies:
            yield problem(KEY, job.train.virtual_replicas, rule, f"set it to 0, or {other}")
