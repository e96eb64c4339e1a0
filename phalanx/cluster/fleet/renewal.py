"""Nodes that come back as other machines: fewer GPUs, another kind, less memory.

What the fleet knows of a node is replaced when nothing runs there. Until then jobs that still fit
go on, and those that do not are moved elsewhere at once.
"""

from __future__ import annotations

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.fleet import health
from phalanx.cluster.fleet.node import Node, features_of
from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.placement.constraints import matches, parse
from phalanx.cluster.placement.request import barred_from
from phalanx.cluster.reasons import reason
from phalanx.cluster.recovery.recover import broken

CAUSE = Cause.NODE_CHANGED
HOST = ("cpus", "memory_bytes")  # may differ a little after every boot: no reason for a test


def differences(old: Node, new: Node) -> dict[str, tuple[object, object]]:
    """What differs between two descriptions of a node: (before, now) by field."""
    pairs = {key: (getattr(old, key), getattr(new, key)) for key in Node.__struct_fields__}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def renew(ctx: Context, node: int, new: Node) -> None:
    """A known node describes itself: what differs is told, and taken over as soon as it can be."""
    changes = differences(ctx.fleet.nodes[node], new)
    if not changes:
        ctx.health.renewed.pop(node, None)
        return
    what = ", ".join(f"{key} {_shown(old)} -> {_shown(now)}" for key, (old, now) in changes.items())
    why = reason("node_changed", node=new.name, what=what)
    small = all(key in HOST for key in changes)
    ctx.notify(why, node=node, level="info" if small else "warning")
    ctx.health.renewed[node] = new
    for number in _misfits(ctx, node, new):
        broken(ctx, ctx.view.jobs[number], node, CAUSE, lost=False)
        small = False
    if not small:
        health.incident(ctx, node, CAUSE)
        health.doubt(ctx, node, why)
    take_over(ctx)
    if not small and not ctx.fleet.held[node]:
        health.examine(ctx, node)


def take_over(ctx: Context) -> None:
    """Replaces the descriptions of nodes that hold no work any more."""
    for node, new in list(ctx.health.renewed.items()):
        if not ctx.fleet.held[node]:
            ctx.fleet.renew(node, new)
            del ctx.health.renewed[node]
            ctx.look_at_queue(capacity=True)


def _misfits(ctx: Context, node: int, new: Node) -> list[int]:
    """Jobs on a node that cannot go on there; all of them where they do not fit together."""
    held = ctx.fleet.held[node]
    specs = {number: ctx.view.jobs[number].spec for number in held}
    cpus = sum(spec.gang.slot_cpus for spec in specs.values())
    memory = sum(spec.gang.slot_memory_bytes for spec in specs.values())
    if cpus > new.cpus or memory > new.memory_bytes:
        return list(held)
    barred = {number: barred_from(ctx.policy.queue, spec) for number, spec in specs.items()}
    return [
        number
        for number, spec in specs.items()
        if not _fits(spec, held[number].gpus, new, barred[number])
    ]


def _fits(spec: JobSpec, mask: int, new: Node, barred: tuple[str, ...]) -> bool:
    gpus = spec.gang.slot_gpus if spec.gang.whole_nodes else mask.bit_length()
    there = new.partition == spec.partition if spec.partition else new.partition not in barred
    return gpus <= new.gpus and there and matches(parse(spec.constraint), features_of(new))


def _shown(value: object) -> str:
    return "|".join(value) if isinstance(value, tuple) else str(value) or "none"
