"""Communication of each axis: what a block moves, and how much of it cannot be hidden.

tensor   forward and backward: two gathers and two scatters of [tokens, dim] a dense block (an
         all-reduce moves as much), one of each where the second half is experts; one of each
         around embedding and head, and two numbers a token of the loss
context  keys and values pass around a ring beside attention: (c-1) * tokens * kv width * 2;
         in backward they do again, and their gradients all the way home: c times
expert   tokens travel to their experts and back, once a direction
data     ZeRO 0: all-reduce of gradients; 1, 2: reduce-scatter, then all-gather of weights;
         3: weights are gathered block by block in forward and in backward
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.config import Moe
from phalanx.plan.cost.collectives import (
    CommGroups,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    bus_bandwidth,
    group,
    pod_share,
)
from phalanx.plan.cost.layer import NARROW, BlockTime, Pricing, Split, tokens_of
from phalanx.plan.grid import Floats, Grid


@dataclass(frozen=True)
class Exposed:
    """Seconds of one direction that no compute hides."""

    tensor: Floats
    context: Floats
    expert: Floats

    @property
    def total(self) -> Floats:
        return self.tensor + self.context + self.expert


def block_exposed(
    split: Split, pricing: Pricing, time: BlockTime, *, moe: bool
) -> tuple[Exposed, Exposed]:
    """Exposed communication of a block in forward and in backward."""
    tensor = _tensor_seconds(split, pricing, moe=moe)
    ring = _ring_seconds(split, pricing)
    forward_ring = left_over(ring, time.attention, pricing)
    # Of ``c - 1`` passes forward, backward makes as many and another ``c`` of gradients.
    passes = (2 * split.context - 1) / np.maximum(1, split.context - 1)
    backward_ring = left_over(passes * ring, time.attention_backward, pricing)
    expert = _expert_seconds(split, pricing) if moe else np.zeros_like(tensor)
    if pricing.software.overlap_expert:
        expert = left_over(expert, time.forward, pricing)
    merge, merge_backward = _merge_seconds(split, pricing)
    return (
        Exposed(tensor, forward_ring + merge, expert),
        Exposed(tensor, backward_ring + merge_backward, expert),
    )


def left_over(
    seconds: Floats, compute: Floats, pricing: Pricing, rate: Floats | float = 1.0
) -> Floats:
    """What is left of communication that runs beside ``compute``, with its interference.

    Moving bytes takes multiprocessors and memory from the compute beside it, the more the
    faster they move: ``rate`` is that of the communication over the link's.
    """
    hidden = np.minimum(seconds * pricing.constants.hidden, compute)
    return seconds - hidden * (1 - pricing.constants.interference * rate)


def _rate(ranks: CommGroups, pricing: Pricing) -> Floats:
    """Bandwidth of a large ring over the link's."""
    bandwidth = bus_bandwidth(ranks, pricing.machine, pricing.constants)
    return bandwidth / (pricing.machine.link_bandwidth * pricing.constants.link)


def _tensor_seconds(split: Split, pricing: Pricing, *, moe: bool) -> Floats:
    constants, machine = pricing.constants, pricing.machine
    nbytes = pricing.width * tokens_of(split, pricing.workload) * pricing.workload.model.dim
    ranks = group(split.tensor, np.ones_like(split.tensor), machine)
    times = 1 if moe else 2
    if not pricing.software.sequence_parallel:
        return times * all_reduce_seconds(nbytes, ranks, machine, constants)
    seconds = 2 * times * all_gather_seconds(nbytes, ranks, machine, constants)
    if pricing.software.overlap_tensor:
        seconds = seconds * (1 - constants.tensor_hidden)
    return seconds


def head_exposed(split: Split, pricing: Pricing) -> Floats:
    """Of the tensor axis around embedding, head and loss, both directions.

    The embedding's sum is scattered and the head's input gathered, and back; the loss has the
    largest logit of a token over all ranks, then the sum of its exponentials.
    """
    tokens = tokens_of(split, pricing.workload)
    nbytes = pricing.width * tokens * pricing.workload.model.dim
    ranks = group(split.tensor, np.ones_like(split.tensor), pricing.machine)
    rest = (ranks, pricing.machine, pricing.constants)
    statistics = all_reduce_seconds(4.0 * tokens, *rest) + all_reduce_seconds(8.0 * tokens, *rest)
    if not pricing.software.sequence_parallel:
        return 2 * all_reduce_seconds(nbytes, *rest) + statistics
    return 4 * all_gather_seconds(nbytes, *rest) + statistics


def _ring_seconds(split: Split, pricing: Pricing) -> Floats:
    """All steps of the ring in forward; also what gathering keys and values would take."""
    model = pricing.workload.model
    if model.latent is not None:
        width = model.heads * (model.head_dim + model.latent.value_head_dim) / split.tensor
    else:
        width = 2 * model.kv_heads * model.head_dim / np.minimum(split.tensor, model.kv_heads)
    nbytes = pricing.width * tokens_of(split, pricing.workload) * split.context * width
    ranks = group(split.context, split.tensor, pricing.machine)
    return all_gather_seconds(nbytes, ranks, pricing.machine, pricing.constants)


