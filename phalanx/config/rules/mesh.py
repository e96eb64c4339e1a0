"""Rules between the axes of the mesh, the model, the batch and the world size."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.config.errors import ConfigProblem, problem
from phalanx.config.resolve import is_gated, ring_computes
from phalanx.config.rules.accepted import LEFT_OUT, RANKS, nearest_first
from phalanx.config.rules.mesh_changes import (
    OTHER_SCHEDULES,
    one_stage_schedules,
    other_batches,
    other_sizes,
    ranks_with_replicas,
    smaller_micro_batches,
)
from phalanx.config.rules.numbers import divisors, nearest_divisor, nearest_multiple
from phalanx.config.schema import Job, Model, Parallel, gate_up_groups
from phalanx.config.stages.ramp import batch_ramp
from phalanx.config.virtual_replicas import padded_micro_batches

MOST_RANKS = 10_000_000  # well above any cluster


def micro_batches(job: Job) -> int:
    """Micro-batches of the largest step on each replica."""
    return padded_micro_batches(job, batch_ramp(job).largest)


def takes_unequal_shares(job: Job) -> bool:
    """Whether replicas may compute unequal numbers of micro-batches: none of them communicates.

    Stages, experts and ZeRO 2 and 3 exchange something for every one, so that all need as many.
    Virtual replicas stay where the order of sums wants them.
    """
    axes = job.parallel
    if job.train.virtual_replicas:
        return False
    return axes.pipeline == 1 and axes.expert == 1 and axes.zero <= 1


def mesh_problems(job: Job, world_size: int) -> list[ConfigProblem]:
    """Every reason why a resolved job's axes do not fit each other or the world size."""
    axes = job.parallel
    return [
        *_world(axes, world_size),
        *_sharding(axes),
        *(_tensor(job, world_size) if axes.tensor > 1 else ()),
        *_async_tensor(job),
        *_pipeline(job, world_size),
        *(_context(job, world_size) if axes.context > 1 else ()),
        *_sequence(job),
        *_expert(job),
    ]


