"""The time of a step, for many mappings at once.

    step = (m * slowest + bubble + exposed data-parallel + optimizer + host) * straggler * allocator

``slowest`` is the busiest pipeline rank's forward and backward of one micro-batch: its blocks
and head with the exposed communication of the tensor, context and expert axes, recompute, and
sends between stages. The host launches every kernel: a device that has less to do than that takes
waits for it. Where memory is so short that the allocator gives blocks back and asks again in every
step, all of it takes longer. Terms that only depend on how a block is divided are computed once for
each distinct division.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.config import shares_embedding
from phalanx.plan.cost.axes import (
    block_exposed,
    gathered_block_seconds,
    head_exposed,
    left_over,
    reduced_seconds,
)
from phalanx.plan.cost.collectives import send_seconds
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.layer import (
    Pricing,
    Split,
    block_launches,
    block_time,
    head_time,
    tokens_of,
)
from phalanx.plan.cost.pipeline import Bottleneck, bottleneck, idle_share
from phalanx.plan.grid import Floats, Grid, Ints
from phalanx.plan.machine import Machine
from phalanx.plan.memory.kept_activations import block_bytes
from phalanx.plan.memory.model_counts import prediction_layers
from phalanx.plan.memory.offload import activation_seconds, fetch_seconds, update_seconds
from phalanx.plan.memory.peak import PeakMemory
from phalanx.plan.memory.rank_parameters import block_tensors, head_tensors, held
from phalanx.plan.memory.stages import first_moe_layer, is_folded
from phalanx.plan.workload import RECOMPUTES, SCHEDULES, Software, Workload

UPDATE_BYTES = 18.0  # read and write the fp32 weight, read the gradient twice, write bf16
SPLIT_BACKWARD = [SCHEDULES.index(name) for name in ("zb-h1", "zero-bubble", "dualpipe")]
# Of published runs those whose allocator had room for less than a fifth of what it likes to hold
# took about a tenth longer than others of their software; the others no longer.
PRESSED_FROM, MOST_PRESSED = 0.8, 0.15
FULL, SELECTIVE = RECOMPUTES.index("full"), RECOMPUTES.index("selective")


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step and of its parts; one entry a mapping."""

    seconds: Floats
    parts: dict[str, Floats]


def step_time(
    workload: Workload, grid: Grid, machine: Machine, constants: Constants, software: Software
) -> StepSeconds:
    """Price every mapping of the grid."""
    pricing = Pricing(workload, machine, software, constants, grid.precision)
    m = grid.micro_batches(workload.global_batch).astype(np.float64)
    worst = bottleneck(workload, software, grid)
    parts = dict.fromkeys(
        ("matmul", "attention", "elementwise", "recompute", "tensor", "context", "expert", "data"),
        np.zeros(len(grid)),
    )
    mean = np.zeros(len(grid))
    forward = np.zeros(len(grid))
    elements = np.zeros(len(grid))
    again = np.zeros(len(grid))
    mean_elements = np.zeros(len(grid))
    model, first_moe = workload.model, first_moe_layer(workload.model)
    kinds = [(False, worst.dense, first_moe), (True, worst.moe, model.layers - first_moe)]
    for moe, count, layers in kinds:
        if layers:
            block = _block_parts(pricing, grid, moe=moe)
            for name, seconds in block.parts.items():
                parts[name] = parts[name] + count * seconds
            mean = mean + layers / grid.pipeline * sum(block.parts.values())
            mean_elements = mean_elements + layers / grid.pipeline * block.elements
            forward = forward + count * block.forward
            elements = elements + count * block.elements
            again = again + count * block.products_again
    head = _head_parts(pricing, grid)
    for name, seconds in head.parts.items():
        parts[name] = parts[name] + worst.head * seconds
    mean = mean + sum(head.parts.values()) / grid.pipeline
    mean = mean + _accumulate_seconds(pricing, mean_elements + head.elements / grid.pipeline)
    elements = elements + worst.head * head.elements
    parts["elementwise"] = parts["elementwise"] * _split_backward(pricing, grid)
    parts["elementwise"] = parts["elementwise"] + _accumulate_seconds(pricing, elements)
    parts["pipeline"] = _send_seconds(pricing, grid)
    backward = sum(parts.values()) - forward
    mean = mean + parts["pipeline"]
    p = grid.pipeline
    others = np.maximum(0.0, p * mean - sum(parts.values())) / np.maximum(1, p - 1)
    parts = {name: m * seconds for name, seconds in parts.items()}
    parts["pipeline"] = parts["pipeline"] + _embedding_seconds(pricing, grid)
    parts["bubble"] = idle_share(grid) * others
    parts["data"] = parts["data"] + reduced_seconds(grid, elements, forward, backward, pricing)
    parts["optimizer"] = _optimizer_seconds(pricing, grid, elements)
    parts["offload"] = _offload_seconds(pricing, grid, elements, worst, m, forward, backward)
    _boost(parts, m * again, constants.boost)
    parts["host"] = constants.step_seconds + _waits_for_host(pricing, grid, worst, m, parts)
    parts["host"] = parts["host"] + constants.unmodelled * sum(parts.values())
    busy = sum(parts.values())
    parts["straggler"] = busy * straggler_share(grid.gpus, constants)
    pace = constants.pace.get(f"{software.name}:{workload.kind}", 1.0)
    paced = {name: pace * seconds for name, seconds in parts.items()} if pace != 1.0 else parts
    return StepSeconds(pace * (busy + parts["straggler"]), paced)