def _merge_seconds(split: Split, pricing: Pricing) -> tuple[Floats, Floats]:
    """Passes over memory that a ring adds: each of its steps gives a part of the result.

    Parts are summed in fp32 (two are read, one is written): outputs in forward; in backward
    gradients of queries, keys and values.
    """
    model = pricing.workload.model
    tokens = tokens_of(split, pricing.workload)
    queries = tokens * model.heads * model.head_dim / split.tensor
    keys = tokens * 2 * model.kv_heads * model.head_dim / np.minimum(split.tensor, model.kv_heads)
    steps = np.where(split.context > 1, split.context, 0.0)
    forward = pricing.memory_seconds(steps * 12.0 * queries)
    return forward, pricing.memory_seconds(steps * 12.0 * (queries + keys))


def _expert_seconds(split: Split, pricing: Pricing) -> Floats:
    """Dispatch and combine; a token goes once to each domain that has an expert of its own."""
    model = pricing.workload.model
    moe = model.moe
    assert moe is not None
    machine, constants = pricing.machine, pricing.constants
    tokens = tokens_of(split, pricing.workload) / split.tensor
    ranks = group(split.expert, np.ones_like(split.expert), machine)
    # Tokens go out in the format that multiplies (8 bits with their scales) and return in 16.
    width = pricing.width if pricing.precision not in NARROW else 1.5
    nbytes = width * tokens * moe.top_k * model.dim
    domains = ranks.domains
    dedup = np.where(domains > 1, visited_domains(domains, moe) / moe.top_k, 1.0)
    share = pod_share(split.expert, np.full_like(split.expert, np.inf), machine)
    network = machine.network_bandwidth * constants.network * share
    outside = nbytes * dedup * (domains - 1) / domains / network
    inside = all_to_all_seconds(
        nbytes, group(ranks.inside, ranks.inside * 0 + 1, machine), machine, constants
    )
    both = 2 * np.maximum(inside, outside) / constants.expert_exchange
    return np.where(split.expert > 1, both, 0.0)


def visited_domains(domains: Floats, moe: Moe) -> Floats:
    """Domains in which a token has experts, on average over balanced tokens.

    Neighbouring experts share a domain: where a token visits some groups of them, it is only in
    the domains of those.
    """
    wide = domains * moe.top_groups / moe.groups  # of groups that lie across domains
    narrow = _hit(domains, moe.top_groups)  # of groups that share them
    allowed = np.where(domains >= moe.groups, np.maximum(wide, 1.0), narrow)
    return _hit(allowed if moe.groups > 1 else domains, moe.top_k)


def _hit(places: Floats, draws: int) -> Floats:
    """How many of some places are met in so many draws."""
    met: Floats = places * (1 - (1 - 1 / places) ** draws)
    return met


def gathered_block_seconds(
    split: Split, shards: Floats, held_elements: Floats, time: BlockTime, pricing: Pricing
) -> Floats:
    """ZeRO 3: what a micro-batch waits for a block's weights and gradients."""
    ranks = group(shards, split.tensor, pricing.machine)
    software = pricing.software
    times, logarithmic = software.gathers_per_block, software.logarithmic_gathers
    rest = (ranks, pricing.machine, pricing.constants)
    each = held_elements / times
    weights = times * all_gather_seconds(
        pricing.gathered_width * each, *rest, logarithmic=logarithmic
    )
    gradients = times * all_gather_seconds(
        software.reduce_bytes * each, *rest, logarithmic=logarithmic
    )
    if not software.overlap_gradients:
        return 2 * weights + gradients
    rate = _rate(ranks, pricing)
    forward = left_over(weights, time.forward, pricing, rate)
    backward = left_over(weights + gradients, time.backward, pricing, rate)
    return forward + backward


def reduced_seconds(
    grid: Grid, held_elements: Floats, forward: Floats, backward: Floats, pricing: Pricing
) -> Floats:
    """ZeRO 0 to 2, once a step: gradients are summed, and divided weights gathered again.

    ``forward`` and ``backward`` are one micro-batch's compute, beside which it can run.
    """
    machine, constants, software = pricing.machine, pricing.constants, pricing.software
    size = (grid.data * grid.context).astype(np.float64)
    ranks = group(size, grid.tensor.astype(np.float64), machine)
    gradient_bytes = software.reduce_bytes * held_elements
    whole = all_reduce_seconds(
        gradient_bytes, ranks, machine, constants, in_network=software.in_network_reduction
    )
    scattered = all_gather_seconds(gradient_bytes, ranks, machine, constants)
    weights = all_gather_seconds(pricing.gathered_width * held_elements, ranks, machine, constants)
    sums = np.where(grid.zero == 0, whole, scattered)
    gathers = np.where(grid.zero == 0, 0.0, weights)
    if software.overlap_gradients:
        rate = _rate(ranks, pricing)
        sums = left_over(sums, backward, pricing, rate)
        gathers = left_over(gathers, forward, pricing, rate)
    return np.where(grid.zero == 3, _copies_seconds(grid, held_elements, pricing), sums + gathers)


def _copies_seconds(grid: Grid, held_elements: Floats, pricing: Pricing) -> Floats:
    """HSDP: the groups that hold a full set of shards sum theirs once a step."""
    stride = (grid.tensor * grid.shards).astype(np.float64)
    ranks = group(grid.replicate.astype(np.float64), stride, pricing.machine)
    nbytes = pricing.software.reduce_bytes * held_elements / grid.shards
    return all_reduce_seconds(nbytes, ranks, pricing.machine, pricing.constants)
