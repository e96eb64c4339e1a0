"""Another mapping on the nodes that are left: which one, on which of them, and what it loses.

Pure: reads the state, changes nothing.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from phalanx.cluster.context import Context
from phalanx.cluster.gang.formation import choose_source
from phalanx.cluster.gang.node_rates import rated
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs.job import LONGEST_NS, ClusterJob, FallbackMapping, Gang
from phalanx.cluster.jobs.measured import shared_step_ns
from phalanx.cluster.placement.request import tensor_slots
from phalanx.cluster.protocol.messages import Source
from phalanx.cluster.recovery.prices import (
    horizon_ns,
    left_ns,
    restore_ns,
    slower_ns,
    step_ns,
    through_ns,
    to_come_gpu_ns,
)
from phalanx.cluster.units import MILLION


class PricedFallback(Struct, frozen=True, kw_only=True):
    """A mapping, the nodes that it would run on, and what that loses."""

    mapping: FallbackMapping
    nodes: tuple[int, ...]
    loss_gpu_ns: int


def best_fallback(
    ctx: Context, job: ClusterJob, gone: tuple[int, ...], missing_by_ns: int | None
) -> PricedFallback | None:
    """The mapping on the nodes that are left that loses least; None: there is none.

    ``missing_by_ns``: until the others are likely to be back; None: nobody can say.
    """
    placement, gang = job.placement, gang_of(job)
    assert placement is not None
    if not ctx.policy.recovery.remap or gang.ending is not None:
        return None
    away = dict.fromkeys(gone)
    left = tuple(node for node in placement.nodes if node not in away)
    best: PricedFallback | None = None
    newest, _ = _source(ctx, job, left)
    slots = {node: number for number, node in enumerate(gang.keepers)}
    for mapping in job.spec.fallbacks:
        if mapping.slots > len(left):
            continue
        nodes = _kept(gang, slots, left, mapping.slots)
        source = _source(ctx, job, nodes)
        # No committed step is given up for it that waiting would keep.
        if source[0] < newest or not _in_domains(ctx, mapping, nodes):
            continue
        loss = _loss(ctx, job, mapping, nodes, source, missing_by_ns)
        if best is None or loss < best.loss_gpu_ns:
            best = PricedFallback(mapping=mapping, nodes=nodes, loss_gpu_ns=loss)
    return best


def _kept(gang: Gang, slot: dict[int, int], left: tuple[int, ...], count: int) -> tuple[int, ...]:
    """So many of the nodes that are left, in their order.

    Given up first are those whose snapshots others have, and who have no others' alone.
    """
    slots_kept = {slot[node]: None for node in left if node in slot and node not in gang.lost}
    given_up: dict[int, None] = {}
    for node in reversed(left):
        if len(left) - len(given_up) == count:
            break
        if node in slot and gang.buddy_shift:
            shifts, count_kept = (gang.buddy_shift, -gang.buddy_shift), len(gang.keepers)
            beside = [(slot[node] + by) % count_kept for by in shifts]
            if not all(each in slots_kept for each in beside):
                continue
        elif node in slot:
            continue
        given_up[node] = None
        slots_kept.pop(slot.get(node, -1), None)
    rest = [node for node in left if node not in given_up]
    return tuple(rest[:count])


def _in_domains(ctx: Context, mapping: FallbackMapping, nodes: tuple[int, ...]) -> bool:
    """Whether every tensor group that lies across nodes stays in one NVLink domain."""
    wide = tensor_slots(mapping.gang)
    if wide == 1:
        return True
    domain = ctx.fleet.columns.domain
    groups = [nodes[first : first + wide] for first in range(0, len(nodes), max(1, wide))]
    return wide > 1 and all(len({int(domain[n]) for n in group}) == 1 for group in groups)


def _source(ctx: Context, job: ClusterJob, nodes: tuple[int, ...]) -> tuple[int, Source]:
    """The step that some nodes would go on from, and where it is."""
    whole = _whole(ctx, gang_of(job), nodes)
    return choose_source(ctx, job, job.committed if whole else -1)


def _whole(ctx: Context, gang: Gang, nodes: tuple[int, ...]) -> bool:
    """Whether some nodes together keep the snapshots of all slots."""
    there = np.zeros(len(ctx.fleet), np.bool_)
    there[list(nodes)] = True
    there[list(gang.lost)] = False
    kept = there[list(gang.keepers)]
    if gang.buddy_shift:
        kept |= np.roll(kept, -gang.buddy_shift)
    return bool(kept.size) and bool(kept.all())


def _loss(
    ctx: Context,
    job: ClusterJob,
    mapping: FallbackMapping,
    nodes: tuple[int, ...],
    restore_point: tuple[int, Source],
    missing_by_ns: int | None,
) -> int:
    placement, usual, (step, source) = job.placement, job.expected, restore_point
    assert placement is not None
    shape, on = mapping.gang, rated(ctx, nodes)
    gpus, had = shape.gpus(shape.replicas), job.spec.gang.gpus(placement.replicas)
    # As planned: what the job's own steps take over their plan is the same of both.
    before, after = shared_step_ns(job.spec, placement.replicas), mapping.expected.step_ns
    start_ns = usual.join_ns(cold=False) + usual.form_ns + restore_ns(mapping.expected, source)
    again_ns = (job.step - step) * step_ns(job) * after // before
    loss = through_ns(ctx, job, on, gpus, start_ns, again_ns) * gpus
    policy, back_ns = ctx.policy.recovery, LONGEST_NS
    if missing_by_ns is not None:
        back_ns = max(min(missing_by_ns, policy.repair_ns), policy.grow_after_ns)
        loss += return_ns(job) * had if back_ns < left_ns(job) else 0
    slow_ns = min(back_ns, horizon_ns(ctx, job))
    loss += had * slower_ns(ctx, job, MILLION * max(0, after - before) // before, back_ns)
    return loss + to_come_gpu_ns(ctx, job, on, gpus, slow_ns)


def return_ns(job: ClusterJob) -> int:
    """How long a gang stands still that saves its state and starts with its own mapping."""
    usual = job.expected
    saved = usual.checkpoint_ns + usual.flush_ns
    return saved + usual.join_ns(cold=True) + usual.form_ns + usual.restore_remote_ns