def slowed_by_allocator(
    time: StepSeconds, held: PeakMemory, machine: Machine, software: Software
) -> StepSeconds:
    """The same steps where the device is so full that the allocator works in each of them.

    Of software that nobody named it is not known how much it holds so well.
    """
    if not software.name:
        return time
    beyond = held.crowding(machine.memory_bytes) - PRESSED_FROM
    pressed = np.clip(beyond / (1 - PRESSED_FROM), 0.0, 1.0)
    longer: Floats = MOST_PRESSED * pressed * time.seconds
    if not longer.any():
        return time
    return StepSeconds(time.seconds + longer, time.parts | {"allocator": longer})


def _waits_for_host(
    pricing: Pricing, grid: Grid, worst: Bottleneck, m: Floats, parts: dict[str, Floats]
) -> Floats:
    """What the device waits because the host has not launched its kernels yet."""
    if not pricing.constants.launch_seconds:
        return np.zeros(len(grid))
    software, constants = pricing.software, pricing.constants
    # Forward, backward (two kernels for one) and what is recomputed; a collective is launched as
    # a kernel is.
    again = np.where(grid.recompute == FULL, 4.0, 3.0)
    gathers = np.where(grid.zero == 3, 3.0 * software.gathers_per_block, 0.0)
    sums = np.where(grid.tensor > 1, 8.0, 0.0)
    dense = again * block_launches(pricing, moe=False) + gathers + sums
    moe = again * block_launches(pricing, moe=True) + gathers + sums
    launching = m * (worst.dense * dense + worst.moe * moe) * constants.launch_seconds
    experts = pricing.workload.model.moe
    if experts is not None and not (software.fused_experts or software.experts_together):
        products = 2 * again * experts.experts / grid.expert
        launching = launching + m * worst.moe * products * constants.expert_launch_seconds
    late: Floats = launching - sum(parts.values())
    return np.maximum(late, 0.0)


def floor_seconds(
    workload: Workload, grid: Grid, machine: Machine, constants: Constants, software: Software
) -> Floats:
    """What no level of ZeRO, recompute or offload can bring a step of these mappings below.

    The grid must be without them: then only the data axis and the optimizer are taken away.
    """
    time = step_time(workload, grid, machine, constants, software)
    less = (time.parts["data"] + time.parts["optimizer"]) * (1 + constants.unmodelled)
    return time.seconds - less * (1 + straggler_share(grid.gpus, constants))


def straggler_share(gpus: Ints, constants: Constants) -> Floats:
    """How much later the slowest of n ranks is than the mean: about sqrt(2 ln n) deviations."""
    late: Floats = constants.straggler * np.sqrt(2 * np.log(np.maximum(gpus, 1)))
    return late


