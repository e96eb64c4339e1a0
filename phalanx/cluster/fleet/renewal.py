"""Nodes that describe themselves anew: they moved, became known better, or are other machines.

Where a node stands and what is learned of it holds at once, whatever runs there. Another machine
(fewer GPUs, another kind) is tested, and replaces what the fleet knows when nothing runs there;
until then jobs that still fit go on, and those that do not are moved elsewhere at once.
"""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.fleet import health
from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.node import Node, bad_node, features_of
from phalanx.cluster.placement.constraints import matches, parse
from phalanx.cluster.placement.request import barred_from
from phalanx.cluster.protocol.events import NodeDescribed
from phalanx.cluster.reasons import reason
from phalanx.cluster.recovery.recover import broken

CAUSE = Cause.NODE_CHANGED
HOST = ("cpus", "memory_bytes")  # may differ a little after every boot: no reason for a test
# Where it stands: no job holds a part of that, and the next decision goes by it.
STANDS = ("domain", "rails", "leaf", "pod", "rack", "power", "switch")
OFFERED = ("partition", "features")  # what jobs may have asked for


def differences(old: Node, new: Node) -> dict[str, tuple[object, object]]:
    """What differs between two descriptions of a node: (before, now) by field."""
    pairs = {key: (getattr(old, key), getattr(new, key)) for key in Node.__struct_fields__}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def on_described(ctx: Context, fact: NodeDescribed) -> None:
    """An agent that is connected describes its node anew."""
    node, wrong = fact.node, bad_node(fact.described)
    if wrong is not None or fact.described.name != ctx.fleet.nodes[node].name:
        problem = str(wrong or f"{fact.described.name} is the name of another node")
        ctx.notify(reason("bad_node", problem=problem), node=node, level="warning")
        return
    renew(ctx, node, fact.described)


def renew(ctx: Context, node: int, new: Node) -> None:
    """A known node describes itself: what differs is told, and taken over as soon as it can be."""
    changes = differences(ctx.fleet.nodes[node], new)
    if not changes:
        ctx.health.renewed.pop(node, None)
        return
    misfits = _misfits(ctx, node, new)
    at_once = _at_once(changes, moves=bool(misfits))
    what = ", ".join(f"{key} {_shown(old)} -> {_shown(now)}" for key, (old, now) in changes.items())
    code = "node_described" if len(at_once) == len(changes) else "node_changed"
    why = reason(code, node=new.name, what=what)
    small = not misfits and all(key in at_once or key in HOST for key in changes)
    ctx.notify(why, node=node, level="info" if small else "warning")
    if at_once:
        renewed = structs.replace(
            ctx.fleet.nodes[node], **{key: getattr(new, key) for key in at_once}
        )
        ctx.fleet.renew(node, renewed)
        ctx.look_at_queue(capacity=True)
    ctx.health.renewed[node] = new
    if ctx.fleet.nodes[node] == new:
        del ctx.health.renewed[node]
    for number in misfits:
        broken(ctx, ctx.view.jobs[number], node, CAUSE, lost=False)
    if not small:
        health.incident(ctx, node, CAUSE)
        health.doubt(ctx, node, why)
    take_over(ctx)
    if not small and not ctx.fleet.held[node]:
        health.examine(ctx, node)


def _at_once(changes: dict[str, tuple[object, object]], *, moves: bool) -> list[str]:
    """What holds at once. ``moves``: jobs leave the node, which is tested before it gets others."""
    keys = STANDS if moves else (*STANDS, *OFFERED)
    learned = "kind" in changes and changes["kind"][0] == ""
    return [key for key in changes if key in keys or (key == "kind" and learned)]


def take_over(ctx: Context) -> None:
    """Replaces the descriptions of nodes that hold no work any more."""
    for node, new in list(ctx.health.renewed.items()):
        if not ctx.fleet.held[node]:
            ctx.fleet.renew(node, new)
            del ctx.health.renewed[node]
            ctx.look_at_queue(capacity=True)


def _misfits(ctx: Context, node: int, new: Node) -> list[int]:
    """Jobs on a node that cannot go on there; all of them where they do not fit together."""
    jobs_held = ctx.fleet.held[node]
    specs = {number: ctx.view.jobs[number].spec for number in jobs_held}
    cpus = sum(spec.gang.slot_cpus for spec in specs.values())
    memory = sum(spec.gang.slot_memory_bytes for spec in specs.values())
    if cpus > new.cpus or memory > new.memory_bytes:
        return list(jobs_held)
    barred = {number: barred_from(ctx.policy.queue, spec) for number, spec in specs.items()}
    return [
        number
        for number, spec in specs.items()
        if not _fits(spec, jobs_held[number].gpus, new, barred[number])
    ]


def _fits(spec: JobSpec, mask: int, new: Node, barred: tuple[str, ...]) -> bool:
    gpus = spec.gang.slot_gpus if spec.gang.whole_nodes else mask.bit_length()
    there = new.partition == spec.partition if spec.partition else new.partition not in barred
    return gpus <= new.gpus and there and matches(parse(spec.constraint), features_of(new))


def _shown(value: object) -> str:
    return "|".join(value) if isinstance(value, tuple) else str(value) or "none"