def _world(axes: Parallel, world_size: int) -> Iterator[ConfigProblem]:
    if world_size > MOST_RANKS:
        rule, fix = f"must be at most {MOST_RANKS:,}", f"nearest: {MOST_RANKS}"
        yield problem("world size", world_size, rule, fix)
    rest = axes.pipeline * axes.context * axes.tensor
    product = rest * axes.data
    if product == world_size:
        return
    fewer = [{"parallel.data": data} for data in (world_size // rest, LEFT_OUT) if data]
    more = [{RANKS: product}, *ranks_with_replicas("parallel.data", axes, world_size)]
    if world_size % rest == 0:
        fix = f"set parallel.data = {world_size // rest}, or start {product} ranks"
    else:
        nearest = nearest_multiple(world_size, rest)
        fix = f"start {nearest} ranks with parallel.data = {nearest // rest}"
    yield problem(
        "world size",
        world_size,
        f"must be pipeline * data * context * tensor = {axes.pipeline} * {axes.data} * "
        f"{axes.context} * {axes.tensor} = {product}",
        fix,
        fewer,
        more,
    )


def _sharding(axes: Parallel) -> Iterator[ConfigProblem]:
    if axes.data % axes.replicate:
        yield problem(
            "parallel.replicate",
            axes.replicate,
            f"must divide parallel.data ({axes.data})",
            f"nearest: {nearest_divisor(axes.data, axes.replicate)}",
            [
                {"parallel.replicate": size}
                for size in nearest_first(divisors(axes.data), axes.replicate)
            ],
        )
    elif axes.zero == 0 and axes.replicate != axes.data:
        yield problem(
            "parallel.replicate",
            axes.replicate,
            "zero = 0 shards nothing: every replica holds a full copy",
            "leave it out, or set parallel.zero = 3",
            [{"parallel.replicate": 1}],
            [{"parallel.zero": 3}],
        )


def _tensor(job: Job, world_size: int) -> Iterator[ConfigProblem]:
    model, tensor = job.model, job.parallel.tensor
    parts = list(_split_by_tensor(model))
    common = math.gcd(*(size for _, size, _ in parts))
    nearest = nearest_divisor(common, tensor)
    others = other_sizes("parallel.tensor", job.parallel, world_size, divisors(common))
    for key, size, why in parts:
        if size % tensor:
            rule = f"must divide {key} ({size}): {why}"
            yield problem("parallel.tensor", tensor, rule, f"nearest: {nearest}", *others)
    if model.vocab % tensor:
        padded = -(-model.vocab // tensor) * tensor
        yield problem(
            "parallel.tensor",
            tensor,
            f"must divide model.vocab ({model.vocab}): embedding and head are split by rows",
            f"pad model.vocab to {padded}",
            [{"model.vocab": padded}],
            others[0],
        )


def _async_tensor(job: Job) -> Iterator[ConfigProblem]:
    if not job.parallel.async_tensor:
        return
    if job.train.device == "cpu":
        yield problem(
            "parallel.async_tensor",
            True,
            "overlaps through CUDA's symmetric memory, and train.device is cpu",
            'set it to false, or train.device to "cuda"',
        )
    if job.parallel.tensor == 1:
        yield problem(
            "parallel.async_tensor",
            True,
            "overlaps the gathers of tensor parallelism, and parallel.tensor is 1",
            "set it to false",
        )
    if job.train.compile == "off":
        yield problem(
            "parallel.async_tensor",
            True,
            "the compiler does the overlapping, and train.compile is off",
            'set it to false, or train.compile to "auto"',
        )


def _split_by_tensor(model: Model) -> Iterator[tuple[str, int, str]]:
    """What tensor parallelism cuts: the key, its number of parts, and why it must come out even.

    Experts are not cut: routed tokens stay in their rank's slice of the sequence.
    """
    if model.latent is not None or model.kv_heads == model.heads:
        yield "model.heads", model.heads, "a rank holds whole heads"
    else:
        yield (
            "model.kv_heads",
            model.kv_heads,
            "a rank holds whole groups of heads, and key/value heads are not replicated",
        )
    dense = model.moe is None or model.moe.first_dense_layers > 0
    if dense and not is_gated(model):
        yield "model.ffn", model.ffn, "the hidden width is split"
    elif dense:
        yield (
            f"the row groups of model.ffn = {model.ffn}",
            gate_up_groups(model.ffn),
            "gate and up rows are split together",
        )


def _pipeline(job: Job, world_size: int) -> Iterator[ConfigProblem]:
    axes, layers = job.parallel, job.model.layers
    stages = axes.pipeline * axes.virtual_stages
    most = layers if axes.pipeline > layers else layers // axes.virtual_stages
    fewer = other_sizes("parallel.pipeline", axes, world_size, range(1, max(1, most) + 1))
    plain = {"parallel.virtual_stages": LEFT_OUT, "parallel.schedule": "1f1b"}
    fewer[0] += [{**change, **plain} for change in fewer[0]]
    if axes.pipeline > layers:
        yield problem(
            "parallel.pipeline",
            axes.pipeline,
            f"must be at most model.layers ({layers})",
            f"nearest: {layers}",
            *fewer,
        )
    elif stages > layers:
        yield problem(
            "parallel.virtual_stages",
            axes.virtual_stages,
            f"pipeline * virtual_stages = {stages} stages need as many layers, not {layers}",
            f"nearest: {layers // axes.pipeline}",
            [{"parallel.virtual_stages": count} for count in range(axes.virtual_stages - 1, 0, -1)],
            [*one_stage_schedules(), *one_stage_schedules({"parallel.virtual_stages": LEFT_OUT})],
            *fewer,
        )
    if axes.pipeline == 1:
        if axes.virtual_stages != 1:
            yield problem(
                "parallel.virtual_stages",
                axes.virtual_stages,
                "there is no pipeline (parallel.pipeline = 1)",
                "leave it out",
                [{"parallel.virtual_stages": LEFT_OUT}],
            )
        return
    yield from _virtual_stages(axes)
    yield from _enough_micro_batches(job)
    if axes.schedule == "zero-bubble":
        yield from _zero_bubble(job)


def _zero_bubble(job: Job) -> Iterator[ConfigProblem]:
    """The schedule splits backward in two: inputs first, weights when a rank would idle."""
    axes = job.parallel
    if job.train.compile == "on":
        yield problem(
            "train.compile",
            '"on"',
            "zero-bubble splits backward in two, which compiled blocks cannot",
            'set it to "off", or parallel.schedule to "interleaved"',
            [{"train.compile": "off"}],
            OTHER_SCHEDULES,
        )
    if job.memory.recompute == "selective":
        yield problem(
            "memory.recompute",
            '"selective"',
            "zero-bubble splits backward in two, and what is kept serves one backward only",
            'set it to "full" or "none", or parallel.schedule to "interleaved"',
            [{"memory.recompute": "full"}],
            [{"memory.recompute": "none"}],
            OTHER_SCHEDULES,
        )
    if job.model.mtp is not None:
        yield problem(
            "parallel.schedule",
            '"zero-bubble"',
            "splits backward in two, which the head that model.mtp uses several times cannot",
            'set it to "interleaved", or model.mtp to "none"',
            OTHER_SCHEDULES,
        )
    sharded = axes.data * axes.context * (axes.tensor if job.model.moe else 1) > 1
    if axes.zero == 3 and sharded:
        yield problem(
            "parallel.zero",
            3,
            "zero-bubble makes weight gradients long after the layer ran, so its weights must "
            "stay gathered until then",
            'set it to 2, or parallel.schedule to "interleaved"',
            [{"parallel.zero": 2}],
            OTHER_SCHEDULES,
        )


def _virtual_stages(axes: Parallel) -> Iterator[ConfigProblem]:
    rules = {
        "gpipe": (axes.virtual_stages == 1, "exactly 1"),
        "1f1b": (axes.virtual_stages == 1, "exactly 1"),
        "interleaved": (axes.virtual_stages >= 2, "at least 2"),
        "zero-bubble": (axes.virtual_stages == 2, "exactly 2"),
    }
    kept, wanted = rules[axes.schedule]
    if not kept:
        yield problem(
            "parallel.virtual_stages",
            axes.virtual_stages,
            f'parallel.schedule = "{axes.schedule}" needs {wanted} stages per rank',
            f"set it to {wanted[-1]}, or leave it out",
            [{"parallel.virtual_stages": int(wanted[-1])}],
            [{"parallel.virtual_stages": LEFT_OUT}],
            OTHER_SCHEDULES,
        )


def _enough_micro_batches(job: Job) -> Iterator[ConfigProblem]:
    for number, stage in enumerate(job.train.batch_ramp):
        key = f"train.batch_ramp[{number}].global_batch"
        yield from _enough_for_schedule(job, stage.global_batch, key)
    yield from _enough_for_schedule(job, job.train.global_batch, "train.global_batch")


def _enough_for_schedule(job: Job, batch: int, key: str) -> Iterator[ConfigProblem]:
    axes, count = job.parallel, padded_micro_batches(job, batch)
    per_micro_batch = axes.data * job.train.micro_batch
    if axes.schedule in ("1f1b", "zero-bubble") and count < axes.pipeline:
        yield problem(
            key,
            batch,
            f"gives {count} micro-batches a replica, and {axes.schedule} over {axes.pipeline} "
            f"ranks needs at least {axes.pipeline}",
            f"nearest: {axes.pipeline * per_micro_batch}",
            *other_batches(key, axes.pipeline * per_micro_batch),
            *smaller_micro_batches(job),
        )
    rounds = max(1, count // axes.pipeline)
    if axes.schedule == "interleaved" and count % rounds:
        near = nearest_multiple(count, axes.pipeline)
        yield problem(
            key,
            batch,
            f"gives {count} micro-batches a replica, which interleaved over {axes.pipeline} ranks "
            f"cannot cut into {rounds} equal rounds",
            f"nearest: {near * per_micro_batch}",
            *other_batches(key, near * per_micro_batch),
            *smaller_micro_batches(job),
        )


def _context(job: Job, world_size: int) -> Iterator[ConfigProblem]:
    axes, model = job.parallel, job.model
    latent = model.latent
    if axes.context_method == "ring" and latent and latent.value_head_dim > model.head_dim:
        yield problem(
            "model.latent.value_head_dim",
            latent.value_head_dim,
            f"ring attention needs values no wider than keys ({model.head_dim})",
            'set parallel.context_method = "ulysses"',
        )
    if axes.context_method == "ulysses":
        name = "heads" if model.latent is not None else "kv_heads"
        heads_of_rank = (heads := getattr(model, name)) // axes.tensor
        if heads_of_rank == 0 or heads_of_rank % axes.context:
            other = "" if not ring_computes(model) else ', or parallel.context_method = "ring"'
            yield problem(
                "parallel.context",
                axes.context,
                f"ulysses needs it to divide model.{name} / tensor ({heads} / {axes.tensor})",
                f"nearest: {nearest_divisor(max(1, heads_of_rank), axes.context)}{other}",
                *other_sizes("parallel.context", axes, world_size, divisors(max(1, heads_of_rank))),
                [{"parallel.context_method": "ring"}],
            )


def _sequence(job: Job) -> Iterator[ConfigProblem]:
    axes, sequence = job.parallel, job.data.sequence
    if axes.context > 1 and axes.context_method == "ring":
        # Each rank takes a chunk from the front and one from the back, so that all work equally.
        unit = math.lcm(2 * axes.context, axes.context * axes.tensor)
        parts = "2 * context for the ring's load balance, and context * tensor"
    else:
        unit = axes.context * axes.tensor
        parts = "context * tensor"
    if sequence % unit:
        yield problem(
            "data.sequence",
            sequence,
            f"must be a multiple of {unit} ({parts})",
            f"nearest: {nearest_multiple(sequence, unit)}",
            [{"data.sequence": nearest_multiple(sequence, unit)}],
        )


def _expert(job: Job) -> Iterator[ConfigProblem]:
    axes, moe = job.parallel, job.model.moe
    if axes.expert == 1:
        return
    if moe is None:
        rule = "the model has no experts"
        yield problem("parallel.expert", axes.expert, rule, "set it to 1", [{"parallel.expert": 1}])
        return
    ranks = axes.data // axes.replicate * axes.context * axes.tensor
    common = math.gcd(moe.experts, ranks) if ranks else 1
    others = [{"parallel.expert": size} for size in nearest_first(divisors(common), axes.expert)]
    if moe.experts % axes.expert:
        yield problem(
            "parallel.expert",
            axes.expert,
            f"must divide model.moe.experts ({moe.experts})",
            f"nearest: {nearest_divisor(moe.experts, axes.expert)}",
            others,
        )
    if ranks == 0 or ranks % axes.expert:
        fix = f"nearest: {nearest_divisor(max(1, ranks), axes.expert)}"
        yield problem(
            "parallel.expert",
            axes.expert,
            f"must divide (data / replicate) * context * tensor ({ranks})",
            fix,
            others,
            [{"parallel.zero": zero} for zero in (3, 2, 1)],
        )