@dataclass(frozen=True)
class _Block:
    """One block on one rank for one micro-batch, both directions; one entry a mapping."""

    parts: dict[str, Floats]
    forward: Floats
    elements: Floats  # parameters held
    products_again: Floats  # of what is recomputed


def _boost(parts: dict[str, Floats], again: Floats, boost: float) -> None:
    """Products run faster where kernels that draw less power stand between them.

    With x their own time and o all other: x * (1 + boost * o / (x + o)) is what they take alone.
    """
    if not boost:
        return
    alone = parts["matmul"] + again
    others = sum(parts.values()) - alone
    surplus = others * (1 + boost) - alone
    faster = (np.sqrt(surplus**2 + 4 * alone * others) - surplus) / (2 * alone)
    parts["matmul"] = parts["matmul"] * faster
    parts["recompute"] = parts["recompute"] - again * (1 - faster)


def _divisions(grid: Grid, *, sharded: bool) -> tuple[Split, Ints, Ints, Ints]:
    """Distinct divisions of a block, the shards of each, and which one every mapping has."""
    shards = np.where(grid.zero == 3, grid.shards, 1) if sharded else np.ones_like(grid.tensor)
    columns = (grid.tensor, grid.context, grid.expert, grid.micro_batch, shards)
    key = np.zeros_like(grid.tensor)
    for column in columns:
        key = key * (int(column.max()) + 1) + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    chosen = [column[first].astype(np.float64) for column in columns]
    return Split(*chosen[:4]), shards[first], first, inverse.reshape(-1)


def _block_parts(pricing: Pricing, grid: Grid, *, moe: bool) -> _Block:
    split, shards, first, inverse = _divisions(grid, sharded=True)
    time = block_time(split, pricing, moe=moe)
    forward, backward = block_exposed(split, pricing, time, moe=moe)
    tensors = block_tensors(pricing.workload.model, moe)
    elements = held(tensors, grid.tensor[first], grid.expert[first]).astype(np.float64)
    gathered = np.where(
        shards > 1,
        gathered_block_seconds(split, shards.astype(np.float64), elements, time, pricing),
        0.0,
    )
    # What each level of recompute repeats: nothing; cheap passes and the products that were not
    # kept (attention where it is not fused); the whole forward with its communication.
    unfused = pricing.software.attention == "unfused"
    dropped = time.matmul * (1 - pricing.software.selective_share)
    selective = time.attention if unfused else time.elementwise - time.routing + dropped
    again = np.where(
        (grid.recompute == FULL),
        (time.forward + forward.total)[inverse],
        np.where(grid.recompute == SELECTIVE, selective[inverse], 0.0),
    )
    products_again = np.where(
        (grid.recompute == FULL),
        time.matmul[inverse],
        np.where(grid.recompute == SELECTIVE, 0.0 if unfused else dropped[inverse], 0.0),
    )
    parts = {
        "matmul": (time.matmul + time.matmul_backward)[inverse],
        "attention": (time.attention + time.attention_backward)[inverse],
        "elementwise": (time.elementwise + time.elementwise_backward)[inverse],
        "recompute": again,
        "tensor": (forward.tensor + backward.tensor)[inverse],
        "context": (forward.context + backward.context)[inverse],
        "expert": (forward.expert + backward.expert)[inverse],
        "data": gathered[inverse],
    }
    whole = (time.forward + forward.total)[inverse]
    return _Block(parts, whole, elements[inverse], products_again)


def _head_parts(pricing: Pricing, grid: Grid) -> _Block:
    split, _, first, inverse = _divisions(grid, sharded=False)
    time = head_time(split, pricing)
    turns = 1 + prediction_layers(pricing.workload.model)
    parts = {
        "matmul": turns * (time.matmul + time.matmul_backward)[inverse],
        "elementwise": turns * (time.elementwise + time.elementwise_backward)[inverse],
        "tensor": turns * head_exposed(split, pricing)[inverse],
    }
    elements = held(head_tensors(pricing.workload.model), grid.tensor[first], grid.expert[first])
    own = elements.astype(np.float64)[inverse]
    return _Block(parts, turns * time.forward[inverse], own, np.zeros(len(grid)))


def _split_backward(pricing: Pricing, grid: Grid) -> Floats:
    """Zero-bubble schedules split backward in two, which the compiler cannot fuse."""
    factor = pricing.constants.eager if pricing.software.fused else 1.0
    split = (grid.pipeline > 1) & np.isin(grid.schedule, SPLIT_BACKWARD)
    return np.where(split, factor, 1.0)


def _accumulate_seconds(pricing: Pricing, elements: Floats) -> Floats:
    """Gradients of each micro-batch are added to those before: read and written once."""
    bandwidth = pricing.machine.memory_bandwidth * pricing.constants.memory
    return 2 * pricing.software.gradient_bytes * elements / bandwidth


def _send_seconds(pricing: Pricing, grid: Grid) -> Floats:
    """Activations to the next stage and gradients back, for each stage that a rank holds."""
    split = Split(
        *(
            np.asarray(a, dtype=np.float64)
            for a in (grid.tensor, grid.context, grid.expert, grid.micro_batch)
        )
    )
    nbytes = pricing.width * tokens_of(split, pricing.workload) * pricing.workload.model.dim
    nbytes = nbytes / grid.tensor  # sent in slices, gathered again inside the domain
    stride = (grid.tensor * grid.context * grid.data).astype(np.float64)
    span = grid.gpus.astype(np.float64)
    seconds = send_seconds(nbytes, stride, span, pricing.machine, pricing.constants)
    if pricing.software.overlap_pipeline:
        seconds = seconds * (1 - pricing.constants.hidden)
    return np.where(grid.pipeline > 1, 2 * grid.virtual_stages * seconds, 0.0)


def _embedding_seconds(pricing: Pricing, grid: Grid) -> Floats:
    """An embedding that the last stage shares: its values there and gradients back, once a step.

    Where stages fold back both are on one rank.
    """
    if not shares_embedding(pricing.workload.model):
        return np.zeros(len(grid))
    model = pricing.workload.model
    own = model.vocab * model.dim / grid.tensor / np.where(grid.zero > 0, grid.shards, 1)
    ranks = (grid.tensor * grid.context * grid.data).astype(np.float64)
    stride = ranks * np.maximum(1, grid.pipeline - 1)
    span = grid.gpus.astype(np.float64)
    seconds = send_seconds(2 * 4.0 * own, stride, span, pricing.machine, pricing.constants)
    return np.where((grid.pipeline > 1) & ~is_folded(grid), seconds, 0.0)


def _optimizer_seconds(pricing: Pricing, grid: Grid, elements: Floats) -> Floats:
    """The update passes over the rank's share of the state."""
    own = elements / np.where(grid.zero > 0, grid.shards, 1)
    passed = (UPDATE_BYTES + 2 * pricing.workload.moment_bytes) * own
    return passed / (pricing.machine.memory_bandwidth * pricing.constants.memory)


def _offload_seconds(
    pricing: Pricing,
    grid: Grid,
    elements: Floats,
    worst: Bottleneck,
    m: Floats,
    forward: Floats,
    backward: Floats,
) -> Floats:
    """What a step waits for state and activations that are not on the device."""
    if not grid.offload.any():
        return np.zeros(len(grid))
    machine, software = pricing.machine, pricing.software
    own = elements / np.where(grid.zero > 0, grid.shards, 1)
    fetched = left_over(fetch_seconds(grid, own, machine), forward + backward, pricing)
    kept = np.zeros(len(grid))
    for moe, blocks in ((False, worst.dense), (True, worst.moe)):
        if blocks.any():
            options = (pricing.workload, grid, software, grid.recompute)
            kept = kept + blocks * block_bytes(*options, moe=moe)
    moved = activation_seconds(grid, kept, machine)
    if software.overlap_offload:
        moved = left_over(moved, forward + backward, pricing)
    return m * (fetched + moved) + update_seconds(grid, own, machine, pricing.workload.moment_bytes)
